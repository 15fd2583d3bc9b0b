"""Risk: GPTQModel or AutoGPTQ reads other weights than lowbit wrote, or lowbit reads others than they packed.

Both libraries run on the CPU here: their layers for plain torch, and their own packing.
"""

import importlib.util

import pytest
import torch

from lowbit import reference
from lowbit.checkpoint.export import to_gptq
from lowbit.checkpoint.formats import find

from .test_export import weight
from .test_gptq import shuffled
from .words import floats, only, table

N, K = 64, 128
ORDER = torch.tensor(shuffled(K))
ROLES = ("qweight", "qzeros", "scales", "g_idx")


@pytest.fixture
def gptqmodel(monkeypatch):
    """A function that makes the library's layer for plain torch."""
    monkeypatch.setenv("GPTQMODEL_DISABLE_PACK_EXT", "1")  # Why: it would compile its packing
    name = "gptqmodel.nn_modules.qlinear.torch"
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"gptqmodel is not installed, or not all that it needs: {error}")
    from gptqmodel.quantization.config import FORMAT

    def layer(bits, group_size, version, sym, ordered):
        options = {"sym": sym, "desc_act": ordered, "in_features": K, "out_features": N, "bias": False}
        return package.TorchLinear(bits=bits, group_size=group_size, format=FORMAT(version), **options).eval()

    return layer


@pytest.fixture
def auto_gptq():
    """The class of AutoGPTQ's layer for plain torch."""
    package = importlib.util.find_spec("auto_gptq")
    if package is None:
        pytest.skip("auto-gptq is not installed")
    # Why by its path: the package itself needs a transformers of long ago, and this file of it does not.
    path = f"{package.submodule_search_locations[0]}/nn_modules/qlinear/qlinear_cuda.py"
    spec = importlib.util.spec_from_file_location("auto_gptq_layer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.QuantLinear


def numbers(bits, group_size, sym, ordered):
    """(scales [N, G], zeros [N, G], g_idx [K], a linear layer whose weight they hold), all float32."""
    groups = 1 if group_size == -1 else K // group_size
    q = torch.tensor(table(N, K, 0, (1 << bits) - 1, seed=bits)).float()
    zeros = torch.tensor(table(N, groups, 1, (1 << bits) - 1, seed=1)).float()
    if sym:
        zeros[:] = 1 << (bits - 1)
    scales = floats(N, groups).float().abs() + 2**-10
    scales = scales.half().float()
    g_idx = torch.arange(K) // (K // groups)
    g_idx = (g_idx[ORDER] if ordered else g_idx).int()
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = scales[:, g_idx.long()] * (q - zeros[:, g_idx.long()])
    return scales, zeros, g_idx, linear


def config(bits, group_size, version, sym, ordered):
    made = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym, "desc_act": ordered}
    return made if version == "gptq" else {**made, "checkpoint_format": version}


WIDTHS = [(version, bits) for version in ("gptq", "gptq_v2") for bits in (2, 3, 4, 8)]
WIDTHS += [("gptq_p", bits) for bits in range(2, 9)]


@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize(("group_size", "ordered"), [(32, False), (32, True), (-1, False)])
@pytest.mark.parametrize(("version", "bits"), [pair for pair in WIDTHS if pair[0] != "gptq"])
def test_gptqmodel_reads_what_is_written(gptqmodel, version, bits, kind, group_size, ordered):
    qt = weight(f"{kind}{bits}", group_size=group_size, perm=ORDER.int() if ordered else None)
    tensors, settings = to_gptq(qt, planar=version == "gptq_p")
    assert settings["checkpoint_format"] == version
    layer = gptqmodel(bits, group_size, version, settings["sym"], ordered)
    for role in ROLES:
        held = getattr(layer, role)
        assert tensors[role].shape == held.shape and tensors[role].dtype == held.dtype, role
        setattr(layer, role, tensors[role])
    assert torch.equal(layer.dequantize_weight().t(), qt.dequantize(torch.float16))


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("group_size", "ordered"), [(32, False), (32, True), (-1, False)])
@pytest.mark.parametrize(("version", "bits"), WIDTHS)
def test_what_gptqmodel_packs_is_read_exactly(gptqmodel, version, bits, sym, group_size, ordered):
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    scales, zeros, g_idx, linear = numbers(bits, group_size, sym, ordered)
    layer = gptqmodel(bits, group_size, version, sym, ordered)
    layer.pack(linear, scales, zeros, g_idx)
    if version == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, group_size=group_size))
    held = {role: getattr(layer, role).clone() for role in ROLES}
    qt = only(find(config(bits, group_size, version, sym, ordered)), held)
    assert qt.dtype.name == ("int" if sym else "uint") + str(bits) and (qt.perm is not None) == ordered
    assert torch.equal(reference.dequantize(qt), linear.weight.double())


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("group_size", "ordered"), [(32, False), (32, True), (-1, False)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_auto_gptq_packs_is_read_exactly(auto_gptq, bits, sym, group_size, ordered):
    scales, zeros, g_idx, linear = numbers(bits, group_size, sym, ordered)
    layer = auto_gptq(bits, group_size, K, N, False)
    layer.pack(linear, scales, zeros.clone(), g_idx)  # it changes zeros
    qt = only(find(config(bits, group_size, "gptq", sym, ordered)), {role: getattr(layer, role) for role in ROLES})
    assert torch.equal(reference.dequantize(qt), linear.weight.double())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_any_words_mean_what_auto_gptq_makes_of_them(auto_gptq, bits):
    """Zeros that fill their bits, which v1 stores for 2^b, among them."""
    layer, pick = auto_gptq(bits, 32, K, N, False), torch.Generator().manual_seed(0)
    for role in ("qweight", "qzeros"):
        words = torch.randint(-(1 << 31), 1 << 31, getattr(layer, role).shape, generator=pick).int()
        setattr(layer, role, words)
    layer.scales = floats(K // 32, N).float()
    held = {role: getattr(layer, role) for role in ROLES}
    qt = only(find(config(bits, 32, "gptq", False, False)), held)
    assert qt.zeros.max() == 1 << bits
    assert torch.equal(layer(torch.eye(K)).t(), reference.dequantize(qt).float())
