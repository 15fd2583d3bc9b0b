"""Risk: a decode kernel is wrong for some weight, grouping, shape, number of tokens or input, or from run to run."""

from functools import lru_cache

import pytest
import torch

import lowbit
from lowbit import reference
from lowbit.dtypes import weight_type
from lowbit.errors import SchemeError

from . import oracle
from .kernels import decode_rows, forced, kernels_launched, needs_kernels, product_by, ran_decode, tile, tokens
from .plan import LONG, WAYS, cases

pytestmark = needs_kernels

ROWS = sorted(decode_rows(), key=lambda row: (row["weight"], row["name"]))
PLAN = cases(ROWS)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: One kernel for each tile and activation type.
BY_TILE = list({(row["act"], tile(row["name"])): row for row in ROWS if row["weight"] == "uint3"}.values())


def by_type() -> list[dict]:
    """One kernel for each weight type and activation type, with every tile in turn."""
    groups: dict[tuple, list[dict]] = {}
    for row in ROWS:
        groups.setdefault((row["weight"], row["act"]), []).append(row)
    return [rows[(i // 2 + i % 2 * 3) % len(rows)] for i, rows in enumerate(groups.values())]


def skip_refused(refused: list[str], right: int) -> None:
    """At the end of a test: say what kernels refused, which they may for the length of x alone."""
    if refused:
        pytest.skip(f"{right} products right, {len(refused)} refused because x does not fit: {'; '.join(refused[:3])}")


def name(row):
    return row["name"]


@lru_cache(maxsize=64)
def weight_of(dtype, shape, group_size, zero_kind, scale_type):
    return oracle.make(dtype, shape, group_size, zero_kind, scale_type, seed=shape[0] + 7 * shape[1])


def placed(x: torch.Tensor, spread: bool) -> torch.Tensor:
    """x [m, k], dense, or aligned for the kernels with rows apart: NaN before, between and behind them."""
    m, k = x.shape
    if not spread:
        return x.clone()
    around = torch.full((m + 2, -(-k // 8) * 8 + 8), torch.nan, dtype=x.dtype, device="cuda")
    around[1:-1, :k] = x
    return around[1:-1, :k]


def bias_for(n, i):
    return None if i % 4 == 3 else oracle.normal(n, dtype=FLOATS[i % 4], seed=i)


def assert_right(x, weight, bias=None, y=None):
    """For any way to compute it: some expand the weight to x's type first, which rounds each value once."""
    y = lowbit.matmul(x, weight.pw, bias) if y is None else y
    share = torch.finfo(x.dtype).eps / 2 + oracle.SHARE
    reason = oracle.wrong(y, *oracle.product(x, weight, bias), share)
    assert reason is None, f"{reason}; x {tuple(x.shape)} {x.dtype}, {weight.pw}"


# ---- every kernel ---------------------------------------------------------------------------------------------------


def test_build_has_a_kernel_for_every_choice():
    assert ROWS, "the library is there, but the manifest has no decode kernel"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_kernel_agrees_with_float64_and_with_itself(row):
    act, product, refused = getattr(torch, row["act"]), 0, []
    for case in PLAN[row["name"]]:
        weight = weight_of(case.weight, case.shape, case.group_size, case.zero_kind, case.scale_type)
        n, k = case.shape
        for m in case.ms:
            zero_mean = oracle.normal(m, k, seed=m + k)
            for kind, change in oracle.INPUTS.items():
                product += 1
                bias = bias_for(n, product)
                # Why: rows of any other length are not aligned for the kernel.
                x = placed(change(zero_mean).to(act), spread=product % 2 == 0 or (k % 8 != 0 and m > 1))
                poisoned = torch.full((m + 2, n + 3), torch.nan, dtype=act, device="cuda")
                y = product_by(row["name"], x, weight.pw, bias)
                if y is None:
                    refused.append(f"M={m}, K={k}")
                    continue
                again = product_by(row["name"], x, weight.pw, bias, out=poisoned[1:-1, :n])
                reason = oracle.wrong(y, *oracle.product(x, weight, bias))
                assert reason is None, f"{kind} x, M={m}, {weight.pw}: {reason}"
                assert oracle.same_bits(again.contiguous(), y), f"{kind} x, M={m}, {weight.pw}: two runs differ"
                untouched = poisoned.numel() - m * n
                assert int(poisoned.isnan().sum()) == untouched, "memory around y was written"
    skip_refused(refused, product - len(refused))


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_long_rows_are_right_or_refused(row):
    """A kernel may refuse x that does not fit; then another one, or the expanded weight, gives the right product."""
    n, k = LONG
    i, refused = ROWS.index(row), []
    weight = weight_of(row["weight"], LONG, *WAYS[i * 7 % len(WAYS)])
    for m in sorted({1, tokens(row["name"])}):
        x, bias = oracle.normal(m, k, dtype=getattr(torch, row["act"]), seed=m), bias_for(n, i)
        y = product_by(row["name"], x, weight.pw, bias)
        if y is None:
            refused.append(f"M={m}, K={k}")
            assert_right(x, weight, bias)
        else:
            reason = oracle.wrong(y, *oracle.product(x, weight, bias))
            assert reason is None, f"M={m}, {weight.pw}: {reason}"
    skip_refused(refused, right=2)


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), [("int3", "none"), ("uint4", "zero"), ("float5_e2m2", "none")])
def test_x_that_passes_by_in_many_phases(dtype, kind, act):
    """N so large that blocks can't share K finely: x of a block is more than its two places hold."""
    weight = oracle.make(dtype, (8192, 16384 + 72), 128, kind)
    for m in (5, 8, 13):
        x = oracle.normal(m, 16384 + 72, dtype=act, seed=m)
        y = lowbit.matmul(x, weight.pw)
        reason = oracle.wrong(y, *oracle.product(x, weight))
        assert reason is None, f"M={m}: {reason}"
        assert oracle.same_bits(lowbit.matmul(x, weight.pw), y)


@pytest.mark.parametrize("row", [row for row in ROWS if tokens(row["name"]) == 1], ids=name)
def test_x_that_needs_all_of_a_multiprocessor(row):
    """K just too long for the blocks of which two share a multiprocessor: larger ones keep x."""
    act, i = getattr(torch, row["act"]), ROWS.index(row)
    for m, k in ((1, 40008), (4, 16456), (7, 8200), (8, 8192)):
        ways = [way for way in WAYS if way[0] in (128, 256, -1)]
        weight = weight_of(row["weight"], (200, k), *ways[(i + m) % len(ways)])
        x, bias = oracle.normal(m, k, dtype=act, seed=m), bias_for(200, i)
        y = lowbit.matmul(x, weight.pw, bias)
        reason = oracle.wrong(y, *oracle.product(x, weight, bias))
        assert reason is None, f"M={m}, {weight.pw}: {reason}"
        assert oracle.same_bits(lowbit.matmul(x, weight.pw, bias), y), f"M={m}, {weight.pw}: two runs differ"


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), [("int3", "none"), ("uint6", "min"), ("float4_e2m1", "none")])
def test_products_so_large_that_blocks_take_all_of_a_multiprocessor(dtype, kind, act):
    weight = oracle.make(dtype, (40008, 2600), 128, kind)
    for m in (1, 2, 3, 8):
        x = oracle.normal(m, 2600, dtype=act, seed=m)
        launched = kernels_launched(lambda x=x: lowbit.matmul(x, weight.pw))
        if m < 8 or not dtype.startswith("float"):
            assert len(launched) == 1 and "Kind)1" in launched[0].replace("(int)", ""), launched
        assert_right(x, weight)


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize("dtype", ["int1", "int4", "uint7"])
def test_x_of_every_size_keeps_its_digits(dtype, act):
    """Integers multiply x as 8-bit digits with an exponent for 128 k: tiny, huge, and mixed groups, and exact ones."""
    n, k, small = 64, 1024, 6e-5 if act == torch.float16 else 1e-30
    weight = oracle.make(dtype, (n, k), 128, "zero" if dtype.startswith("u") else "none")
    base = oracle.normal(4, k, seed=3)
    lift = torch.ones(k // 128, device="cuda")
    lift[::2] = small
    for m in (1, 2, 4):
        for x in (base * small, base * 100, base * lift.repeat_interleave(128), base * (base > 2.5)):
            x = x[:m].to(act)
            assert_right(x, weight)
        x = torch.randint(-8, 9, (m, k), generator=oracle.generator(m), device="cuda").to(act)
        y, (exact, size) = lowbit.matmul(x, weight.pw), oracle.product(x, weight)
        assert oracle.wrong(y, exact, size, share=2e-6, together=False) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_in_x_is_not_finite_in_y(value):
    weight = oracle.make("int4", (64, 512))
    for m in (1, 2, 4, 8, 16):
        x = oracle.normal(m, 512, dtype=torch.float16)
        x[0, 300] = value
        y = lowbit.matmul(x, weight.pw)
        assert not y[0].isfinite().any() and y[1:].isfinite().all(), f"M={m}"


@pytest.mark.parametrize("row", by_type(), ids=name)
def test_extreme_scales_and_codes(row):
    """Scales from the smallest to the largest of their type, and 0; rows of only the lowest or highest codes."""
    act, wtype, (n, k, group) = getattr(torch, row["act"]), weight_type(row["weight"]), (67, 1000, 32)
    legal, chance = oracle.legal_codes(row["weight"]), oracle.generator(5)
    largest = max(abs(v) for c, v in enumerate(wtype.values) if c not in wtype.invalid_codes)
    codes = legal[torch.randint(len(legal), (n, k), generator=chance, device="cuda")]
    codes[0::4], codes[1::4] = legal[0], legal[-1]
    codes[2::4, ::2], codes[2::4, 1::2] = legal[-1], legal[0]
    kind = "zero" if wtype.kind == "uint" else "none"
    shape = (n, -(-k // group))
    sign = torch.randint(2, shape, generator=chance, device="cuda") * 2.0 - 1
    for scale_type in ("float16", "bfloat16"):
        wide = row["act"] == scale_type == "bfloat16"
        # Why not always 65504: the smallest x of fp16 times the largest weight must not overflow it.
        small, large = (1e-25, 1e25) if wide else (2.0**-24, min(65504, 1e9 / largest))
        steps = torch.tensor([0, small, 2.0**-14, 1 / largest], device="cuda")
        mixed = steps[torch.randint(len(steps), shape, generator=chance, device="cuda")]
        for scales in (torch.full_like(mixed, small), torch.full_like(mixed, large), mixed):
            zeros = torch.randint(2, shape, generator=chance, device="cuda") * largest if kind == "zero" else None
            weight = oracle.weight_of(row["weight"], codes, scales * sign, zeros, group, kind, scale_type)
            # x of a size that keeps y within reach, where its type has such a size.
            size = 50 / (scales.max().item() * largest * k**0.5)
            size = min(max(size, 2e-7), 1e4) if act == torch.float16 else size
            x = (oracle.normal(tokens(row["name"]), k, seed=3) * size).to(act)
            exact, share_of = oracle.product(x, weight)
            assert exact.abs().max() < 6e4
            with forced(row["name"]):
                y = lowbit.matmul(placed(x, True), weight.pw)
            reason = oracle.wrong(y, exact, share_of)
            assert reason is None, f"scales {scale_type} up to {scales.max().item():.3g}: {reason}"


@pytest.mark.parametrize("row", BY_TILE, ids=name)
def test_row_of_nan_or_infinity_stays_in_its_row(row):
    weight, m = oracle.make("uint3", (200, 520), 64, "zero"), tokens(row["name"])
    x = oracle.normal(m, 520, dtype=getattr(torch, row["act"]))
    with forced(row["name"]):
        clean = lowbit.matmul(x, weight.pw)
        for bad, value in ((m // 2, torch.nan), (m - 1, torch.inf)):
            spoilt = x.clone()
            spoilt[bad, 5] = value
            y = lowbit.matmul(spoilt, weight.pw)
            assert not y[bad].isfinite().any()
            others = [i for i in range(m) if i != bad]
            assert oracle.same_bits(y[others], clean[others])


def test_misspelt_kernel_cannot_be_forced():
    with pytest.raises(SchemeError, match="no CUDA kernel of this build is called 'w4a16_decode_n9'"):
        with forced("w4a16_decode_n9"):
            pass


def test_forced_kernel_that_cannot_hold_a_product_says_so():
    weight, wide = oracle.make("int4", (50, 520)), oracle.make("int4", (50, 520), scale_type="float32")
    row = next(row for row in ROWS if (row["weight"], row["act"]) == ("int4", "float16"))
    x = oracle.normal(1, 520, dtype=torch.float16)
    with forced(row["name"]):
        assert_right(x, weight)
        with pytest.raises(
            RuntimeError, match=f"{row['name']} was forced and can't hold a product with M 1, N 50, K 520"
        ):
            lowbit.matmul(x, wide.pw)
    assert_right(x, wide)


@pytest.mark.parametrize("row", BY_TILE, ids=name)
def test_forced_kernel_is_the_one_that_runs(row):
    weight = oracle.make("uint3", (200, 520), 64, "zero")
    x = oracle.normal(1, 520, dtype=getattr(torch, row["act"]))
    with forced(row["name"]):
        launched = kernels_launched(lambda x=x: lowbit.matmul(x, weight.pw))
    assert ran_decode(launched, tokens(row["name"])), launched


@pytest.mark.parametrize("dtype", ["int4", "uint6", "int7", "float5_e2m2"])
def test_sanitizer_small_products_of_each_tile(dtype):
    """Small enough for compute-sanitizer: every tile once, on one, two and three planes, floats, ragged N and K."""
    for i, row in enumerate(row for row in ROWS if row["weight"] == dtype):
        weight = oracle.make(dtype, (72, 328), (32, -1)[i % 2], ("none", "zero", "min")[i % 3])
        x = placed(
            oracle.normal(max(tokens(row["name"]) - 1, 1), 328, dtype=getattr(torch, row["act"])), spread=i % 2 == 0
        )
        with forced(row["name"]):
            assert_right(x, weight, bias_for(72, i))


@pytest.mark.parametrize("dtype", ["int3", "uint6"])
def test_sanitizer_small_products_on_whole_multiprocessors(dtype):
    """For compute-sanitizer too: few rows of W, but x too long for blocks of which two share a multiprocessor."""
    for m, k in ((1, 40008), (4, 16456), (8, 8200)):
        weight = oracle.make(dtype, (40, k), 128, "zero" if dtype.startswith("u") else "none")
        assert_right(oracle.normal(m, k, dtype=torch.float16), weight, bias_for(40, m))


# ---- every call -----------------------------------------------------------------------------------------------------


def test_oracle_agrees_with_the_reference():
    for i, kind in enumerate(("none", "zero", "min")):
        for dtype in ("int1", "uint5", "float6_e2m3"):
            weight = oracle.make(dtype, (20, 90), 32, kind, ("float16", "bfloat16", "float32")[i], seed=i)
            torch.testing.assert_close(weight.exact.cpu(), reference.dequantize(weight.qt), rtol=1e-15, atol=0)
            assert (weight.size >= weight.exact.abs() * (1 - 1e-12)).all()


@pytest.mark.parametrize("dtype", ["int1", "uint4", "int7", "float8_e4m3"])
@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
def test_any_number_of_tokens(dtype, act):
    weight = oracle.make(dtype, (200, 8200), 128, "zero" if dtype.startswith("uint") else "none")
    for m in (*range(1, 18), 33, 130):
        assert_right(oracle.normal(m, 8200, dtype=act, seed=m), weight, bias_for(200, m))


@pytest.mark.parametrize("m, tile", [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (16, 16), (17, None)])
def test_number_of_tokens_chooses_the_kernel(m, tile):
    weight, x = oracle.make("int4", (200, 520)), oracle.normal(m, 520, dtype=torch.float16)
    launched = kernels_launched(lambda: lowbit.matmul(x, weight.pw))
    if tile is None:
        assert "dequant" in launched[0] and len(launched) > 1, launched
    else:
        assert ran_decode(launched, tile), launched


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize("m", [1, 16])
def test_scales_of_float32_go_to_the_expanded_weight(act, m):
    weight = oracle.make("uint5", (200, 520), 64, "zero", "float32")
    x = oracle.normal(m, 520, dtype=act)
    launched = kernels_launched(lambda: lowbit.matmul(x, weight.pw))
    assert "dequant" in launched[0] and len(launched) > 1, launched
    assert_right(x, weight, bias_for(200, m))


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize("m", [1, 5, 16, 17])
def test_x_of_any_stride_and_alignment(act, m):
    for k in (520, 203):
        weight = oracle.make("int3", (50, k), 64)
        x = oracle.normal(m, k, dtype=act)
        for offset in (1, 2, 4, 8):
            memory = torch.full((offset + m * k + 1,), torch.nan, dtype=act, device="cuda")
            memory[offset:-1] = x.flatten()
            assert_right(memory[offset:-1].view(m, k), weight)
        for strided in (
            x.T.contiguous().T,
            x.repeat_interleave(2, 1)[:, ::2],
            x.repeat_interleave(2, 0)[::2],
            torch.nn.functional.pad(x, (3, 4), value=torch.nan)[:, 3:-4],
            x[:1].expand(m, k),
            x.view(m, 1, k).expand(m, 2, k).transpose(0, 1),
        ):
            before = strided.clone()
            assert_right(strided, weight)
            assert oracle.same_bits(strided.contiguous(), before)


@pytest.mark.parametrize("shape", [(520,), (1, 520), (0, 520), (3, 0, 520), (2, 3, 520), (2, 2, 8, 520)])
def test_leading_dimensions_are_kept(shape):
    weight = oracle.make("int4", (50, 520))
    x = oracle.normal(*shape, dtype=torch.float16)
    y = lowbit.matmul(x, weight.pw)
    assert y.shape == (*shape[:-1], 50) and y.is_contiguous() and y.dtype == x.dtype
    if y.numel():
        assert_right(x, weight, y=y)


@pytest.mark.parametrize("bias_type", FLOATS, ids=str)
@pytest.mark.parametrize("x_type", FLOATS, ids=str)
def test_bias_of_any_float_type(x_type, bias_type):
    weight = oracle.make("int4", (200, 520))
    for m in (1, 9, 40):
        x = oracle.normal(m, 520, dtype=x_type)
        assert_right(x, weight, oracle.normal(400, dtype=bias_type, seed=2)[::2] * 100)


@pytest.mark.parametrize("x_type", FLOATS[:2], ids=str)
def test_bias_is_added_before_the_only_rounding(x_type):
    weight = oracle.make("int4", (200, 520))
    for m in (1, 9):
        x = oracle.normal(m, 520, dtype=x_type)
        bias = -oracle.product(x[:1], weight)[0][0].float()
        # Why so narrow: a sum rounded before all of it is taken off again would be wrong by half its own place.
        y, (exact, size) = lowbit.matmul(x, weight.pw, bias), oracle.product(x, weight, bias)
        reason = oracle.wrong(y[:1], exact[:1], size[:1], share=3e-6, together=False)
        assert reason is None, reason


@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize(
    "make",
    [
        lambda m, **o: torch.empty(2, m, 50, **o),
        lambda m, **o: torch.empty(2, 50, m, **o).transpose(1, 2),
        lambda m, **o: torch.empty(2, m, 100, **o)[..., ::2],
        lambda m, **o: torch.empty(2, m, 61, **o)[..., 5:55],
    ],
    ids=["dense", "transposed", "every_second", "slice"],
)
def test_out_of_any_stride_is_written_and_returned(make, m):
    weight, x = oracle.make("int5", (50, 520)), oracle.normal(2, m, 520, dtype=torch.float16)
    out = make(m, dtype=torch.float16, device="cuda").fill_(torch.nan)
    assert lowbit.matmul(x, weight.pw, out=out) is out
    assert_right(x, weight, y=out)


def test_out_beside_x_in_one_buffer_leaves_the_rest_alone():
    weight, both = oracle.make("int4", (50, 520)), torch.full((4, 520 + 8 + 50 + 6), 7.0, device="cuda").half()
    both[:, :520] = x = oracle.normal(4, 520, dtype=torch.float16)
    lowbit.matmul(both[:, :520], weight.pw, out=both[:, 528:578])
    assert_right(x, weight, y=both[:, 528:578])
    assert (both[:, 520:528] == 7).all() and (both[:, 578:] == 7).all() and oracle.same_bits(both[:, :520].clone(), x)


@pytest.mark.parametrize("dtype", ["int1", "int3", "uint4", "int8", "float6_e3m2"])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_warp_with_many_tiles_and_one_step_each(dtype, m):
    """Codes and scales of the next tiles must not come into places of the ring that are still read."""
    weight = oracle.make(dtype, (60000, 1024), 128, "zero" if dtype.startswith("uint") else "none")
    x = oracle.normal(m, 1024, dtype=torch.float16)
    exact, share_of = oracle.product(x, weight)
    for _ in range(3):
        reason = oracle.wrong(lowbit.matmul(x, weight.pw), exact, share_of)
        assert reason is None, reason
