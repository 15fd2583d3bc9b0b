"""Risk: halves of bytes are swapped, blocks that run over rows get a neighbour's scale, nested scales are off."""

import json

import pytest
import torch

from lowbit import FormatError, InexactError, reference
from lowbit.checkpoint.formats import find

from .words import floats, only, table

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def text(state) -> torch.Tensor:
    return torch.tensor(list((state if isinstance(state, str) else json.dumps(state)).encode()), dtype=torch.uint8)


def four_bits(n, k, size, nested=None, kind="nf4", storage=torch.uint8):
    """``(tensors by role, the weight float64)``; nested: the blocksize of the scales' scales."""
    codes = table(1, n * k, 0, 15, seed=n + k)[0]
    book = (torch.arange(16) - 7.0) ** 3 / 343
    blocks = -(-n * k // size)
    data = bytes(codes[i] << 4 | codes[i + 1] for i in range(0, n * k, 2))
    state = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {
        "weight": torch.frombuffer(bytearray(data), dtype=torch.uint8).view(storage).reshape(-1, 1),
        "weight.quant_map": book,
    }
    scales = floats(1, blocks, torch.float32)[0].abs()
    tensors["weight.absmax"] = scales
    if nested:
        index = table(1, blocks, 0, 255, seed=7)[0]
        inner, outer = floats(1, 256, torch.float32)[0], floats(1, -(-blocks // nested), torch.float32, seed=1)[0]
        scales = torch.stack([inner[i] * outer[b // nested] + 0.125 for b, i in enumerate(index)])
        tensors["weight.absmax"] = torch.tensor(index, dtype=torch.uint8)
        tensors["weight.nested_absmax"], tensors["weight.nested_quant_map"] = outer, inner
        state.update(nested_blocksize=nested, nested_dtype="float32", nested_offset=0.125)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text(state)
    weight = [book[code].double() * scales[i // size].double() for i, code in enumerate(codes)]
    return tensors, torch.stack(weight).view(n, k)


@pytest.mark.parametrize(
    "n, k, size, group",
    [(8, 128, 64, 64), (4, 96, 64, 32), (6, 80, 64, 16), (16, 32, 128, -1), (3, 1024, 512, 256), (2, 64, 4096, -1)],
)
@pytest.mark.parametrize("nested", [None, 4])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_blocks_over_the_flat_weight_are_exact(n, k, size, group, nested, kind):
    tensors, weight = four_bits(n, k, size, nested, kind)
    qt = only(find(CONFIG), tensors)
    assert (qt.dtype.name, qt.zero_kind, qt.group_size) == ("uint4", "none", group)
    assert torch.equal(reference.dequantize(qt), weight)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bytes_stored_as_another_type_are_the_same(storage):
    tensors, weight = four_bits(8, 128, 64, storage=storage)
    assert torch.equal(reference.dequantize(only(find(CONFIG), tensors)), weight)


@pytest.mark.parametrize("k", [72, 6])
def test_blocks_that_cross_groups_give_their_values(k):
    tensors, weight = four_bits(16, k, 64)
    with pytest.raises(InexactError, match=f"blocks of 64 that run over rows of {k} cross.*--requantize") as caught:
        only(find(CONFIG), tensors)
    assert torch.equal(caught.value.dequantize(), weight.float())


def eight_bits():
    numbers, scb = torch.tensor(table(5, 33, -128, 127), dtype=torch.int8), floats(1, 5, torch.float32)[0].abs()
    tensors = {"weight": numbers, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, numbers.double() * (scb / 127).double().view(5, 1)


def test_int8_is_exact_against_its_rounded_scale():
    tensors, weight = eight_bits()
    qt = only(find({"load_in_8bit": True}), tensors)
    assert qt.dtype.name == "int8" and torch.equal(reference.dequantize(qt), weight)
    unrounded = tensors["weight"] * tensors["SCB"].double().view(5, 1) / 127
    assert torch.allclose(reference.dequantize(qt), unrounded, rtol=2**-24, atol=0)
    tensors["weight_format"] += 1
    with pytest.raises(FormatError, match="weight_format must be 0"):
        only(find(CONFIG), tensors)


@pytest.mark.parametrize("key", ["blocksize", "nested_blocksize"])
def test_hostile_sizes_of_blocks_take_no_memory(key):
    tensors, _ = four_bits(8, 128, 1024, nested=1)
    state = {"quant_type": "nf4", "blocksize": 1024, "shape": [8, 128], "nested_blocksize": 1, "nested_offset": 0.0}
    tensors[STATE] = text({**state, key: 1 << 39})
    only(find(CONFIG), tensors)
    tensors[STATE] = text({**state, key: 1 << 70})
    with pytest.raises(FormatError, match=f"{key} must be a whole number from 1"):
        only(find(CONFIG), tensors)


def test_float_layers_are_left_alone():
    tensors, _ = four_bits(8, 128, 64)
    keys = ["embed.weight", *(f"a.{role}" for role in tensors), "b.weight", "b.SCB", "b.bias"]
    assert [layer.name for layer in find(CONFIG).layers(keys)] == ["a", "b"]
    with pytest.raises(FormatError, match="a: expected weight.quant_state.* got none"):
        find(CONFIG).layers([key for key in keys if "quant_state" not in key])


STATE = "weight.quant_state.bitsandbytes__nf4"
GOOD = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 128]}
BAD = {
    "cut": ({"weight": torch.zeros(511, 1, dtype=torch.uint8)}, "weight of shape 8 x 128 takes 512 bytes, got 511"),
    "too few scales": ({"weight.absmax": torch.ones(15)}, r"weight\.absmax must have shape \(16,\), got \(15,\)"),
    "codebook of 8": ({"weight.quant_map": torch.ones(8)}, r"weight\.quant_map must have shape \(16,\)"),
    "codebook of NaN": ({"weight.quant_map": torch.full((16,), torch.nan)}, "codebook: expected finite numbers"),
    "state no JSON": ({STATE: text("{'a'}")}, "is not valid JSON"),
    "state a pickle": ({STATE: torch.tensor([0x80, 4, 0x4B], dtype=torch.uint8)}, "is not valid JSON"),
    "state a list": ({STATE: text([1])}, "must be a JSON object, got list"),
    "other type": ({STATE: text({**GOOD, "quant_type": "fp4"})}, "got quant_type 'fp4'"),
    "unknown type": ({STATE: text({**GOOD, "quant_type": "nf3"})}, "quant_type must be one of nf4, fp4, got 'nf3'"),
    "other shape": ({STATE: text({**GOOD, "shape": [8, 256]})}, "weight of shape 8 x 256 takes 1024 bytes"),
    "shape of three": ({STATE: text({**GOOD, "shape": [2, 4, 128]})}, "a shape of N and K, got 64 and"),
    "huge shape": ({STATE: text({**GOOD, "shape": [1 << 60, 1 << 60]})}, "takes .* bytes, got 512"),
    "blocksize 0": ({STATE: text({**GOOD, "blocksize": 0})}, "blocksize must be a whole number from 1"),
    "blocksize -1": ({STATE: text({**GOOD, "blocksize": -1})}, "must have a blocksize from 1"),
    "nested without its table": ({"weight.absmax": torch.ones(16, dtype=torch.uint8)}, "nested_blocksize must be int"),
}  # fmt: skip


@pytest.mark.parametrize("changed, words", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(changed, words):
    tensors, _ = four_bits(8, 128, 64)
    tensors.update(changed)
    with pytest.raises(FormatError, match=words):
        only(find(CONFIG), tensors)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_library_reads_the_same_weight(kind, nested):
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    weight = floats(48, 128, torch.float32)
    data, state = library.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    saved = {f"weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    qt = only(find(CONFIG), {"weight": data, **saved})
    assert torch.equal(qt.dequantize(torch.float32), library.dequantize_4bit(data, state))
