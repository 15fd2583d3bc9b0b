"""Risk: products of 5 and more rows of x go wrong where work is cut into parts, or by more than roundings explain.

Weights are plain where that can be: fp16 and bf16 hold all of their values, so that no rounding hides a scale, a group
or a step in the wrong place.
"""

import pytest
import torch

import lowbit
from lowbit.commands.selftest import TOLERANCE
from lowbit.dtypes import weight_type
from lowbit.scheme import GROUP_SIZES, WHOLE_ROW

from . import oracle
from .kernels import family, is_wide, kernels_launched, may_refuse, needs_kernels, product_by, ran, tokens
from .products import (
    BY_TILE,
    FLOATS,
    ROWS,
    assert_exact,
    assert_right,
    bias_for,
    group_for,
    kind_for,
    name,
    placed,
    row_of,
)

pytestmark = needs_kernels

GEMM = [row for row in ROWS if family(row["name"]) == "gemm_sm90"]
WIDE = [row for row in GEMM if is_wide(row["name"])]
TILES = [row for row in BY_TILE if row in GEMM]


def skip_elsewhere(row: dict) -> None:
    if may_refuse(row["name"], 1, 1):
        pytest.skip(f"{row['name']} is not for this device")


def plain(dtype: str, shape, i: int = 0) -> oracle.Weight:
    """A plain weight with one of the ways to group it and of the kinds of zeros of its type."""
    kinds = ("none", "zero", "min") if weight_type(dtype).kind == "uint" else ("none",)
    group_size = (*GROUP_SIZES, WHOLE_ROW)[i % (len(GROUP_SIZES) + 1)]
    return oracle.make(dtype, shape, group_size, kinds[i % len(kinds)], ("float16", "bfloat16")[i % 2], i, plain=True)


@pytest.mark.parametrize("row", WIDE, ids=name)
def test_wide_kernel_is_exact_where_values_need_no_rounding(row):
    skip_elsewhere(row)
    i, act, most = ROWS.index(row), getattr(torch, row["act"]), tokens(row["name"])
    for j, (n, k) in enumerate([(200, 6152), (130, 1000), (33, 203), (520, 2048), (64, 4096)]):
        weight = plain(row["weight"], (n, k), i + j)
        for m in (most, 1 + (5 * i + 11 * j) % most):
            x, bias = placed(oracle.normal(m, k, dtype=act, seed=m).abs() + 0.5, spread=True), bias_for(n, i + j)
            assert_exact(x, weight, bias, product_by(row["name"], x, weight.pw, bias))


@pytest.mark.parametrize("shape", [(57344, 1024), (9216, 4096), (64, 28672), (40, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["uint3", "int8"])
@pytest.mark.parametrize("tile", TILES, ids=name)
def test_blocks_with_parts_of_several_tasks(tile, dtype, shape):
    """Stages of tasks are cut unevenly over blocks: several tasks a block, many blocks a task, blocks without work."""
    act, most = getattr(torch, tile["act"]), tokens(tile["name"])
    row = row_of(dtype, act, "gemm_sm90", most)
    skip_elsewhere(row)
    weight = oracle.make(dtype, shape, 128, "zero" if dtype.startswith("u") else "none", plain=True)
    for m in (most, most // 2 + 1):
        x = oracle.normal(m, shape[1], dtype=act, seed=m)
        y = product_by(row["name"], x, weight.pw)
        assert_exact(x, weight, y=y)
        assert oracle.same_bits(product_by(row["name"], x, weight.pw), y), f"M={m}: two runs differ"


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize("most", [32, 48, 64, 96, 128, 144, 160, 192, 208, 256])
def test_more_rows_of_x_than_a_tile_has(most, act):
    """Tasks that a block has all of, whose y it stores itself, and tasks in parts; y of any stride."""
    row = row_of("int4", act, "gemm_sm90", most)
    skip_elsewhere(row)
    for i, (n, k) in enumerate([(1000, 1096), (4112, 200), (48, 9000), (200, 16)]):
        for m in (most + 1, 2 * most, 7 * most - 3):
            weight, x = plain("int4", (n, k), i), placed(oracle.normal(m, k, dtype=act), spread=True)
            launched = kernels_launched(lambda x=x, weight=weight: product_by(row["name"], x, weight.pw))
            assert ran(launched, row["name"]), launched
            for beyond in (3, 4):  # rows of y that begin at odd places, and at even ones
                poisoned, bias = torch.full((m + 2, n + beyond), torch.nan, dtype=act, device="cuda"), bias_for(n, i)
                y = product_by(row["name"], x, weight.pw, bias, out=poisoned[1:-1, :n])
                assert_exact(x, weight, bias, y)
                assert int(poisoned.isnan().sum()) == poisoned.numel() - m * n, "memory around y was written"


@pytest.mark.parametrize("most", [128, 256])
def test_many_tasks_of_which_few_are_in_parts(most):
    row = row_of("uint3", torch.float16, "gemm_sm90", most)
    skip_elsewhere(row)
    weight, x = plain("uint3", (4112, 1096), 1), oracle.normal(2100, 1096, dtype=torch.float16)
    y = product_by(row["name"], x, weight.pw)
    assert_exact(x, weight, y=y)
    assert oracle.same_bits(product_by(row["name"], x, weight.pw), y), "two runs differ"


@pytest.mark.parametrize(
    ("dtype", "shape", "m", "most"),
    [("int8", (3584, 14336), 256, 128), ("int4", (3584, 14336), 2048, 256), ("int4", (5120, 27648), 1536, 192)],
)
def test_patches_of_three_and_of_all_row_blocks(dtype, shape, m, most):
    """Where the usual ones would read weights or x from memory again (best_patch.cuh; tests/test_patches.py)."""
    row = row_of(dtype, torch.float16, "gemm_sm90", most)
    skip_elsewhere(row)
    weight, x = plain(dtype, shape, 3), oracle.normal(m, shape[1], dtype=torch.float16)
    assert_exact(x, weight, y=product_by(row["name"], x, weight.pw))


@pytest.mark.parametrize("most", [16, 128, 256])
def test_sums_of_parts_take_no_more_memory_than_an_expanded_weight_may(most):
    row = row_of("int4", torch.float16, "gemm_sm90", most)
    skip_elsewhere(row)
    weight, x = oracle.make("int4", (57344, 512)), oracle.normal(most, 512, dtype=torch.float16)
    y = product_by(row["name"], x, weight.pw)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    product_by(row["name"], x, weight.pw, out=y)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize("dtype", ["int1", "uint4", "int7", "float6_e2m3"])
def test_numbers_of_rows_around_those_of_tiles(dtype, act):
    weight, exact = plain(dtype, (200, 8200), 3), torch.cuda.get_device_capability() == (9, 0)
    for m in (17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 144, 191, 255, 256, 257, 513):
        x, bias = oracle.normal(m, 8200, dtype=act, seed=m), bias_for(200, m)
        y = lowbit.matmul(x, weight.pw, bias)
        (assert_exact if exact else assert_right)(x, weight, bias, y)
        assert oracle.same_bits(lowbit.matmul(x, weight.pw, bias), y), f"M={m}: two runs differ"


@pytest.mark.parametrize("row", TILES, ids=name)
def test_two_runs_give_the_same_bits_beside_other_work(row):
    """Blocks come and go in another order while other kernels take multiprocessors."""
    skip_elsewhere(row)
    weight = oracle.make("uint3", (4112, 4096), group_for(row), kind_for(row))
    x = oracle.normal(tokens(row["name"]), 4096, dtype=getattr(torch, row["act"]))
    expected, side = product_by(row["name"], x, weight.pw), torch.cuda.Stream()
    other, seen = oracle.normal(2048, 2048, dtype=torch.float16), []
    for i in range(50):
        with torch.cuda.stream(side):
            torch.mm(other[: 64 * (i % 8) + 64], other)
        seen.append(product_by(row["name"], x, weight.pw))
    torch.cuda.synchronize()
    assert all(oracle.same_bits(y, expected) for y in seen)


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), [("int4", "none"), ("uint4", "zero"), ("int8", "none"), ("uint2", "zero")])
def test_error_of_every_tile_is_what_the_readme_promises(dtype, kind, act):
    """Zeros are whole numbers, as every method but hqq makes them."""
    for scale_type in ("float16", "bfloat16"):
        weight = oracle.make(dtype, (512, 4096), 128, kind, scale_type, plain=True)
        scales = oracle.make(dtype, (512, 4096), 128, kind, scale_type).qt.scales
        weight = oracle.weight_of(
            dtype, weight.qt.unpack(), scales, weight.qt.zeros, zero_kind=kind, scale_type=scale_type
        )
        for m in (8, 16, 32, 48, 64, 96, 128, 256, 2048):
            for kind_of_x, change in oracle.INPUTS.items():
                x = change(oracle.normal(m, 4096)).to(act)
                exact = oracle.product(x, weight)[0]
                error = ((lowbit.matmul(x, weight.pw).double() - exact).norm() / exact.norm()).item()
                allowed = TOLERANCE[str(act).removeprefix("torch.")]
                assert error <= allowed, f"M={m}, {kind_of_x} x, {weight.pw}: {error:.2e}"


@pytest.mark.parametrize("row", TILES, ids=name)
def test_bias_is_added_before_the_only_rounding(row):
    skip_elsewhere(row)
    weight = plain("uint3", (200, 520), 4)
    x = oracle.normal(tokens(row["name"]), 520, dtype=getattr(torch, row["act"]))
    bias = -oracle.product(x[:1], weight)[0][0].float()
    # Why so narrow: a sum rounded before all of it is taken off again would be wrong by half its own place.
    y, (exact, size) = product_by(row["name"], x, weight.pw, bias), oracle.product(x, weight, bias)
    reason = oracle.wrong(y[:1], exact[:1], size[:1], share=5e-6, together=False)
    assert reason is None, reason


@pytest.mark.parametrize("most", [64, 128, 144, 160, 192, 208, 256])
def test_sanitizer_small_product_of_several_tiles_of_tokens(most):
    row = row_of("uint3", torch.float16, "gemm_sm90", most)
    skip_elsewhere(row)
    weight, x = plain("uint3", (300, 328), 2), oracle.normal(most + 22, 328, dtype=torch.float16)
    assert_exact(x, weight, bias_for(300, 1), product_by(row["name"], x, weight.pw, bias_for(300, 1)))


@pytest.mark.parametrize("most", [64, 96, 128])
def test_sanitizer_several_tasks_of_a_block(most):
    """y of one goes through a stage that weights of the next come to."""
    row = row_of("int4", torch.float16, "gemm_sm90", most)
    skip_elsewhere(row)
    weight, x = oracle.make("int4", (280 * 128, 200), 128, plain=True), oracle.normal(most, 200, dtype=torch.float16)
    assert_exact(x, weight, y=product_by(row["name"], x, weight.pw))
