"""Risk: a decoder of the CUDA kernels gives the tensor cores a code that it puts together wrongly, or at a wrong place.

The decoders' own code runs on the host; what it should give follows from the codes and from how the A operand of
mma.m16n8k16 is spread over lanes. That needs CUDA's headers, and no GPU.
"""

import re
import shutil

import numpy as np
import pytest
import torch

from lowbit.dtypes import WEIGHT_TYPES
from lowbit.pack import layout as layouts
from lowbit.tensor import QuantTensor
from native.build import load
from tools import cuda

N, K = 64, 128
FLOATS = [wtype for wtype in WEIGHT_TYPES if wtype.kind == "float"]


@pytest.fixture(scope="module")
def fragments():
    headers = cuda.find(("80",)).include if shutil.which("nvcc") else None
    if headers is None or not (headers / "cuda_fp16.h").is_file():
        pytest.skip("needs the headers of a CUDA toolkit")
    return load("fragments", headers)


def packed(bits, seed):
    """Codes [N, K] and their bytes in layout nvidia."""
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (N, K), dtype=np.uint8)
    stream = QuantTensor.pack_codes(torch.from_numpy(codes), bits)
    return codes, layouts.pack_codes(stream, N, K, bits, "nvidia").numpy()


def operand(values):
    """[N, K] as the A operand: [row tile, lane, fragment, register, half]."""
    lane, register, half = np.ogrid[:32, :4, :2]
    row = (lane // 4 + register % 2 * 8)[None, :, None]
    k = (lane % 4 * 2 + register // 2 * 8 + half)[None, :, None] + 16 * np.arange(K // 16)[None, None, :, None, None]
    return values[row + 16 * np.arange(N // 16)[:, None, None, None, None], k]


def halves(registers):
    return np.stack([registers & 0xFFFF, registers >> 16], axis=-1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_are_whole_codes_with_nothing_beside_them(fragments, bits):
    codes, memory = packed(bits, bits)
    found = halves(getattr(fragments, f"int{bits}")(memory, N))
    low, high = getattr(fragments, f"code_bits{bits}")()
    lowest = np.array([low, high, low, high])[:, None]  # of registers: row halves take turns
    np.testing.assert_array_equal(found, operand(codes).astype(np.uint32) << lowest)


FORMS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2), (4, 4), (8, 1)]


@pytest.mark.parametrize(("bits", "apart"), FORMS)
def test_bytes_are_codes_of_the_fragments_that_their_digits_are_of(fragments, bits, apart):
    codes, memory = packed(bits, 30 + bits)
    found = getattr(fragments, f"bytes{bits}_{apart}")(memory, N)  # [row tile, lane, product, register]
    bytes_found = found[..., None] >> np.arange(0, 32, 8, dtype=np.uint32) & 0xFF
    places, low = getattr(fragments, f"bytes{bits}_{apart}_form")()
    assert sorted(places) == list(range(8))
    # Of mma's registers of a fragment, [c, h][j], these are bytes: registers [f, h], and in each of them [j, c].
    expected = operand(codes).reshape(N // 16, 32, 8, 2, 2, 2)[:, :, np.argsort(places)]
    expected = expected.transpose(0, 1, 2, 4, 5, 3).reshape(N // 16, 32, 4, 2, 2, 4)
    expected = expected.astype(np.uint32) << np.array(low, dtype=np.uint32)[:, None, :, None]
    np.testing.assert_array_equal(bytes_found, expected.reshape(bytes_found.shape))


@pytest.mark.parametrize("kept", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("act", ["fp16", "bf16"])
@pytest.mark.parametrize("wtype", FLOATS, ids=str)
def test_floats_are_their_values_times_a_power_of_two(fragments, wtype, act, kept):
    """kept: of rows g, and of rows g + 8; others are 0."""
    codes, memory = packed(wtype.bits, wtype.bits)
    legal = np.array([code for code in range(1 << wtype.bits) if code not in wtype.invalid_codes])
    codes = legal[codes % len(legal)].astype(np.uint8)
    stream = QuantTensor.pack_codes(torch.from_numpy(codes), wtype.bits)
    memory = layouts.pack_codes(stream, N, K, wtype.bits, "nvidia").numpy()
    found = halves(getattr(fragments, f"{wtype.name.split('_')[1]}_{act}")(memory, N, *kept)).astype(np.uint32)
    exponent, mantissa = map(int, re.search(r"e(\d)m(\d)", wtype.name).groups())
    smallest = min(abs(value) for value in wtype.values if value and np.isfinite(value))
    if act == "fp16":
        numbers = found.astype(np.uint16).view(np.float16).astype(np.float64)
        unit = 2.0 ** (-14 - mantissa) / smallest
    else:
        numbers = (found << 16).view(np.float32).astype(np.float64)
        unit = 2.0 ** (-126 - mantissa) / smallest
    expected = operand(np.array(wtype.values, dtype=np.float64)[codes]) * unit
    for half in (0, 1):
        if not kept[half]:
            expected[..., half::2, :] = 0.0
    np.testing.assert_array_equal(numbers, expected)
    np.testing.assert_array_equal(np.signbit(numbers), np.signbit(expected))
