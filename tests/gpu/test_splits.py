"""Risk: a way to share K that the plan chooses for no shape of another test adds up the wrong sums, or too early."""

import pytest
import torch

from lowbit import extension
from lowbit.errors import SchemeError

from . import oracle
from .kernels import may_refuse, needs_kernels, product_by, tokens
from .products import assert_exact, bias_for, right_by_split, row_of

pytestmark = needs_kernels

#: Row tiles of a task, parts of K, blocks (csrc/templates/narrow/split.cuh): warps with rows of their own, all or few
#: of them, warps that share K, some that idle, two blocks that do.
SHARED = [(16, 1, 1), (14, 1, 1), (8, 2, 1), (4, 4, 1), (2, 8, 1), (5, 3, 1), (1, 4, 1)]
SHARED += [(16, 1, 2), (8, 2, 2), (4, 4, 2), (2, 8, 2), (6, 2, 2)]
#: The same of blocks that take half of a multiprocessor: some of 8 warps share K, or two blocks do.
HALVES = [(8, 1, 2), (6, 1, 2), (4, 2, 2), (2, 4, 2), (4, 2, 1), (2, 4, 1), (3, 2, 1), (1, 8, 1)]
#: Row groups of a block, warps of each, blocks, in half of a multiprocessor and in all of it (decode/spread.cuh).
SPREAD = [(8 // parts, parts, blocks) for parts in (1, 2, 4, 8) for blocks in (1, 2, 4, 8)]
SPREAD += [(16 // parts, parts, blocks) for parts in (1, 4, 16) for blocks in (1, 2, 4, 8)]
#: Of two blocks of half of a multiprocessor each, also with all of a warp's rows; shapes that are enough for them.
TWO_EACH = [*HALVES, (8, 1, 1), (7, 1, 1), (2, 2, 1), (4, 1, 2)]
MANY_ROWS = [(4400, 1300), (8500, 500)]
SHAPES = [(520, 4096), (1000, 1000), (40, 8200)]


def right(
    row: dict, shape, split, early: int, kind: str, warps: int = 16, next_after: int = 0, group=128, two_each=False
) -> bool:
    """Whether a kernel takes a split; its product is right then, and the same a second and a third time, when the next
    one has begun before it ends."""
    weight = oracle.make(row["weight"], shape, group, kind, seed=sum(split))
    x = oracle.normal(tokens(row["name"]), shape[1], dtype=getattr(torch, row["act"]), seed=early)
    bias = bias_for(shape[0], early)
    return right_by_split(row["name"], (*split, early, warps, next_after, two_each), x, weight, bias)


def taken(row: dict, splits: list, early: int, warps=lambda split: 16, kind=None, group=128) -> set:
    """The splits that a kernel takes for any shape, with 1 to ``early`` stages asked for early, the next launch from
    the beginning on or after some; all of them right."""
    kind = kind or ("zero" if row["weight"].startswith("uint") else "none")
    return {
        split
        for i, split in enumerate(splits)
        for j, shape in enumerate(SHAPES)
        if right(row, shape, split, 1 + (i + j) % early, kind, warps(split), (5 * i + 3 * j) % 9, group)
    }


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["int1", "int2", "uint3", "int4", "uint6", "int8", "float4_e2m1", "float8_e4m3"])
@pytest.mark.parametrize("most", [8, 16])
def test_every_split_of_few_rows_is_right(most, dtype, act):
    row = row_of(dtype, act, "gemm_sm90", most)
    if may_refuse(row["name"], 1, 1):
        pytest.skip(f"{row['name']} is not for this device")
    # A stage has room for few parts of some types.
    assert {(16, 1, 1), (14, 1, 1), (8, 2, 1), (16, 1, 2), (8, 2, 2)} <= taken(row, SHARED, 3)
    if torch.cuda.get_device_capability() == (9, 0):
        assert {(8, 1, 2), (6, 1, 2), (4, 2, 2), (4, 2, 1), (3, 2, 1)} <= taken(row, HALVES, 4, lambda split: 8)


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("int2", "none"), ("uint2", "whole"), ("uint4", "whole"), ("uint4", "zero"), ("int6", "none"), ("uint8", "whole")]
    + [("float4_e2m1", "none"), ("float8_e4m3", "none")],
)
@pytest.mark.parametrize("most", [8, 16])
def test_every_split_of_fine_groups_is_right(most, dtype, kind, group):
    row = row_of(dtype, torch.float16, "gemm_sm90", most)
    if may_refuse(row["name"], 1, 1):
        pytest.skip(f"{row['name']} is not for this device")
    assert {(14, 1, 1), (8, 2, 1), (8, 2, 2)} <= taken(row, SHARED, 3, kind=kind, group=group)
    if torch.cuda.get_device_capability() == (9, 0) and (most == 8 or kind != "zero"):
        assert {(8, 1, 2), (4, 2, 1)} <= taken(row, HALVES, 4, lambda split: 8, kind, group)


def taken_by_two(row: dict, splits: list, shapes: list, kind: str, group: int = 128) -> set:
    """The splits that a kernel takes for any shape with two blocks on each multiprocessor."""
    return {
        split
        for i, split in enumerate(splits)
        for shape in shapes
        if right(row, shape, split, 1 + i % 8, kind, 8, 0, group, two_each=True)
    }


@pytest.mark.parametrize(
    ("dtype", "kind", "group"),
    [("int1", "none", 128), ("uint2", "zero", 128), ("int3", "none", 128), ("int4", "none", 128)]
    + [("uint4", "whole", 32), ("int6", "none", 128), ("int8", "none", 128), ("float8_e4m3", "none", 64)],
)
@pytest.mark.parametrize("most", [8, 16])
def test_two_blocks_on_each_multiprocessor_are_right(most, dtype, kind, group):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("halves of a multiprocessor are for compute capability 9.0")
    row = row_of(dtype, torch.float16, "gemm_sm90", most)
    assert {(7, 1, 1), (8, 1, 2), (4, 2, 2), (4, 2, 1)} <= taken_by_two(row, TWO_EACH, SHAPES + MANY_ROWS, kind, group)


@pytest.mark.parametrize("dtype", ["int1", "uint3", "int4", "int6", "uint8", "float4_e2m1", "float8_e4m3"])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_two_blocks_of_decode_on_each_multiprocessor_are_right(most, dtype):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches overlap since compute capability 9.0")
    row, kind = row_of(dtype, torch.float16, "decode", most), "zero" if dtype.startswith("uint") else "none"
    splits = [split for split in SPREAD if split[0] * split[1] == 8 and split[2] <= 4]
    assert {(1, 8, 1), (1, 8, 2), (2, 4, 2), (4, 2, 4)} <= taken_by_two(row, splits, MANY_ROWS, kind)


@pytest.mark.parametrize(("family", "most", "split"), [("decode", 2, (2, 4, 2, 8)), ("gemm_sm90", 8, (4, 2, 1, 8))])
def test_sanitizer_small_product_by_two_blocks_on_each_multiprocessor(family, most, split):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("halves of a multiprocessor are for compute capability 9.0")
    weight, x = oracle.make("int4", (4400, 520), 128, "none"), oracle.normal(most, 520, dtype=torch.float16, seed=1)
    name = row_of("int4", torch.float16, family, most)["name"]
    assert right_by_split(name, (*split, 8, 0, True), x, weight, None)


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize(("dtype", "kind"), [("uint4", "whole"), ("int2", "none")])
def test_sanitizer_small_product_of_fine_groups_by_halves(dtype, kind, group):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("halves of a multiprocessor are for compute capability 9.0")
    row = row_of(dtype, torch.float16, "gemm_sm90", 8)
    assert right(row, (300, 2100), (4, 2, 1), 2, kind, warps=8, next_after=6, group=group)


@pytest.mark.parametrize("dtype", ["int1", "uint3", "int4", "uint7", "int8", "float4_e2m1"])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_every_spread_of_decode_is_right(most, dtype):
    row = row_of(dtype, torch.float16, "decode", most)
    pairs = torch.cuda.get_device_capability() >= (9, 0)
    assert {split for split in SPREAD if pairs or split[2] == 1} <= taken(
        row, SPREAD, 8, lambda split: split[0] * split[1]
    )


@pytest.mark.parametrize("blocks", [4, 8])
@pytest.mark.parametrize("dtype", ["int2", "uint4", "int7", "float3_e1m1"])
def test_clusters_of_decode_are_right_where_sums_meet_more_than_once(dtype, blocks):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters came with compute capability 9.0")
    kind = "zero" if dtype.startswith("uint") else "none"
    weight = oracle.make(dtype, (64000, 1300), 128, kind)
    for most in (1, 2, 4):
        row, x = row_of(dtype, torch.float16, "decode", most), oracle.normal(most, 1300, dtype=torch.float16, seed=most)
        for split in ((4, 2, blocks, 8, 8, 6), (2, 4, blocks, 2, 8, 0), (4, 4, blocks, 1, 16, 0)):
            assert right_by_split(row["name"], split, x, weight, bias_for(64000, most)), split


@pytest.mark.parametrize("dtype", ["int1", "int3", "int4", "int8"])
@pytest.mark.parametrize("shape", [(3584, 14336), (5120, 17408), (2560, 9728)])
def test_few_rows_of_many_k_are_right_by_what_is_chosen(shape, dtype):
    weight = oracle.make(dtype, shape, 128, "none")
    for m in (1, 2, 3, 4):
        name = row_of(dtype, torch.float16, "decode", {1: 1, 2: 2}.get(m, 4))["name"]
        x = oracle.normal(m, shape[1], dtype=torch.float16, seed=m)
        assert_exact(x, weight, None, product_by(name, x, weight.pw))


@pytest.mark.parametrize("split", [(4, 2, 4, 8, 8, 6), (2, 8, 8, 1, 16, 0)])
def test_sanitizer_small_product_by_clusters_of_decode(split):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters came with compute capability 9.0")
    weight, x = oracle.make("int4", (300, 2100), 128, "none"), oracle.normal(2, 2100, dtype=torch.float16, seed=1)
    assert right_by_split(row_of("int4", torch.float16, "decode", 2)["name"], split, x, weight, None)


def test_a_split_that_no_kernel_can_do_is_refused():
    row = row_of("int4", torch.float16, "gemm_sm90", 8)
    if may_refuse(row["name"], 1, 1):
        pytest.skip(f"{row['name']} is not for this device")
    for split in [(16, 2, 1), (5, 3, 2), (1, 16, 1)]:  # too many warps, a row tile of two blocks, too many tasks
        assert not right(row, (8192, 1024), split, 1, "none"), split
    for split in [(8, 1, 1), (8, 2, 1), (1, 8, 1)]:  # the same of half a multiprocessor, and parts of tasks
        assert not right(row, (8192, 1024), split, 1, "none", warps=8), split
    assert not right(row, (520, 1024), (8, 1, 2), 1, "none", warps=12)
    assert not right(row, (520, 1024), (8, 1, 2), 1, "none", warps=16, two_each=True)
    assert not right(row_of("int4", torch.float16, "decode", 1), (520, 1024), (1, 8, 1), 1, "none", 8, two_each=True)
    if torch.cuda.get_device_capability() == (9, 0):  # tiles of more tokens never have two each
        for split, warps in (((8, 1, 2), 16), ((8, 1, 2), 8)):
            row = row_of("int4", torch.float16, "gemm_sm90", 32)
            assert not right(row, (520, 1024), split, 1, "none", warps=warps, two_each=True)
    with pytest.raises(SchemeError, match="must be in 1 to 255, next_after in 0 to 8, got"):
        with extension.force_cuda_split(1, 1, 1, next_after=9):
            pass
    assert right(row, (8192, 1024), (16, 1, 1), 2, "none")
