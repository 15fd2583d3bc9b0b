"""Risk: a kernel is wrong for some weight, grouping, shape, number of tokens or input, or from run to run."""

import pytest
import torch

import lowbit
from lowbit import reference
from lowbit.dtypes import weight_type
from lowbit.errors import SchemeError

from . import oracle
from .kernels import (
    family,
    forced,
    is_wide,
    kernels_launched,
    may_refuse,
    needs_kernels,
    product_by,
    ran,
    scales_integers,
    serves,
    tokens,
)
from .plan import LONG, WAYS
from .products import (
    BY_TILE,
    PLAN,
    ROWS,
    bias_for,
    by_type,
    group_for,
    kind_for,
    name,
    placed,
    skip_refused,
    weight_of,
    why_wrong,
)

pytestmark = needs_kernels


def test_build_has_a_kernel_for_every_choice():
    assert ROWS, "the library is there, but the manifest has no kernel of a product"


def test_oracle_agrees_with_the_reference():
    for i, kind in enumerate(("none", "zero", "min")):
        for dtype in ("int1", "uint5", "float6_e2m3"):
            weight = oracle.make(dtype, (20, 90), 32, kind, ("float16", "bfloat16", "float32")[i], seed=i)
            torch.testing.assert_close(weight.exact.cpu(), reference.dequantize(weight.qt), rtol=1e-15, atol=0)
            assert (weight.size >= weight.exact.abs() * (1 - 1e-12)).all()


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
                reason = why_wrong(row["name"], y, x, weight, bias, together=kind == "zero_mean")
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
            reason = oracle.wrong_rounded(lowbit.matmul(x, weight.pw, bias), x, weight, bias)
        else:
            reason = why_wrong(row["name"], y, x, weight, bias)
        assert reason is None, f"M={m}, {weight.pw}: {reason}"
    skip_refused(refused, right=2)


def extremes(row: dict, scale_type: str, largest: float, group: int) -> tuple[float, float, float]:
    """The smallest and largest scale to try with a kernel, and the smallest that it tells from its neighbours."""
    if row["act"] == scale_type == "bfloat16":
        return 1e-25, 1e25, 0.0
    wtype = weight_type(row["weight"])
    if row["act"] == "float16" and scales_integers(row["name"], 0 if wtype.kind == "float" else wtype.bits, group):
        return 2.0**-14, min(65504, 60000 / largest), 2.0**-14  # what fp16 holds of scales and of values
    # Why not always 65504: the smallest x of fp16 times the largest weight must not overflow it.
    return 2.0**-24, min(65504, 1e9 / largest), 0.0


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    "row",
    by_type([row for row in ROWS if not is_wide(row["name"])]) + by_type([row for row in ROWS if is_wide(row["name"])]),
    ids=name,
)
def test_extreme_scales_and_codes(row, group):
    """Scales from the smallest to the largest that a kernel takes, and 0; rows of only the lowest or highest codes."""
    if group_for(row, group) != group:
        pytest.skip(f"{row['name']} takes no groups of {group}")
    act, wtype, (n, k) = getattr(torch, row["act"]), weight_type(row["weight"]), (67, 1000)
    legal, chance = oracle.legal_codes(row["weight"]), oracle.generator(5)
    largest = max(abs(v) for c, v in enumerate(wtype.values) if c not in wtype.invalid_codes)
    codes = legal[torch.randint(len(legal), (n, k), generator=chance, device="cuda")]
    codes[0::4], codes[1::4] = legal[0], legal[-1]
    codes[2::4, ::2], codes[2::4, 1::2] = legal[-1], legal[0]
    kind = "zero" if wtype.kind == "uint" else "none"
    shape = (n, -(-k // group))
    sign = torch.randint(2, shape, generator=chance, device="cuda") * 2.0 - 1
    for scale_type in ("float16", "bfloat16"):
        small, large, least = extremes(row, scale_type, largest, group)
        steps = torch.tensor([0, small, 2.0**-14, max(1 / largest, least)], device="cuda")
        mixed = steps[torch.randint(len(steps), shape, generator=chance, device="cuda")]
        for scales in (torch.full_like(mixed, small), torch.full_like(mixed, large), mixed, torch.zeros_like(mixed)):
            zeros = torch.randint(2, shape, generator=chance, device="cuda") * largest if kind == "zero" else None
            weight = oracle.weight_of(row["weight"], codes, scales * sign, zeros, group, kind, scale_type)
            # x of a size that keeps y within reach, where its type has such a size.
            size = 50 / (max(scales.max().item(), small) * largest * k**0.5)
            size = min(max(size, 2e-7), 1e4) if act == torch.float16 else size
            x = placed((oracle.normal(tokens(row["name"]), k, seed=3) * size).to(act), spread=True)
            assert oracle.product(x, weight)[0].abs().max() < 6e4
            y = product_by(row["name"], x, weight.pw)
            if y is None:
                pytest.skip(f"{row['name']} is not for this device")
            reason = why_wrong(row["name"], y, x, weight)
            assert reason is None, f"scales {scale_type} up to {scales.max().item():.3g}: {reason}"


@pytest.mark.parametrize("row", BY_TILE, ids=name)
def test_row_of_nan_or_infinity_stays_in_its_row(row):
    weight, m = oracle.make("uint3", (200, 520), group_for(row), kind_for(row)), tokens(row["name"])
    x = oracle.normal(m, 520, dtype=getattr(torch, row["act"]))
    clean = product_by(row["name"], x, weight.pw)
    if clean is None:
        pytest.skip(f"{row['name']} is not for this device")
    for bad, value in ((m // 2, torch.nan), (m - 1, torch.inf)):
        spoilt = x.clone()
        spoilt[bad, 5] = value
        y = product_by(row["name"], spoilt, weight.pw)
        assert not y[bad].isfinite().any()
        others = [i for i in range(m) if i != bad]
        assert oracle.same_bits(y[others], clean[others])


# ---- the choice of a kernel -----------------------------------------------------------------------------------------


def test_misspelt_kernel_cannot_be_forced():
    with pytest.raises(SchemeError, match="no CUDA kernel of this build is called 'w4a16_decode_n9'"):
        with forced("w4a16_decode_n9"):
            pass


@pytest.mark.parametrize("kind", ["decode", "gemm_sm80", "gemm_sm90"])
def test_forced_kernel_that_cannot_hold_a_product_says_so(kind):
    weight, wide = oracle.make("int4", (50, 520)), oracle.make("int4", (50, 520), scale_type="float32")
    rows = [row for row in ROWS if (row["weight"], row["act"], row["family"]) == ("int4", "float16", kind)]
    x = oracle.normal(1, 520, dtype=torch.float16)
    if not rows:
        pytest.skip("this build has no such kernel for int4")
    said = f"{rows[0]['name']} was forced and can't hold a product with M 1, N 50, K 520"
    with forced(rows[0]["name"]):
        right = [case for case in (weight, wide) if serves(rows[0]["name"], case.pw)]
        for refused in (
            (weight, wide) if may_refuse(rows[0]["name"], 1, 520) else (w for w in (weight, wide) if w not in right)
        ):
            with pytest.raises(RuntimeError, match=said):
                lowbit.matmul(x, refused.pw)
    for right in (weight, wide):
        assert oracle.wrong_rounded(lowbit.matmul(x, right.pw), x, right) is None


@pytest.mark.parametrize("row", BY_TILE, ids=name)
def test_forced_kernel_is_the_one_that_runs(row):
    weight = oracle.make("uint3", (200, 520), group_for(row), kind_for(row))
    x = oracle.normal(1, 520, dtype=getattr(torch, row["act"]))
    if may_refuse(row["name"], 1, 520):
        pytest.skip(f"{row['name']} is not for this device")
    with forced(row["name"]):
        launched = kernels_launched(lambda x=x: lowbit.matmul(x, weight.pw))
    assert ran(launched, row["name"]), launched


# ---- small enough for compute-sanitizer -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", [r for r in ROWS if r["weight"] in ("int4", "uint6", "int7", "float5_e2m2")], ids=name)
def test_sanitizer_small_products_of_each_tile(row):
    """Every tile once, on one to three planes, floats, ragged N and K; of all but decode fine groups and whole rows."""
    i, m = ROWS.index(row), max(tokens(row["name"]) - 1, 1)
    least = group_for(row, 32)
    for group_size in ((least, -1)[i % 2],) if family(row["name"]) == "decode" else (least, -1):
        kind = kind_for(row, ("none", "whole", "zero", "min")[i % 4])
        weight = oracle.make(row["weight"], (72, 328), group_size, kind)
        x = placed(oracle.normal(m, 328, dtype=getattr(torch, row["act"])), spread=i % 2 == 0)
        bias = bias_for(72, i)
        y = product_by(row["name"], x, weight.pw, bias)
        if y is None:
            pytest.skip(f"{row['name']} is not for this device")
        reason = why_wrong(row["name"], y, x, weight, bias)
        assert reason is None, reason
