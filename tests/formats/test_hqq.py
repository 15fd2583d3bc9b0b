"""Risk: planes of HQQ's packing are taken in a wrong order, a float zero is rounded, axis 0 passes for axis 1."""

import pytest
import torch

from lowbit import FormatError, InexactError, reference
from lowbit.checkpoint.formats import find

from .words import floats, only, table

CONFIG = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}
PACKING = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def checkpoint(bits, n=16, k=128, size=32, axis=1, dtype=torch.float16):
    """``(tensors, the weight float64)``."""
    grid = (n * k // size, size) if axis == 1 else (size, n * k // size)
    q = table(*grid, 0, (1 << bits) - 1, seed=bits)
    scale, zero = floats(grid[1 - axis], 1, dtype), floats(grid[1 - axis], 1, dtype, seed=1) * 40
    flat = []
    for i in range(grid[0]):
        for j in range(grid[1]):
            g = i if axis == 1 else j
            flat.append((q[i][j] - float(zero[g])) * float(scale[g]))
    fields = 10 if bits == 3 else 8 // bits if bits < 5 else 1
    rows = -(-grid[0] // fields)
    words = [[0] * grid[1] for _ in range(rows)]
    for i, row in enumerate(q):
        for j, code in enumerate(row):
            words[i % rows][j] |= code << (bits * (fields - 1 - i // rows))  # the first plane in the highest bits
    shape = (-1, 1) if axis == 1 else (1, -1)
    tensors = {
        "W_q": torch.tensor(words, dtype=torch.int32 if bits == 3 else torch.uint8),
        "scale": scale.view(shape),
        "zero": zero.view(shape),
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "group_size": torch.tensor(size, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "shape": torch.tensor([n, k]),
        "packing": torch.tensor([ord(c) for c in PACKING[bits]], dtype=torch.uint8),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
        "quant_zero": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, torch.tensor(flat, dtype=torch.float64).view(n, k)


@pytest.mark.parametrize("bits", PACKING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_width_is_exact(bits, dtype):
    tensors, weight = checkpoint(bits, dtype=dtype)
    qt = only(find(CONFIG), tensors)
    assert (qt.dtype.name, qt.zero_kind) == (f"uint{bits}", "zero") and torch.equal(reference.dequantize(qt), weight)


@pytest.mark.parametrize(
    "n, k, size, group", [(16, 96, 64, 32), (8, 64, 128, -1), (4, 1024, 512, 256), (16, 48, 16, 16)]
)
def test_groups_over_the_flat_weight_are_exact(n, k, size, group):
    tensors, weight = checkpoint(4, n, k, size)
    qt = only(find(CONFIG), tensors)
    assert qt.group_size == group and torch.equal(reference.dequantize(qt), weight)


def test_words_that_are_viewed_as_floats_are_the_same():
    tensors, weight = checkpoint(4)
    tensors["W_q"] = tensors["W_q"].view(torch.bfloat16)
    tensors["view_as_float"] += 1
    assert torch.equal(reference.dequantize(only(find(CONFIG), tensors)), weight)


def test_axis_0_and_small_groups_give_their_values():
    for tensors, weight in (checkpoint(4, axis=0), checkpoint(4, size=8)):
        with pytest.raises(InexactError, match="m.up: .*--requantize") as caught:
            only(find(CONFIG), tensors)
        torch.testing.assert_close(caught.value.dequantize().double(), weight)


def text(words):
    return torch.tensor([ord(c) for c in words], dtype=torch.uint8)


BAD = {
    "cut": (lambda t: t.update(W_q=t["W_q"][1:]), r"W_q must have shape \(32, 32\), got \(31, 32\)"),
    "other packing": (lambda t: t.update(packing=text("2bit_u8")), r"W_q must have shape \(16, 32\)"),
    "unknown packing": (lambda t: t.update(packing=text("7bit_u8")), "packing must be one of .* got '7bit_u8'"),
    "scales cut": (lambda t: t.update(scale=t["scale"][1:]), r"scale must have shape \(64, 1\), got \(63, 1\)"),
    "zeros of another type": (lambda t: t.update(zero=t["zero"].float()), "zero must be float16, got float32"),
    "axis 2": (lambda t: t.update(axis=torch.tensor(2)), "expected axis 0 or 1"),
    "group 0": (lambda t: t.update(group_size=torch.tensor(0)), "groups that divide a shape"),
    "shape of three": (lambda t: t.update(shape=torch.ones(3).long()), r"shape must have shape \(2,\)"),
    "quantized zeros": (lambda t: t.update(quant_zero=torch.tensor(1)), "quantized scales are not read"),
    "two axes": (lambda t: t.update(axis=torch.ones(2).long()), "axis must be one number"),
}


@pytest.mark.parametrize("damage, words", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(damage, words):
    tensors, _ = checkpoint(4)
    damage(tensors)
    with pytest.raises(FormatError, match=words):
        only(find(CONFIG), tensors)


@pytest.mark.parametrize("bits", [8, 5, 4, 3, 2, 1])
def test_the_library_writes_the_same_weight(bits):
    pytest.importorskip("hqq", reason="hqq is not installed")
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    linear = torch.nn.Linear(128, 48, bias=False)
    config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
    made = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
    state = {key: value for key, value in made.state_dict().items() if value is not None}
    qt = only(find(CONFIG), state)
    assert torch.equal(qt.dequantize(torch.float32), made.dequantize())
