"""Risk: blocks of a cluster that share a task of more than 16 tokens (gemm_sm90/meeting.cuh) send sums to
the wrong place or too early, add up too few of them, or store a column that is not theirs."""

import pytest
import torch

import lowbit

from . import oracle
from .kernels import may_refuse, needs_kernels
from .products import assert_exact, bias_for, right_by_split, row_of

pytestmark = needs_kernels

MOST = 4  # blocks of a cluster that may share a task
TILES = (32, 48, 64, 96, 128, 144, 160, 192, 208, 256)
#: Few tasks; parts that differ in length, the last of them shorter than 128 k; more tasks than a device has blocks.
SHAPES = [(520, 4096), (1000, 1000), (17000, 1100)]


def right(row: dict, shape: tuple[int, int], m: int, meet: int, group: int = 128) -> bool:
    """Whether a kernel lets so many blocks share tasks; its product is right then, and the same twice more, while the
    one before it ends."""
    kind = "zero" if row["weight"].startswith("uint") else "none"
    weight = oracle.make(row["weight"], shape, group, kind, seed=m + meet)
    x = oracle.normal(m, shape[1], dtype=getattr(torch, row["act"]), seed=meet)
    bias = bias_for(shape[0], meet)
    return right_by_split(row["name"], (8, 1, meet, 1, 8, 0), x, weight, bias)


def row_for(dtype: str, act: torch.dtype, tokens: int) -> dict:
    row = row_of(dtype, act, "gemm_sm90", tokens)
    if may_refuse(row["name"], tokens, 1):
        pytest.skip(f"{row['name']} is not for this device")
    return row


@pytest.mark.parametrize("tokens", TILES)
@pytest.mark.parametrize("dtype", ["int1", "int2", "int3", "int4", "int7", "int8"])
def test_sums_of_every_number_of_blocks_are_right(dtype, tokens):
    """A tile that is full, one of which columns are not there, and two tiles."""
    row = row_for(dtype, torch.float16, tokens)
    for i, shape in enumerate(SHAPES):
        for meet in range(1, MOST + 1):
            m = (tokens, tokens - 11, tokens + 9)[(i + meet) % 3]
            assert right(row, shape, m, meet), (shape, m, meet)


@pytest.mark.parametrize("tokens", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1", "float8_e4m3"])
def test_sums_of_other_activations_and_groups_are_right(dtype, tokens):
    row = row_for(dtype, torch.bfloat16, tokens)
    for i, shape in enumerate(SHAPES[:2]):
        for meet in range(2, MOST + 1):
            assert right(row, shape, tokens - 8 * i, meet, (32, -1)[i]), (shape, meet)


def test_more_blocks_than_sums_can_come_from_are_refused():
    for tokens in TILES:
        assert not right(row_for("int4", torch.float16, tokens), (520, 1024), tokens, MOST + 1), tokens
    # Tasks left over are more than there are clusters.
    assert not right(row_for("int4", torch.float16, 32), (128 * 100, 1024), 32, 2)


@pytest.mark.parametrize("shape", [(4608, 3584), (4096, 4096), (8192, 3584), (3584, 2048)])
def test_shapes_of_which_the_plan_lets_sums_meet_are_right(shape):
    for m in (24, 48, 64, 96, 128, 144, 160, 200, 256):
        weight = oracle.make("int4", shape, 128, "none", seed=m)
        x, bias = oracle.normal(m, shape[1], dtype=torch.float16, seed=m), bias_for(shape[0], m)
        y = lowbit.matmul(x, weight.pw, bias)
        assert_exact(x, weight, bias, y)
        assert oracle.same_bits(lowbit.matmul(x, weight.pw, bias), y), f"{shape}, M={m}: runs differ"
