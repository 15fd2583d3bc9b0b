"""Risk: a packed weight serves some kernels alone, and another matrix instruction needs it packed otherwise.

layout_proof.cu multiplies the bytes that pack_weight wrote with wgmma in fp16 and with both 8-bit instructions, which
are given the tokens in the order of layout.cuh. All numbers are small integers, so every answer is exact.
tests/test_mma_simulation.py holds the same on paper.
"""

import ctypes

import pytest
import torch

import lowbit
from lowbit.pack import layout as layouts

from . import build, oracle
from .kernels import needs_kernels

INSTRUCTIONS = {"wgmma_f16": (torch.float16, torch.float32), "mma_s8": (torch.int8, torch.int32)}
INSTRUCTIONS["wgmma_s8"] = INSTRUCTIONS["mma_s8"]
TOKENS = 16
SHAPES = [(64, 512), (200, 1000), (70, 600)]


def weight_of(bits, n, k) -> oracle.Weight:
    """Every code of the width; a scale that keeps products within fp16, which the bare codes do not feel."""
    codes = torch.randint(1 << bits, (n, k), generator=oracle.generator(bits), device="cuda").to(torch.uint8)
    groups = torch.ones(n, -(-k // 128), device="cuda")
    return oracle.weight_of(f"uint{bits}", codes, groups / 64, 0 * groups, 128, "zero")


def tokens(k) -> torch.Tensor:
    return torch.randint(-7, 8, (TOKENS, k), generator=oracle.generator(k), device="cuda")


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_instruction_multiplies_the_packed_bytes(bits, instruction):
    library = build.load("layout_proof")
    x_type, y_type = INSTRUCTIONS[instruction]
    for n, k in SHAPES:
        weight, x = weight_of(bits, n, k), tokens(k)
        cols = layouts.padded_shape("nvidia", n, k, bits)[1]
        padded = torch.nn.functional.pad(x, (0, cols - k)).to(x_type)
        y = torch.empty(TOKENS, n, dtype=y_type, device="cuda")
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (weight.pw.codes, padded, y)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        which, sizes = list(INSTRUCTIONS).index(instruction), (ctypes.c_int64(n), ctypes.c_int64(k))
        assert library.layout_proof(which, bits, *pointers, *sizes, stream) == 0
        expected = x.double() @ weight.qt.unpack().double().T
        assert torch.equal(y.double(), expected), f"{int((y != expected).sum())} of {y.numel()} values"


@needs_kernels
@pytest.mark.parametrize("bits", range(1, 9))
def test_products_of_every_size_multiply_the_same_bytes(bits):
    for n, k in SHAPES:
        weight, rows = weight_of(bits, n, k), tokens(k).half().repeat(20, 1)
        for m in (1, 4, 16, 32, 100, 200):
            reason = oracle.wrong(lowbit.matmul(rows[:m], weight.pw), *oracle.product(rows[:m], weight))
            assert reason is None, f"M={m}: {reason}"
