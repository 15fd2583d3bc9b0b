"""Risk: products of family gemm_sm80 go wrong where work is cut, where the ring turns, or where two warps meet.

Weights are plain: fp16 and bf16 hold all of their values, so that no rounding hides a scale, a group or a stage in the
wrong place. A build for 80 and 90a has these kernels as PTX for a Hopper GPU, which must be told to use them.
"""

import pytest
import torch

from lowbit.commands.selftest import TOLERANCE

from . import oracle
from .kernels import family, kernels_launched, may_refuse, needs_kernels, product_by, ran, tokens
from .products import BY_TILE, FLOATS, ROWS, assert_exact, bias_for, name, placed, row_of
from .test_gemm_sm90 import plain

pytestmark = needs_kernels

SM80 = [row for row in ROWS if family(row["name"]) == "gemm_sm80"]
TILES = [row for row in BY_TILE if row in SM80]


def product(row: dict, x, weight, bias=None, **options):
    """Skips the test where the stages of a kernel are larger than the device holds."""
    y = product_by(row["name"], x, weight.pw, bias, **options)
    return pytest.skip(f"{row['name']} takes too much shared memory for this device") if y is None else y


@pytest.mark.parametrize("row", SM80, ids=name)
def test_kernel_is_exact_where_values_need_no_rounding(row):
    i, act, most = ROWS.index(row), getattr(torch, row["act"]), tokens(row["name"])
    for j, (n, k) in enumerate([(200, 6152), (130, 1000), (33, 203), (520, 2048), (64, 4096)]):
        weight = plain(row["weight"], (n, k), i + j)
        for m in (most, 1 + (5 * i + 11 * j) % most):
            x, bias = placed(oracle.normal(m, k, dtype=act, seed=m).abs() + 0.5, spread=True), bias_for(n, i + j)
            assert_exact(x, weight, bias, product(row, x, weight, bias))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6, 11])
@pytest.mark.parametrize("tile", TILES, ids=name)
def test_any_number_of_stages_of_a_few_tasks(tile, stages):
    """Rings that never fill, that turn once and often; K that ends inside a stage, with NaN behind it."""
    act, most = getattr(torch, tile["act"]), tokens(tile["name"])
    for dtype in ("uint3", "int8"):
        row = row_of(dtype, act, "gemm_sm80", most)
        for k in (128 * stages, 128 * stages - 37):
            weight = plain(dtype, (270, k), stages)
            x = placed(oracle.normal(most, k, dtype=act, seed=k), spread=True)
            assert_exact(x, weight, bias_for(270, stages), product(row, x, weight, bias_for(270, stages)))


@pytest.mark.parametrize("shape", [(57344, 1024), (64, 28672), (40, 128), (8192, 4096)], ids=str)
@pytest.mark.parametrize("dtype", ["uint3", "int8"])
@pytest.mark.parametrize("tile", TILES, ids=name)
def test_blocks_with_parts_of_several_tasks(tile, dtype, shape):
    """Stages of tasks are cut unevenly over blocks: several tasks a block, many blocks a task, blocks without work."""
    act, most = getattr(torch, tile["act"]), tokens(tile["name"])
    row = row_of(dtype, act, "gemm_sm80", most)
    weight = oracle.make(dtype, shape, 128, "zero" if dtype.startswith("u") else "none", plain=True)
    for m in (most, most // 2 + 1):
        x = oracle.normal(m, shape[1], dtype=act, seed=m)
        y = product(row, x, weight)
        assert_exact(x, weight, y=y)
        assert oracle.same_bits(product(row, x, weight), y), f"M={m}: two runs differ"


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize("most", [8, 16, 32, 48, 64, 96, 128])
def test_more_rows_of_x_than_a_tile_has(most, act):
    """Tasks that a block has all of, whose y it stores itself, and tasks in parts; y of any stride."""
    row = row_of("int4", act, "gemm_sm80", most)
    for i, (n, k) in enumerate([(1000, 1096), (4112, 200), (48, 9000), (200, 16)]):
        for m in (most + 1, 2 * most, 7 * most - 3):
            weight, x = plain("int4", (n, k), i), placed(oracle.normal(m, k, dtype=act), spread=True)
            product(row, x, weight)  # skips
            launched = kernels_launched(lambda x=x, weight=weight: product(row, x, weight))
            assert ran(launched, row["name"]), launched
            for beyond in (3, 4):  # rows of y that begin at odd places, and at even ones
                poisoned, bias = torch.full((m + 2, n + beyond), torch.nan, dtype=act, device="cuda"), bias_for(n, i)
                y = product(row, x, weight, bias, out=poisoned[1:-1, :n])
                assert_exact(x, weight, bias, y)
                assert int(poisoned.isnan().sum()) == poisoned.numel() - m * n, "memory around y was written"


@pytest.mark.parametrize("most", [8, 128])
def test_sums_of_parts_take_no_more_memory_than_an_expanded_weight_may(most):
    row = row_of("int4", torch.float16, "gemm_sm80", most)
    weight, x = oracle.make("int4", (57344, 512)), oracle.normal(most, 512, dtype=torch.float16)
    y = product(row, x, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    product(row, x, weight, out=y)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20


@pytest.mark.parametrize("row", TILES, ids=name)
def test_two_runs_give_the_same_bits_beside_other_work(row):
    """Blocks come and go in another order while other kernels take multiprocessors."""
    weight = oracle.make("uint3", (4112, 4096), 64, "zero")
    x = oracle.normal(tokens(row["name"]), 4096, dtype=getattr(torch, row["act"]))
    expected, side = product(row, x, weight), torch.cuda.Stream()
    other, seen = oracle.normal(2048, 2048, dtype=torch.float16), []
    for i in range(50):
        with torch.cuda.stream(side):
            torch.mm(other[: 64 * (i % 8) + 64], other)
        seen.append(product(row, x, weight))
    torch.cuda.synchronize()
    assert all(oracle.same_bits(y, expected) for y in seen)


@pytest.mark.parametrize("row", [row for row in SM80 if row["weight"] in ("int4", "uint4", "int8")], ids=name)
def test_error_of_every_tile_is_what_the_readme_promises(row):
    """Zeros are whole numbers, as every method but hqq makes them."""
    act, kind = getattr(torch, row["act"]), "zero" if row["weight"].startswith("u") else "none"
    for scale_type in ("float16", "bfloat16"):
        weight = oracle.make(row["weight"], (512, 4096), 128, kind, scale_type, plain=True)
        scales = oracle.make(row["weight"], (512, 4096), 128, kind, scale_type).qt.scales
        codes, zeros = weight.qt.unpack(), weight.qt.zeros
        weight = oracle.weight_of(row["weight"], codes, scales, zeros, zero_kind=kind, scale_type=scale_type)
        for m in (tokens(row["name"]), 5 * tokens(row["name"])):
            for kind_of_x, change in oracle.INPUTS.items():
                x = change(oracle.normal(m, 4096)).to(act)
                exact = oracle.product(x, weight)[0]
                error = ((product(row, x, weight).double() - exact).norm() / exact.norm()).item()
                assert error <= TOLERANCE[row["act"]], f"M={m}, {kind_of_x} x, {weight.pw}: {error:.2e}"


@pytest.mark.parametrize("row", TILES, ids=name)
def test_bias_is_added_before_the_only_rounding(row):
    weight = plain("uint3", (200, 520), 4)
    x = oracle.normal(tokens(row["name"]), 520, dtype=getattr(torch, row["act"]))
    bias = -oracle.product(x[:1], weight)[0][0].float()
    # Why so narrow: a sum rounded before all of it is taken off again would be wrong by half its own place.
    y, (exact, size) = product(row, x, weight, bias), oracle.product(x, weight, bias)
    reason = oracle.wrong(y[:1], exact[:1], size[:1], share=5e-6, together=False)
    assert reason is None, reason


@pytest.mark.parametrize("most", [8, 16, 32, 48, 64, 96, 128])
def test_sanitizer_small_product_of_several_tiles_of_tokens(most):
    row = row_of("uint3", torch.float16, "gemm_sm80", most)
    weight, x = plain("uint3", (300, 328), 2), oracle.normal(most + 22, 328, dtype=torch.float16)
    assert_exact(x, weight, bias_for(300, 1), product(row, x, weight, bias_for(300, 1)))


def test_only_devices_with_little_shared_memory_may_refuse():
    if torch.cuda.get_device_capability() in ((8, 0), (9, 0), (10, 0)):
        assert not any(may_refuse(row["name"], 128, 8192) for row in SM80)
