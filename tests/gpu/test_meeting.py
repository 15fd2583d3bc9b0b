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


#: row_tiles, parts, and early, warps, next_after of blocks of each kind (csrc/templates/wide_blocks.cuh).
WHOLE, HALVES_OF_ONE, ROWS = ((8, 1), (1, 16, 0)), ((8, 1), (2, 8, 4)), ((4, 2), (1, 16, 0))


def right(row: dict, shape, m: int, meet: int, group: int = 128, blocks: tuple = WHOLE, kind: str = "zero") -> bool:
    """Whether a kernel lets so many blocks share tasks; its product is right then, and the same twice more, while the
    one before it ends."""
    kind = kind if row["weight"].startswith("uint") else "none"
    weight = oracle.make(row["weight"], shape, group, kind, seed=m + meet)
    x = oracle.normal(m, shape[1], dtype=getattr(torch, row["act"]), seed=meet)
    bias = bias_for(shape[0], meet)
    return right_by_split(row["name"], (*blocks[0], meet, *blocks[1]), x, weight, bias)


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


#: Types whose blocks of half of a multiprocessor have n32, and n64 (csrc/templates/wide_blocks.cuh).
HALVES = {
    32: ["int1", "int2", "uint3", "int4", "uint4", "int5", "int6", "float3_e1m1", "float4_e2m1"],
    64: ["int1", "uint2", "int3", "int4", "uint4", "float3_e1m1", "float4_e2m1"],
}


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "dtype"), [(tokens, dtype) for tokens, of in HALVES.items() for dtype in of])
def test_halves_of_a_multiprocessor_are_right(tokens, dtype, act):
    """Of a task each or sums that meet, in launches of which some blocks repeat what others do."""
    row = row_for(dtype, act, tokens)
    groups = ((128, "whole"), (-1, "whole"), *((group, "zero") for group in (16, 32, 64) if tokens == 32))
    for i, shape in enumerate([(520, 4096), (1000, 1000), (136, 8200), (3000, 1030)]):
        for j, (group, kind) in enumerate(groups):
            meet, m = (1, 2, 4)[(i + j) % 3], (tokens, tokens - 11, tokens + 9)[j % 3]
            if -(-shape[0] // 128) * -(-m // tokens) <= 28:
                assert right(row, shape, m, meet, group, HALVES_OF_ONE, kind), (shape, m, meet, group)


def test_halves_refuse_what_whole_multiprocessors_are_for():
    row = row_for("int4", torch.float16, 32)
    assert not right(row, (520, 1024), 32, 3, blocks=HALVES_OF_ONE), "clusters of three leave too much of a device idle"
    assert not right(row, (128 * 100, 1024), 32, 2, blocks=HALVES_OF_ONE), "more tasks than clusters"
    assert not right(row_for("int8", torch.float16, 32), (520, 1024), 32, 1, blocks=HALVES_OF_ONE), "no kernel"
    assert not right(row_for("int4", torch.float16, 128), (520, 1024), 32, 1, blocks=HALVES_OF_ONE), "no kernel"


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [32, 48, 64, 96])
@pytest.mark.parametrize(
    "dtype", [*(f"int{bits}" for bits in range(1, 9)), "uint4", "uint7", "float3_e1m1", "float6_e3m2", "float8_e4m3"]
)
def test_blocks_of_64_rows_are_right(tokens, dtype, act):
    """Of a task each or of two whose sums meet; stages that are odd and even in number, few tokens of a tile, several
    tiles; with 32 and 64 tokens groups of every length."""
    row = row_for(dtype, act, tokens)
    groups = [(128, "whole"), (-1, "whole")] + [(group, "zero") for group in (16, 32, 64) if tokens in (32, 64)]
    for i, shape in enumerate([(520, 4096), (1000, 1000), (136, 8200), (3000, 1030)]):
        for j, (group, kind) in enumerate(groups):
            meet, m = 1 + (i + j) % 2, (tokens, tokens - 11, tokens + 9)[j % 3]
            if -(-shape[0] // 64) * -(-m // tokens) * meet <= 120:
                assert right(row, shape, m, meet, group, ROWS, kind), (shape, m, meet, group)


def test_blocks_of_64_rows_refuse_what_others_are_for():
    row = row_for("int4", torch.float16, 64)
    assert not right(row, (520, 4096), 64, 3, blocks=ROWS), "sums of three blocks have no room"
    assert not right(row, (64 * 140, 1024), 64, 1, blocks=ROWS), "more tasks than blocks"
    assert not right(row, (520, 384), 64, 2, blocks=ROWS), "a warpgroup would have nothing"
    assert not right(row_for("int4", torch.float16, 128), (520, 1024), 64, 1, blocks=ROWS), "no kernel"


@pytest.mark.parametrize(("dtype", "tokens"), [("int4", 32), ("uint2", 64), ("int7", 96), ("float8_e4m3", 48)])
def test_sanitizer_small_product_by_blocks_of_64_rows(dtype, tokens):
    for meet in (1, 2):
        assert right(row_for(dtype, torch.float16, tokens), (300, 2100), tokens - 3, meet, blocks=ROWS, kind="whole")


@pytest.mark.parametrize(("dtype", "tokens"), [("int4", 32), ("uint2", 64)])
def test_sanitizer_small_product_by_halves_of_more_tokens(dtype, tokens):
    for meet in (1, 2, 4):
        row = row_for(dtype, torch.float16, tokens)
        assert right(row, (300, 2100), tokens - 3, meet, blocks=HALVES_OF_ONE, kind="whole")


def test_more_blocks_than_sums_can_come_from_are_refused():
    for tokens in TILES:
        assert not right(row_for("int4", torch.float16, tokens), (520, 1024), tokens, MOST + 1), tokens
    # Tasks left over are more than there are clusters.
    assert not right(row_for("int4", torch.float16, 32), (128 * 100, 1024), 32, 2)


@pytest.mark.parametrize("shape", [(4608, 3584), (4096, 4096), (8192, 3584), (3584, 2048)])
def test_shapes_of_which_the_plan_lets_sums_meet_are_right(shape):
    for m in (24, 48, 64, 96, 128, 144, 160, 200, 256):
        weight = oracle.make("int4", shape, 128, "none", seed=m, plain=True)
        x, bias = oracle.normal(m, shape[1], dtype=torch.float16, seed=m), bias_for(shape[0], m)
        y = lowbit.matmul(x, weight.pw, bias)
        assert_exact(x, weight, bias, y)
        assert oracle.same_bits(lowbit.matmul(x, weight.pw, bias), y), f"{shape}, M={m}: runs differ"
