"""Risk: old and new packing are mixed up, zero points miss their offset, a global scale multiplies, a group's scheme
reaches a layer of another.
"""

import random

import pytest
import torch

from lowbit import FormatError, reference
from lowbit.checkpoint.formats import find

from .test_fp8 import weights as float8_weights
from .words import floats, int32, only, padded, stream, table, transposed


def config(layout, targets=("Linear",), version="0.20.0", **weights):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": list(targets), "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "version": version,
    }  # fmt: skip


def packed(bits, n=32, k=160, size=32, symmetric=True, pack=stream, dtype=torch.bfloat16, order=None):
    reach = k if size == -1 else size
    groups, half = -(-k // reach), 1 << (bits - 1)
    q = table(n, k, -half, half - 1, seed=bits)
    z = table(n, groups, -half, half - 1, seed=1)
    scales = floats(n, groups, dtype)
    of_input = [j // reach for j in range(k)]
    if order:
        of_input = [of_input[i] for i in order]
    weight = torch.zeros(n, k, dtype=torch.float64)
    for i in range(n):
        for j in range(k):
            group = of_input[j]
            weight[i, j] = scales[i, group].double() * (q[i][j] - (0 if symmetric else z[i][group]))
    tensors = {
        "weight_packed": int32([pack([v + half for v in row], bits) for row in q]),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if order:
        tensors["weight_g_idx"] = torch.tensor(of_input, dtype=torch.int32)
    if not symmetric:
        columns = [pack([v + half for v in column], bits) for column in transposed(z)]
        tensors["weight_zero_point"] = int32(transposed(columns))
    settings = {"num_bits": bits, "symmetric": symmetric, "group_size": size}
    if size == -1:
        settings.update(strategy="channel", group_size=None)
    return settings, tensors, weight


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pack", [stream, padded])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_packed_weights_of_both_layouts_are_exact(bits, pack, symmetric):
    settings, tensors, weight = packed(bits, symmetric=symmetric, pack=pack)
    qt = only(find(config("pack-quantized", **settings)), tensors)
    assert qt.dtype.name == ("int" if symmetric else "uint") + str(bits)
    assert torch.equal(reference.dequantize(qt), weight)


@pytest.mark.parametrize("n, k, size", [(5, 37, 16), (3, 50, -1), (32, 96, 48), (7, 10, -1)])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_odd_shapes_are_exact(n, k, size, bits):
    for symmetric in (True, False):
        settings, tensors, weight = packed(bits, n, k, size, symmetric)
        qt = only(find(config("pack-quantized", **settings)), tensors)
        assert torch.equal(reference.dequantize(qt), weight)


@pytest.mark.parametrize("pack, version", [(stream, "0.18.1"), (padded, "0.17.0"), (padded, "0.9.4")])
def test_where_both_layouts_fit_the_version_tells(pack, version):
    settings, tensors, weight = packed(3, n=4, k=20, size=-1, pack=pack)
    assert tensors["weight_packed"].shape == (4, 2)
    fmt = find(config("pack-quantized", version=version, **settings))
    assert torch.equal(reference.dequantize(only(fmt, tensors)), weight)
    with pytest.raises(FormatError, match="fits two layouts: expected the version"):
        only(find(config("pack-quantized", version=None, **settings)), tensors)


def test_the_old_order_of_groups_becomes_a_perm():
    order = list(range(160))
    random.Random(5).shuffle(order)
    settings, tensors, weight = packed(4, symmetric=False, order=order)
    qt = only(find(config("pack-quantized", actorder="group", **settings)), tensors)
    assert qt.perm is not None and torch.equal(reference.dequantize(qt), weight)
    settings, tensors, weight = packed(4)
    tensors["weight_g_idx"] = torch.full((160,), -1, dtype=torch.int32)
    qt = only(find(config("pack-quantized", **settings)), tensors)
    assert qt.perm is None and torch.equal(reference.dequantize(qt), weight)


def in_bytes(strategy, bits, symmetric):
    n, k, half = 20, 96, 1 << (bits - 1)
    shape, (rows, columns) = {
        "tensor": ((1,), (n, k)), "channel": ((n, 1), (1, k)), "group": ((n, 3), (1, 32)), "block": ((3, 6), (8, 16)),
    }[strategy]  # fmt: skip
    q, scales = table(n, k, -half, half - 1), floats(n, 6, torch.bfloat16).flatten()[: shape[0] * shape[-1]].view(shape)
    grid = scales.reshape(-1, shape[-1]) if len(shape) == 2 else scales.view(1, 1)
    points = torch.tensor(table(*grid.shape, -half, half - 1), dtype=torch.int8)
    tensors = {"weight": torch.tensor(q, dtype=torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = points.reshape(shape)
    weight = torch.zeros(n, k, dtype=torch.float64)
    for i in range(n):
        for j in range(k):
            at = (i // rows, j // columns)
            weight[i, j] = grid[at].double() * (q[i][j] - (0 if symmetric else int(points[at])))
    settings = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy, "block_structure": [8, 16]}
    settings["group_size"] = 32 if strategy == "group" else None
    return settings, tensors, weight


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_weights_of_every_strategy(strategy, bits, symmetric):
    if strategy == "block" and not symmetric:
        pytest.skip("blocks are symmetric")
    settings, tensors, weight = in_bytes(strategy, bits, symmetric)
    for layout in ("int-quantized", "naive-quantized"):
        qt = only(find(config(layout, **settings)), tensors)
        assert torch.equal(reference.dequantize(qt), weight)


#: Strategy -> shape of the scales, weights that share one.
FLOAT8 = {"tensor": ((1,), (40, 96)), "channel": ((40, 1), (1, 96)), "block": ((2, 3), (32, 32))}


def float8(strategy):
    shape, block = FLOAT8[strategy]
    weight, values = float8_weights(40, 96)
    scales = floats(1, 80, torch.float32).flatten()[: shape[0] * shape[-1]].view(shape)
    grid = scales.reshape(-1, shape[-1])
    expected = torch.zeros(40, 96, dtype=torch.float64)
    for i in range(40):
        for j in range(96):
            expected[i, j] = values[i][j] * grid[i // block[0], j // block[1]].double()
    settings = {"type": "float", "num_bits": 8, "strategy": strategy, "block_structure": [32, 32], "group_size": None}
    return settings, {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(1)}, expected


@pytest.mark.parametrize("strategy", FLOAT8)
def test_float8_weights_of_every_strategy(strategy):
    settings, tensors, expected = float8(strategy)
    qt = only(find(config("float-quantized", **settings)), tensors)
    assert qt.dtype.name == "float8_e4m3" and torch.equal(reference.dequantize(qt), expected)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def fp4(n, k):
    codes = table(n, k, 0, 15)
    data = [[row[j] | row[j + 1] << 4 for j in range(0, k, 2)] for row in codes]
    values = [[E2M1[code & 7] * (-1 if code & 8 else 1) for code in row] for row in codes]
    return torch.tensor(data, dtype=torch.uint8), torch.tensor(values, dtype=torch.float64)


def nvfp4():
    data, values = fp4(8, 64)
    scales, total = floats(8, 4, torch.float32).abs().to(torch.float8_e4m3fn), torch.tensor([2688 / 3.7])
    tensors = {"weight_packed": data, "weight_scale": scales, "weight_global_scale": total}
    factor = (scales.double() / total.double()).repeat_interleave(16, 1)
    return {"type": "float", "strategy": "tensor_group", "group_size": 16}, tensors, values * factor


def test_nvfp4_divides_by_its_global_scale():
    settings, tensors, weight = nvfp4()
    fmt = find(config("nvfp4-pack-quantized", **settings))
    qt = only(fmt, tensors)
    # Why not equal: 1 / global is rounded to float32, the scales are not.
    assert qt.dtype.name == "float4_e2m1"
    assert bool(((reference.dequantize(qt) - weight).abs() <= 2.0**-24 * weight.abs()).all())
    for bad in (0.0, -1.0, torch.inf, torch.nan, 2.0**-127, 2.0**127):
        with pytest.raises(FormatError, match=r"weight_global_scale must be one number from 2\^-126 to 2\^126, got"):
            only(fmt, {**tensors, "weight_global_scale": torch.tensor([bad])})
    with pytest.raises(FormatError, match=r"to 2\^126, got shape \(2,\)"):
        only(fmt, {**tensors, "weight_global_scale": torch.ones(2)})


MX = {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized", 8: "mxfp8-quantized"}


def mx(bits):
    exponents = torch.tensor(table(8, 2, 90, 150), dtype=torch.uint8)
    factor = torch.tensor([[2.0 ** (e - 127) for e in row for _ in range(32)] for row in exponents.tolist()]).double()
    if bits == 4:
        data, values = fp4(8, 64)
    elif bits == 6:
        codes = table(8, 64, 0, 63)
        data = torch.tensor([stream(row, 6, 8) for row in codes], dtype=torch.uint8)
        magnitude = [m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)]
        values = [[magnitude[c & 31] * (-1 if c & 32 else 1) for c in row] for row in codes]
    else:
        data, values = float8_weights(8, 64)
    settings = {"type": "float", "strategy": "group", "group_size": 32, "num_bits": bits}
    tensors = {"weight" if bits == 8 else "weight_packed": data, "weight_scale": exponents}
    return settings, tensors, torch.as_tensor(values, dtype=torch.float64) * factor


@pytest.mark.parametrize("bits", MX)
def test_mx_formats_are_exact(bits):
    settings, tensors, weight = mx(bits)
    assert torch.equal(reference.dequantize(only(find(config(MX[bits], **settings)), tensors)), weight)


def test_each_layer_has_the_scheme_of_its_group():
    made = config("pack-quantized")
    narrow = {"targets": ["re:.*down$", "a.special"], "weights": {**made["config_groups"]["group_0"]["weights"]}}
    narrow["weights"]["num_bits"], narrow["format"] = 8, "int-quantized"
    made["config_groups"]["group_1"] = narrow
    fmt = find({"quantization_config": made})
    keys = ["a.up.weight_packed", "a.up.weight_scale", "a.down.weight", "a.down.weight_scale", "norm.weight"]
    keys += ["a.special.weight", "a.special.weight_scale", "lm_head.weight", "a.up.input_scale"]
    found = {layer.name: (layer.settings["num_bits"], layer.settings["format"]) for layer in fmt.layers(keys)}
    other = (8, "int-quantized")
    assert found == {"a.up": (4, "pack-quantized"), "a.down": other, "a.special": other}
    made["config_groups"]["group_2"] = {"targets": ["Linear"], "weights": {**narrow["weights"], "num_bits": 2}}
    with pytest.raises(FormatError, match="a.up: expected one of config_groups to name it or Linear, got 2"):
        find(made).layers(keys)


def weights(**changes):
    return lambda c, t: c["config_groups"]["group_0"]["weights"].update(changes)


def tensors(**changes):
    return lambda c, t: t.update({role: make(t[role]) for role, make in changes.items()})


BAD = {
    "unknown layout": (lambda c, t: c.update(format="pack-quantised"), "did you mean pack-quantized"),
    "marlin": (lambda c, t: c.update(format="marlin-24"), "no known format is called 'marlin-24'"),
    "sparse": (lambda c, t: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "must have the format dense"),
    "rotated": (lambda c, t: c.update(transform_config={"config_groups": {}}), "weights that are rotated are not read"),
    "groups a list": (lambda c, t: c.update(config_groups=[]), "config_groups must be dict"),
    "no such strategy": (weights(strategy="row"), "strategy must be one of tensor, channel, group, block, got 'row'"),
    "9 bits": (weights(num_bits=9), "num_bits must be one of 2, 3, 4, 5, 6, 7, 8, got 9"),
    "other width": (weights(num_bits=3), r"must have shape \(32, 15\) or \(32, 16\), got \(32, 20\)"),
    "float type": (weights(type="float"), "weights of pack-quantized have type int, got 'float'"),
    "other group size": (weights(group_size=64), r"weight_scale must have shape \(32, 3\), got \(32, 5\)"),
    "cut": (tensors(weight_packed=lambda t: t[:, 1:]), r"must have shape \(32, 20\), got \(32, 19\)"),
    "rows cut": (tensors(weight_packed=lambda t: t[1:]), r"must have shape \(32, 20\), got \(31, 20\)"),
    "other shape": (tensors(weight_shape=lambda t: t * 2), r"weight_packed of 4 bits and shape \[64, 320\] must"),
    "negative shape": (tensors(weight_shape=lambda t: -t), "must have shape"),
    "shape of three": (tensors(weight_shape=lambda t: torch.ones(3).long()), r"weight_shape must have shape \(2,\)"),
    "zero points cut": (tensors(weight_zero_point=lambda t: t[1:]), r"must have shape \(4, 5\), got \(3, 5\)"),
    "no zero points": (lambda c, t: t.pop("weight_zero_point"), "expected a tensor 'weight_zero_point'"),
    "scales NaN": (tensors(weight_scale=lambda t: t * torch.nan), "expected finite numbers"),
    "no shape": (lambda c, t: t.pop("weight_shape"), "expected a tensor 'weight_shape', got weight_packed"),
}


@pytest.mark.parametrize("damage, words", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(damage, words):
    settings, held, _ = packed(4, symmetric=False)
    made = config("pack-quantized", **settings)
    damage(made, held)
    with pytest.raises(FormatError, match=words):
        only(find(made), held)


def library(name):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def make(**weights):
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=name)

    return BaseCompressor.get_value_from_registry(name), make


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_library_reads_the_same_packed_weight(bits, symmetric):
    compressor, scheme = library("pack-quantized")
    half, scales = 1 << (bits - 1), floats(64, 4, torch.float32).abs() + 0.01
    state = {"weight": floats(64, 128, torch.float32, seed=1) * half, "weight_scale": scales}
    if not symmetric:
        points = torch.tensor(table(64, 4, -half, half - 1), dtype=torch.int8)
        state["weight_zero_point"] = points
    settings = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32}
    state = compressor.compress(state, scheme(**settings))
    expected = compressor.decompress(state, scheme(**settings))["weight"]
    qt = only(find(config("pack-quantized", **settings)), state)
    assert torch.equal(qt.dequantize(torch.float32), expected)


@pytest.mark.parametrize("layout, size, strategy", [("nvfp4", 16, "tensor_group"), ("mxfp4", 32, "group")])
def test_the_library_reads_the_same_4_bit_floats(layout, size, strategy):
    name = f"{layout}-pack-quantized"
    compressor, scheme = library(name)
    settings = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size}
    scales = (floats(32, 128 // size, torch.float32).abs() + 0.01).to(torch.float8_e4m3fn).float()
    state = {"weight": floats(32, 128, torch.bfloat16, seed=1), "weight_scale": scales}
    if layout == "nvfp4":
        state["weight_global_scale"] = torch.tensor([3.7])
    else:
        state["weight_scale"] = torch.exp2(scales.log2().round())
    state = compressor.compress(state, scheme(**settings))
    qt = only(find(config(name, **settings)), state)
    expected = compressor.decompress(dict(state), scheme(**settings))["weight"]
    torch.testing.assert_close(qt.dequantize(expected.dtype), expected, rtol=0 if layout == "mxfp4" else 2**-8, atol=0)


def test_the_library_is_as_near_to_nvfp4_as_we_are():
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    settings, tensors, weight = nvfp4()
    qt = only(find(config("nvfp4-pack-quantized", **settings)), tensors)
    low, high = tensors["weight_packed"] & 15, tensors["weight_packed"] >> 4
    codes = torch.stack((low, high), -1).flatten(1).int()
    values = torch.tensor([*E2M1, *[-value for value in E2M1]])[codes]
    args = QuantizationArgs(num_bits=4, symmetric=True, **settings)
    options = {"args": args, "global_scale": tensors["weight_global_scale"], "dtype": torch.float32}
    theirs = dequantize(values, tensors["weight_scale"].float(), **options)
    # Theirs rounds scale / global and the product, ours 1 / global, times the scale, times the code.
    assert bool(((theirs.double() - weight).abs() <= 2 * 2.0**-24 * weight.abs()).all())
    assert bool(((qt.dequantize().double() - weight).abs() <= 3 * 2.0**-24 * weight.abs()).all())
