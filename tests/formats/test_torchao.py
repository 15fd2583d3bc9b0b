"""Risk: Int4Tensor's transposed scales or additive zeros are taken like the others', a layer gets another's type."""

import json

import pytest
import torch

from lowbit import FormatError, InexactError, reference
from lowbit.checkpoint.formats import find

from .test_fp8 import weights as float8_weights
from .words import floats, table

CONFIG = {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}}


def decoded(kind, tensors, block, **data):
    metadata = {"m.weight": json.dumps({"_type": kind, "_data": {"block_size": block, **data}}), "tensor_names": "[]"}
    keys = {f"m._weight_{role}": tensor for role, tensor in tensors.items()}
    fmt = find(CONFIG)
    (layer,) = fmt.layers([*keys, "m.bias"], metadata)
    assert layer.name == "m"
    return fmt.decode(layer, {role: keys[key] for role, key in layer.tensors.items()})


def int4(n=8, k=96, size=32, dtype=torch.bfloat16):
    q, groups = table(n, k, -8, 7), k // size
    data = [[(row[j] & 15) | (row[j + 1] & 15) << 4 for j in range(0, k, 2)] for row in q]
    scale, zero = floats(groups, n, dtype), floats(groups, n, dtype, seed=1)
    weight = [[q[i][j] * float(scale[j // size, i]) + float(zero[j // size, i]) for j in range(k)] for i in range(n)]
    tensors = {"qdata": torch.tensor(data, dtype=torch.uint8).view(torch.int8), "scale": scale, "zero_point": zero}
    return tensors, torch.tensor(weight, dtype=torch.float64)


@pytest.mark.parametrize("size", [16, 32, 48, 96])
def test_int4_tensor_is_exact(size):
    tensors, weight = int4(size=size)
    qt = decoded("Int4Tensor", tensors, [1, size])
    assert (qt.dtype.name, qt.zero_kind) == ("int4", "min") and torch.equal(reference.dequantize(qt), weight)


def in_bytes(bits, block, symmetric):
    n, k, half = 8, 96, 1 << (bits - 1)
    q, shape = table(n, k, -half, half - 1), (n // block[0], k // block[1])
    scale = floats(*shape, torch.float32)
    zero = table(*shape, *((0, 0) if symmetric else (-half, half - 1)), seed=1)
    weight = torch.zeros(n, k, dtype=torch.float64)
    for i in range(n):
        for j in range(k):
            at = (i // block[0], j // block[1])
            weight[i, j] = scale[at].double() * (q[i][j] - zero[at[0]][at[1]])
    tensors = {"qdata": torch.tensor(q, dtype=torch.int8), "scale": scale}
    tensors["zero_point"] = torch.tensor(zero, dtype=torch.int8)
    return tensors, weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("block", [[1, 32], [1, 96], [8, 96]])
@pytest.mark.parametrize("symmetric", [True, False])
def test_numbers_in_bytes_are_exact(bits, block, symmetric):
    tensors, weight = in_bytes(bits, block, symmetric)
    target = {"_type": "torch.dtype", "_data": f"int{bits}"}
    qt = decoded("IntxUnpackedToInt8Tensor", tensors, block, target_dtype=target)
    assert torch.equal(reference.dequantize(qt), weight)
    if bits == 8:
        assert decoded("Int8Tensor", tensors, block) == qt


def float8(block):
    weight, values = float8_weights(8, 96)
    scale = floats(8 // block[0], 96 // block[1], torch.float32)
    factor = scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return {"qdata": weight, "scale": scale}, torch.tensor(values, dtype=torch.float64) * factor


@pytest.mark.parametrize("block", [[1, 96], [8, 96], [4, 32]])
def test_float8_is_exact(block):
    tensors, weight = float8(block)
    assert torch.equal(reference.dequantize(decoded("Float8Tensor", tensors, block)), weight)


def test_groups_of_8_give_their_values():
    tensors, weight = int4(size=8)
    with pytest.raises(InexactError, match="got 8") as caught:
        decoded("Int4Tensor", tensors, [1, 8])
    torch.testing.assert_close(caught.value.dequantize().double(), weight)


def test_bad_input_is_refused_by_name():
    tensors, _ = int4()
    for kind, changed, block, words in (
        (
            "Int4TilePackedTo4dTensor",
            {},
            [1, 32],
            "its type must be one of Int4Tensor.* got 'Int4Tile",
        ),
        ("Int4Tensor", {}, [1, 64], r"scale must have shape \(2, 8\), got \(3, 8\)"),
        ("Int4Tensor", {}, [2, 32], "must have one row, got 2"),
        ("Int4Tensor", {}, "32", "block_size must be list"),
        ("Int4Tensor", {"scale": tensors["scale"].t()}, [1, 32], r"scale must have shape \(3, 8\), got \(8, 3\)"),
        ("Int4Tensor", {"act_pre_scale": torch.ones(96)}, [1, 32], "act_pre_scale: expected none"),
        ("Int8Tensor", {}, [1, 32], r"have shape \(8, 2\), got \(3, 8\)"),
    ):
        with pytest.raises(FormatError, match=f"m: .*{words}|{words}"):
            decoded(kind, {**tensors, **changed}, block)
    with pytest.raises(FormatError, match="m: expected its type in the file's metadata"):
        find(CONFIG).layers(["m._weight_qdata", "m._weight_scale"])


def test_the_library_writes_the_same_weights():
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    kinds = [Int8WeightOnlyConfig(version=2)]
    kinds += [IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{b}"), granularity=PerGroup(32)) for b in (2, 4, 7)]
    for kind in kinds:
        model = torch.nn.Sequential(torch.nn.Linear(96, 16))
        quantize_(model, kind)
        tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        fmt = find(CONFIG)
        (layer,) = fmt.layers(tensors, metadata)
        qt = fmt.decode(layer, {role: tensors[key] for role, key in layer.tensors.items()})
        assert torch.equal(qt.dequantize(torch.float32), model[0].weight.dequantize())
