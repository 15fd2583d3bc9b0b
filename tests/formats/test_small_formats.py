"""Risk: AutoRound's zeros are off by one, BitNet's scale multiplies, an expert gets another's scales, NVFP4's global
scale divides.
"""

import pytest
import torch

from lowbit import FormatError, reference
from lowbit.checkpoint.formats import find

from . import test_awq, test_gptq
from .test_compressed_tensors import fp4
from .test_fp8 import weights as float8_weights
from .words import floats, only, table

# ---- AutoRound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("packing, version", [("auto_round:auto_gptq", "gptq"), ("auto_round:gptqmodel", "gptq_v2")])
def test_auto_round_is_gptq_of_the_version_that_packing_says(packing, version, sym):
    config, tensors, weight = test_gptq.checkpoint(4, version=version, sym=sym)
    made = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": sym}
    assert torch.equal(reference.dequantize(only(find(made), tensors)), weight)


def test_auto_round_in_the_packing_of_awq():
    _, tensors, weight = test_awq.checkpoint()
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 32}
    assert torch.equal(reference.dequantize(only(find({**config, "sym": False}), tensors)), weight)


def test_auto_round_zeros_off_by_one_are_noticed():
    zeros = [[8] * 64] * 4
    config, tensors, _ = test_gptq.checkpoint(4, n=64, k=128, version="gptq", zeros=zeros)
    tensors["qweight"] = torch.full_like(tensors["qweight"], -0x77777778)  # every code is 8
    made = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
    only(find({**made, "packing_format": "auto_round:auto_gptq"}), tensors)
    with pytest.raises(FormatError, match=r"m.up: codes lie \+1.00 from zeros .* is packing_format right"):
        only(find({**made, "packing_format": "auto_round"}), tensors)
    with pytest.raises(FormatError, match="packing_format must be one of"):
        find({**made, "packing_format": "auto_round:marlin"})


def test_auto_round_extra_config_overrides_a_layer():
    _, tensors, weight = test_gptq.checkpoint(8, version="gptq", sym=True)
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
    for pattern in ("m.up", ".*up$"):
        fmt = find(
            {**config, "sym": True, "extra_config": {"x": {"bits": 2}, pattern: {"bits": 8, "data_type": "int"}}}
        )
        assert torch.equal(reference.dequantize(only(fmt, tensors)), weight)


# ---- BitNet ----------------------------------------------------------------------------------------------------------


def bitnet(n=16, k=40):
    values, quarter = table(n, k, -1, 1), n // 4
    packed = [[0] * k for _ in range(quarter)]
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            packed[i % quarter][j] |= (value + 1) << (2 * (i // quarter))
    return torch.tensor(packed, dtype=torch.uint8), torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("kind, factor", [("bitlinear", 1 / 3), ("autobitlinear", 3.0)])
def test_bitnet_scales_divide_or_multiply(kind, factor):
    packed, values = bitnet()
    config = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    tensors = {"weight": packed, "weight_scale": torch.tensor([3.0]).bfloat16()}
    qt = only(find(config), tensors)
    expected = values * torch.tensor(factor, dtype=torch.float32).double()
    assert qt.dtype.name == "int2" and torch.equal(reference.dequantize(qt), expected)
    transformers = pytest.importorskip("transformers.integrations.bitnet", reason="transformers is not installed")
    assert torch.equal(transformers.unpack_weights(packed, torch.float64), values)


def test_bitnet_refuses_what_it_cannot_be():
    packed, _ = bitnet()
    tensors = {"weight": packed, "weight_scale": torch.ones(1)}
    config = {"quant_method": "bitnet"}
    for bad, words in ((packed | 3, "are 3"), (packed.int(), "weight must be uint8, got int32")):
        with pytest.raises(FormatError, match=words):
            only(find(config), {**tensors, "weight": bad})
    with pytest.raises(FormatError, match="weight_scale must be one number other than 0"):
        only(find(config), {**tensors, "weight_scale": torch.zeros(1)})
    for changed, words in (({"quantization_mode": "online"}, "offline"), ({"use_rms_norm": True}, "must be false")):
        with pytest.raises(FormatError, match=words):
            find({**config, **changed})


# ---- MXFP4 of GPT-OSS ------------------------------------------------------------------------------------------------


def mxfp4():
    """``(config, tensors by key, the weights float64 [experts, n, k])``."""
    experts, n, k = 3, 8, 64
    parts = [fp4(n * experts, k)]
    data, values = parts[0][0].view(experts, n, 2, 16), parts[0][1].view(experts, n, k)
    exponents = torch.tensor(table(experts * n, 2, 0, 254), dtype=torch.uint8).view(experts, n, 2)
    config = {"num_local_experts": experts, "quantization_config": {"quant_method": "mxfp4"}}
    keys = {
        "l.0.mlp.experts.gate_up_proj_blocks": data,
        "l.0.mlp.experts.gate_up_proj_scales": exponents,
        "l.0.mlp.experts.gate_up_proj_bias": torch.zeros(experts, n),
    }
    factor = [[[2.0 ** (e - 127) for e in row for _ in range(32)] for row in rows] for rows in exponents.tolist()]
    return config, keys, values * torch.tensor(factor, dtype=torch.float64)


def test_mxfp4_experts_are_layers_of_their_own():
    config, keys, weights = mxfp4()
    data, exponents = (keys[f"l.0.mlp.experts.gate_up_proj_{role}"] for role in ("blocks", "scales"))
    fmt = find(config)
    layers = fmt.layers(keys)
    assert [layer.name for layer in layers] == [f"l.0.mlp.experts.{i}.gate_up_proj" for i in range(3)]
    for layer, weight in zip(layers, weights):
        qt = fmt.decode(layer, {role: keys[key] for role, key in layer.tensors.items()})
        assert torch.equal(reference.dequantize(qt), weight)
    with pytest.raises(FormatError, match=r"blocks must have shape \(3, any, any, 16\), got \(2, 8, 2, 16\)"):
        fmt.decode(layers[0], {"blocks": data[:2], "scales": exponents[:2]})
    with pytest.raises(FormatError, match=r"scales must have shape \(3, 8, 2\)"):
        fmt.decode(layers[0], {"blocks": data, "scales": exponents[:2]})
    with pytest.raises(FormatError, match="num_experts must be int, got None"):
        find(config["quantization_config"]).layers(keys)


# ---- ModelOpt --------------------------------------------------------------------------------------------------------


def modelopt(algorithm):
    if algorithm == "FP8":
        weight, values = float8_weights(8, 64)
        factor = float(torch.tensor(0.37, dtype=torch.float32))
        expected = torch.tensor(values, dtype=torch.float64) * factor
        return {"weight": weight, "weight_scale": torch.tensor(0.37)}, expected
    data, values = fp4(8, 64)
    scales, total = floats(8, 4, torch.float32).abs().to(torch.float8_e4m3fn), torch.tensor(0.37)
    tensors = {"weight": data, "weight_scale": scales, "weight_scale_2": total, "input_scale": torch.tensor(1.0)}
    return tensors, values * (scales.double() * total.double()).repeat_interleave(16, 1)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    ],
)
def test_modelopt_nvfp4_multiplies_by_its_global_scale(config):
    tensors, weight = modelopt("NVFP4")
    qt = only(find(config), tensors)
    assert torch.equal(reference.dequantize(qt), weight)
    # As the library does it, in float32: scales times weight_scale_2, rounded, times the codes.
    scales = (tensors["weight_scale"].float() * tensors["weight_scale_2"]).repeat_interleave(16, 1)
    assert torch.equal(qt.dequantize(), fp4(8, 64)[1].float() * scales)
    with pytest.raises(FormatError, match=r"weight_scale must have shape \(8, 4\)"):
        only(find(config), {**tensors, "weight_scale": tensors["weight_scale"][:, 1:]})


def test_modelopt_fp8_and_what_is_not_read():
    tensors, weight = modelopt("FP8")
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert torch.equal(reference.dequantize(only(find(config), tensors)), weight)
    with pytest.raises(FormatError, match="quant_algo must be one of NVFP4, FP8, got 'W4A8_AWQ'"):
        find({**config, "quant_algo": "W4A8_AWQ"})
