"""Risk: scales of 8 bits, or the factors of their rows, are read as other numbers, or lost on the way to a kernel, a
file, a layer, a copy.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import lowbit
from lowbit import DtypeError, FormatError, SchemeError, ShapeError, extension, reference
from lowbit.commands.selftest import random_weight, why_wrong
from lowbit.dtypes import WEIGHT_TYPES, kernel_type, weight_type
from lowbit.pack import layout as layouts
from lowbit.scheme import Scheme, why_not
from lowbit.tensor import QuantTensor

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
NARROW = [E8M0, E4M3]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def example(scale_type, dtype="float4_e2m1", shape=(37, 301), group=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    qt = random_weight(kernel_type(dtype), shape, group, "none", scale_type, generator)
    if qt.row_scales is not None:
        qt.row_scales.mul_(torch.randint(2, (shape[0], 1), generator=generator) * 2 - 1)  # of either sign
    return qt


def every_scale(scale_type):
    """A weight with one group for each number of the type, all codes 2 (of float4_e2m1: 1.0)."""
    bits = torch.arange(256, dtype=torch.uint8)
    finite = [int(b) for b in bits if b != 255] if scale_type == E8M0 else [int(b) for b in bits if b & 127 != 127]
    scales = torch.tensor([finite], dtype=torch.uint8).view(scale_type)
    factors = torch.ones(1, 1) if scale_type == E4M3 else None
    codes = torch.full((1, 16 * len(finite)), 2, dtype=torch.uint8)
    return QuantTensor.from_codes(codes, scales, dtype="float4_e2m1", group_size=16, row_scales=factors), finite


def assert_product(y, x, qt):
    assert y.dtype == x.dtype
    assert (reason := why_wrong(y, reference.matmul(x, qt))) is None, reason


# ---- what the numbers are ------------------------------------------------------------------------------------------


def test_e8m0_means_powers_of_two_from_the_first_to_the_last():
    qt, finite = every_scale(E8M0)
    expected = np.exp2(np.array(finite, dtype=np.float64) - 127).repeat(16)
    assert np.array_equal(qt.dequantize(torch.float64).numpy()[0], expected)
    assert np.array_equal(reference.dequantize(qt).numpy()[0], expected)


def test_e4m3_means_what_torch_says_times_the_factor_of_its_row():
    qt, finite = every_scale(E4M3)
    torch_says = torch.tensor(finite, dtype=torch.uint8).view(E4M3).double().repeat_interleave(16)
    for factor in (1.0, -0.37, 2.0**-40, 3e5):
        qt.row_scales.fill_(factor)
        expected = torch_says * float(qt.row_scales)
        for found in (qt.dequantize(torch.float64), reference.dequantize(qt)):
            assert torch.equal(found[0], expected)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("scale_type", NARROW, ids=str)
def test_every_scale_survives_packing(scale_type, layout):
    """As the same byte, and as the same number in what kernels read."""
    qt, _ = every_scale(scale_type)
    pw = lowbit.pack_weight(qt, layout=layout)
    assert pw.unpack() == qt
    assert pw.scales.dtype == getattr(torch, qt.scheme.held_scales(layout))
    held = pw.scales.double() if layout == "nvidia" else pw.scales.float().double()
    assert torch.equal(held[0, :, 0], qt.scales.float().double()[0])
    assert (pw.scales.element_size() == 1) == (layout == "cpu")


@pytest.mark.parametrize("scale_type", NARROW, ids=str)
def test_ragged_weights_pack_and_come_back(scale_type):
    for n, k, group in ((1, 16, 16), (17, 40, 32), (70, 301, 64), (16, 300, -1)):
        qt = example(scale_type, shape=(n, k), group=group)
        for layout in layouts.LAYOUTS:
            assert lowbit.pack_weight(qt, layout=layout).unpack() == qt


# ---- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [w.name for w in WEIGHT_TYPES if w.kind != "uint"])
@pytest.mark.parametrize("isa", ["amx", "avx512", "avx2", "scalar"])
def test_every_kernel_agrees_with_the_reference(isa, dtype):
    if isa not in extension.isas():
        pytest.skip(f"this CPU lacks {isa}")
    with extension.force_isa(isa):
        for scale_type in NARROW:
            for group in (16, 128, -1):
                qt = example(scale_type, dtype, group=group, seed=group + 2)
                pw = lowbit.pack_weight(qt)
                for i, m in enumerate((1, 2, 19)):
                    x = torch.randn(m, 301, generator=torch.Generator().manual_seed(m)).to(FLOATS[i])
                    assert_product(lowbit.matmul(x, pw), x, qt)
                x = torch.randn(5, 301, generator=torch.Generator().manual_seed(5))
                expected = reference.matmul(x, qt, act="int8")
                found = lowbit.matmul(x, pw, act="int8").double()
                assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("isa", ["avx512", "avx2", "scalar"])
def test_the_smallest_and_the_largest_scale_multiply(isa):
    """2^-127 is a subnormal number of fp32, and the bits of E4M3's smallest ones are other than those of the rest."""
    if isa not in extension.isas():
        pytest.skip(f"this CPU lacks {isa}")
    with extension.force_isa(isa):
        for scale_type in NARROW:
            qt, _ = every_scale(scale_type)
            k = qt.shape[1]
            x = torch.zeros(k // 16, k)
            x[torch.arange(k // 16), torch.arange(0, k, 16)] = 1
            assert torch.equal(lowbit.matmul(x, lowbit.pack_weight(qt))[:, 0], qt.scales.float()[0])


@pytest.mark.parametrize("scale_type", NARROW, ids=str)
def test_gradients_are_those_of_the_float_weight(scale_type):
    qt = example(scale_type)
    for layout in layouts.LAYOUTS:
        pw = lowbit.pack_weight(qt, layout=layout)
        if layout == "cpu":
            x = torch.randn(3, 301, requires_grad=True)
            (dx,) = torch.autograd.grad(lowbit.matmul(x, pw).sum(), x)
            torch.testing.assert_close(dx, qt.dequantize(torch.float32).sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)
        assert torch.equal(pw.dequantize(), qt.dequantize())


def test_opcheck_with_factors_of_rows():
    pw = lowbit.pack_weight(example(E4M3, shape=(40, 96), group=32))
    held, x = (pw.codes, pw.scales, pw.zeros), torch.randn(3, 96)
    # Why without its first: it compares inputs by arithmetic, which torch's CPU lacks for these types.
    tests = {"test_utils": ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")}
    out, dy = torch.zeros(3, 40), torch.randn(3, 40, requires_grad=True)
    torch.library.opcheck(
        torch.ops.lowbit.matmul_out, (x, *held, None, *pw.numbers, 0, out, None, pw.row_scales), **tests
    )
    trained = (x.requires_grad_(), *held, None, *pw.numbers, 0, None, pw.row_scales)
    torch.library.opcheck(torch.ops.lowbit.matmul_grad, trained, **tests)
    torch.library.opcheck(torch.ops.lowbit.matmul_grad_x, (dy, *held, *pw.numbers, None, pw.row_scales), **tests)


# ---- files, layers, copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_type", NARROW, ids=str)
def test_files_pickles_and_copies_keep_every_byte(scale_type, tmp_path):
    qt = example(scale_type)
    qt.save(tmp_path / "w.safetensors")
    assert QuantTensor.load(tmp_path / "w.safetensors") == qt
    assert pickle.loads(pickle.dumps(qt)) == qt and copy.deepcopy(qt) == qt and qt.clone() == qt
    other = qt.clone()
    (other.scales.view(torch.uint8) if scale_type == E8M0 else other.row_scales)[0, 0] += 1
    assert other != qt


@pytest.mark.parametrize("scale_type", NARROW, ids=str)
def test_a_layer_keeps_them_through_all_that_happens_to_layers(scale_type):
    qt, x = example(scale_type), torch.randn(4, 301)
    layer = lowbit.Linear.from_quant_tensor(qt, dtype=torch.float32)
    expected = layer(x)
    assert layer.layout == "cpu" and layer.quant_tensor() == qt
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected) and other.quant_tensor() == qt
    state = layer.state_dict()
    assert state["scales"].dtype == scale_type and ("row_scales" in state) == (scale_type == E4M3)
    fresh = lowbit.Linear(301, 37, bias=False, dtype=torch.float32, scheme=qt.scheme).prepare()
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), expected) and fresh.quant_tensor() == qt
    for _ in range(2):
        layer.half().float()
        layer.unprepare()
        assert layer.quant_tensor() == qt
        layer.prepare()
    assert torch.equal(layer(x), expected)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)


def test_widened_scales_come_back_to_the_type_that_kernels_read():
    """Tools that prepare a model for training make float32 of all 16-bit parameters, past every hook."""
    qt = example(E8M0)
    layer = lowbit.Linear.from_quant_tensor(qt, dtype=torch.float32)
    layer.scales.data = layer.scales.data.float()
    layer(torch.randn(1, 301))
    assert layer.scales.dtype == E8M0 and layer.quant_tensor() == qt


def test_layers_with_other_factors_share_a_product():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for seed, (name, linear) in enumerate(list(model.model.named_modules())):
        if isinstance(linear, nn.Linear):
            qt = example(E4M3, shape=(linear.out_features, linear.in_features), seed=seed)
            qt.row_scales.mul_(0.01 * (seed + 1))
            model.model.set_submodule(name, lowbit.Linear.from_quant_tensor(qt, dtype=torch.float32))
    ids, before = torch.arange(9)[None], {k: v.clone() for k, v in model.state_dict().items()}
    expected = model(ids).logits
    lowbit.fuse(model)
    torch.testing.assert_close(model(ids).logits, expected)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    model.load_state_dict(before)
    lowbit.unfuse(model)
    torch.testing.assert_close(model(ids).logits, expected)


# ---- what is refused -----------------------------------------------------------------------------------------------

CODES, BYTES = torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("scales", "options", "error", "words"),
    [
        (BYTES.view(E4M3), {}, SchemeError, "float8_e4m3fn go with row_scales"),
        (BYTES.view(E8M0), {"row_scales": torch.ones(2, 1)}, SchemeError, "e8m0fnu go with no row_scales"),
        (torch.ones(2, 2).half(), {"row_scales": torch.ones(2, 1)}, SchemeError, "float16 go with no row_scales"),
        (BYTES.view(E4M3), {"row_scales": torch.ones(2)}, ShapeError, r"row_scales must have shape \(2, 1\)"),
        (BYTES.view(E4M3), {"row_scales": torch.ones(2, 1).half()}, DtypeError, "row_scales must be float32"),
        (BYTES.view(E8M0), {"zeros": BYTES.view(E8M0), "zero_kind": "min"}, SchemeError, "without zeros"),
        (BYTES.view(torch.float8_e5m2), {}, DtypeError, "float8_e8m0fnu, float8_e4m3fn, got float8_e5m2"),
        (BYTES, {}, DtypeError, "got uint8"),
    ],
)
def test_what_does_not_go_together_is_refused(scales, options, error, words):
    with pytest.raises(error, match=words):
        QuantTensor.from_codes(CODES, scales, dtype="int4", group_size=16, **options)


def test_nan_is_refused():
    for scale_type, bits in ((E8M0, 255), (E4M3, 127), (E4M3, 255)):
        qt, _ = every_scale(scale_type)
        qt.scales.view(torch.uint8)[0, 3] = bits
        with pytest.raises(FormatError, match=r"weight.scales: .* 1 of \d+ are NaN"):
            qt.validate()
    qt, _ = every_scale(E4M3)
    qt.row_scales.fill_(torch.nan)
    with pytest.raises(FormatError, match="weight.row_scales"):
        qt.validate()


def test_types_with_zeros_say_why_not():
    reason = why_not("uint4", zero_kind="zero", scale_type="float8_e8m0fnu")
    assert "float8_e8m0fnu go without zeros" in reason and "'zero'" in reason
    with pytest.raises(SchemeError, match="without zeros"):
        Scheme.make("uint4", 32, None, "float8_e4m3fn")
    assert why_not("int4", zero_kind="none", scale_type="float8_e4m3fn", family="decode") is None
    assert weight_type("int4") == Scheme.make("int4", 32, None, "float8_e8m0fnu").weight


def test_kernels_of_a_gpu_refuse_bytes_as_scales():
    """Only layout nvidia's own form of them."""
    pw = lowbit.pack_weight(example(E4M3, shape=(40, 96), group=32))
    bad = torch.ones(40, 1, dtype=torch.float64)
    out, x = torch.zeros(3, 40), torch.randn(3, 96)
    for row_scales, words in ((bad, "row_scales must be float32"), (torch.ones(39, 1), "row_scales must have shape")):
        with pytest.raises(RuntimeError, match=words):
            torch.ops.lowbit.matmul_out(x, pw.codes, pw.scales, None, None, *pw.numbers, 0, out, None, row_scales)
