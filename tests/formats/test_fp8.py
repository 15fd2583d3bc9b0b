"""Risk: a block's scale reaches rows or columns that are not its own, or multiplies where it divides."""

import random

import pytest
import torch

from lowbit import FormatError, InexactError, reference
from lowbit.checkpoint.formats import find

from .words import floats, only, table

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def value(code: int, exponent: int, mantissa: int) -> float:
    """The value of a float8 code, by the definition of the type."""
    e, m = code >> mantissa & ((1 << exponent) - 1), code & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    size = m / (1 << mantissa) * 2.0 ** (1 - bias) if e == 0 else (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
    return -size if code >> 7 else size


def weights(n, k, kind="e4m3"):
    pick = random.Random(n * k)
    exponent, mantissa, top = (4, 3, 0x7E) if kind == "e4m3" else (5, 2, 0x7B)
    codes = [[pick.randint(0, top) | pick.choice((0, 0x80)) for _ in range(k)] for _ in range(n)]
    tensor = torch.tensor(codes, dtype=torch.uint8)
    tensor = tensor.view(torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2)
    return tensor, [[value(code, exponent, mantissa) for code in row] for row in codes]


def in_blocks(n, k, rows, columns):
    weight, values = weights(n, k)
    scales = floats(-(-n // rows), -(-k // columns), torch.float32)
    expected = torch.zeros(n, k, dtype=torch.float64)
    for i in range(n):
        for j in range(k):
            expected[i, j] = values[i][j] * scales[i // rows, j // columns].double()
    config = {**CONFIG, "weight_block_size": [rows, columns]}
    return config, {"weight": weight, "weight_scale_inv": scales}, expected


@pytest.mark.parametrize("shape", [(40, 128), (128, 256), (200, 300), (129, 384)])
@pytest.mark.parametrize("block", [[128, 128], [64, 48], [1, 32], [32, 512]])
def test_blocks_are_exact_at_the_edges_too(shape, block):
    config, tensors, expected = in_blocks(*shape, *block)
    qt = only(find(config), tensors)
    assert qt.dtype.name == "float8_e4m3" and torch.equal(reference.dequantize(qt), expected)


def in_rows(shape, kind):
    weight, values = weights(20, 50, kind)
    scales = floats(20, 1, torch.float32)[: 1 if 20 not in shape else 20].reshape(shape)
    expected = torch.tensor(values, dtype=torch.float64) * scales.double().reshape(-1, 1)
    return {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(1)}, expected


@pytest.mark.parametrize("shape", [(), (1,), (20, 1), (20,)])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_scales_of_a_tensor_or_a_row(shape, kind):
    tensors, expected = in_rows(shape, kind)
    for method in ("fp8", "fbgemm_fp8"):
        qt = only(find({**CONFIG, "quant_method": method}), tensors)
        assert torch.equal(reference.dequantize(qt), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_powers_of_two_are_exact_over_the_whole_range(dtype):
    weight, values = weights(255, 32)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1)
    tensors = {"weight": weight, "weight_scale_inv": scales.view(dtype)}
    qt = only(find({**CONFIG, "weight_block_size": [1, 32]}), tensors)
    expected = torch.tensor([[v * 2.0 ** (i - 127) for v in row] for i, row in enumerate(values)], dtype=torch.float64)
    assert torch.equal(reference.dequantize(qt), expected)
    assert qt.scales.dtype == torch.float8_e8m0fnu and torch.equal(qt.scales.view(torch.uint8), scales)
    scales[3] = 255
    with pytest.raises(FormatError, match=r"exponents 0\.\.254, 1 are 255, NaN"):
        only(find({**CONFIG, "weight_block_size": [1, 32]}), tensors)


def in_powers(n, k, rows, columns, dtype=torch.float8_e8m0fnu):
    weight, values = weights(n, k)
    exponents = table(-(-n // rows), -(-k // columns), 0, 254)
    tensors = {"weight": weight, "weight_scale_inv": torch.tensor(exponents, dtype=torch.uint8).view(dtype)}
    scales = [[2.0 ** (exponents[i // rows][j // columns] - 127) for j in range(k)] for i in range(n)]
    expected = torch.tensor(values, dtype=torch.float64) * torch.tensor(scales, dtype=torch.float64)
    return {**CONFIG, "weight_block_size": [rows, columns]}, tensors, expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [[128, 128], [64, 48], [7, 320]])
def test_powers_of_two_reach_their_blocks_as_their_bytes(block, dtype):
    config, tensors, expected = in_powers(200, 300, *block, dtype)
    qt = only(find(config), tensors)
    assert qt.scales.dtype == torch.float8_e8m0fnu and torch.equal(reference.dequantize(qt), expected)
    one = torch.tensor([130], dtype=torch.uint8).view(dtype)
    qt = only(find(CONFIG), {"weight": tensors["weight"], "weight_scale": one})
    assert torch.equal(reference.dequantize(qt), 8 * torch.tensor(weights(200, 300)[1], dtype=torch.float64))


def test_float_layers_are_left_alone():
    keys = ["a.weight", "a.weight_scale_inv", "norm.weight", "lm_head.weight", "lm_head.bias"]
    assert [layer.name for layer in find({**CONFIG, "weight_block_size": [128, 128]}).layers(keys)] == ["a"]


BLOCKS = {"weight_block_size": [128, 128]}
BAD = {
    "codes of NaN": (BLOCKS, {"weight": torch.full((4, 8), float("nan")).to(torch.float8_e4m3fn)}, "32 codes mean NaN"),
    "weight of bfloat16": (BLOCKS, {"weight": torch.ones(4, 8).bfloat16()}, "weight must be float8_e4m3fn or"),
    "stack of weights": (
        BLOCKS,
        {"weight": torch.ones(2, 4, 8).to(torch.float8_e4m3fn)},
        r"shape \(any, any\), got \(2",
    ),
    "too many scales": (BLOCKS, {"weight_scale_inv": torch.ones(2, 1)}, r"have shape \(1, 1\), got \(2, 1\)"),
    "no block size": ({}, {"weight_scale_inv": torch.ones(2, 1)}, r"scales must have shape \(4, 1\), or one number"),
    "block size of text": ({"weight_block_size": "128"}, {}, "weight_block_size must be list"),
    "block size of zero": ({"weight_block_size": [0, 128]}, {}, "must be two whole numbers from 1"),
    "scales of int64": (BLOCKS, {"weight_scale_inv": torch.ones(1, 1).long()}, "weight_scale_inv must be float32"),
    "scales infinite": (BLOCKS, {"weight_scale_inv": torch.full((1, 1), torch.inf)}, "expected finite numbers"),
}


@pytest.mark.parametrize("config, changed, words", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(config, changed, words):
    good = {"weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(FormatError, match=words):
        only(find({**CONFIG, **config}), {**good, **changed})


def test_blocks_that_cross_groups_give_their_values():
    weight, values = weights(4, 100)
    scales = floats(4, 10, torch.float32)
    with pytest.raises(InexactError, match="got 10.*--requantize") as caught:
        only(find({**CONFIG, "weight_block_size": [1, 10]}), {"weight": weight, "weight_scale_inv": scales})
    expected = torch.tensor(values) * scales.repeat_interleave(10, 1)
    assert torch.equal(caught.value.dequantize(), expected)
