"""Risk: products of up to 4 rows of x go wrong where x is long, W is large, or x has digits of every size."""

import pytest
import torch

import lowbit
from lowbit import extension

from . import oracle
from .kernels import forced, kernels_launched, least_group, needs_kernels
from .plan import WAYS
from .products import FLOATS, ROWS, assert_exact, bias_for, name, right_by_split, row_of

pytestmark = needs_kernels


@pytest.mark.parametrize("row", [row for row in ROWS if (row["family"], row["tokens"]) == ("decode", 1)], ids=name)
def test_x_that_needs_all_of_a_multiprocessor(row):
    """K just too long for the blocks of which two share a multiprocessor: larger ones keep x."""
    act, i = getattr(torch, row["act"]), ROWS.index(row)
    for m, k in ((1, 40008), (2, 24584), (4, 16456)):
        ways = [way for way in WAYS if way[0] in (128, 256, -1)]
        weight = oracle.make(row["weight"], (200, k), *ways[(i + m) % len(ways)])
        x, bias = oracle.normal(m, k, dtype=act, seed=m), bias_for(200, i)
        y = lowbit.matmul(x, weight.pw, bias)
        assert_exact(x, weight, bias, y)
        assert oracle.same_bits(lowbit.matmul(x, weight.pw, bias), y), f"M={m}, {weight.pw}: two runs differ"


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), [("int3", "none"), ("uint6", "min"), ("float4_e2m1", "none")])
def test_products_by_blocks_that_take_all_of_a_multiprocessor(dtype, kind, act):
    """Which products do is the plan's: here all are told to."""
    weight = oracle.make(dtype, (40008, 2600), 128, kind)
    for m in (1, 2, 3):
        x = oracle.normal(m, 2600, dtype=act, seed=m)
        kernel = row_of(dtype, act, "decode", {1: 1, 2: 2, 3: 4}[m])["name"]  # the plan takes others for some types
        with forced(kernel), extension.force_cuda_split(4, 4, 1, 1, 16, 0):
            launched = kernels_launched(lambda x=x: lowbit.matmul(x, weight.pw))
            assert_exact(x, weight)
        assert len(launched) == 1 and "Kind)1" in launched[0].replace("(int)", ""), launched


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
            share = torch.finfo(act).eps / 2 + oracle.SHARE  # a digit is off by a share of the largest of its 128
            reason = oracle.wrong(lowbit.matmul(x, weight.pw), *oracle.product(x, weight), share)
            assert reason is None, f"M={m}: {reason}"
        x = torch.randint(-8, 9, (m, k), generator=oracle.generator(m), device="cuda").to(act)
        y, (exact, size) = lowbit.matmul(x, weight.pw), oracle.product(x, weight)
        assert oracle.wrong(y, exact, size, share=2e-6, together=False) is None


@pytest.mark.parametrize("dtype", ["int1", "int3", "uint4", "int8", "float6_e3m2"])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_warp_with_many_tiles_and_one_step_each(dtype, m):
    """Codes and scales of the next tiles must not come into places of the ring that are still read."""
    weight = oracle.make(dtype, (60000, 1024), 128, "zero" if dtype.startswith("uint") else "none")
    x = oracle.normal(m, 1024, dtype=torch.float16)
    for _ in range(3):
        assert_exact(x, weight)


FINE = [f"{sign}int{bits}" for bits in range(1, 9) for sign in ("", "u")] + ["float4_e2m1"]


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize("dtype", FINE)
def test_groups_within_128_k_keep_their_scales_apart(dtype, act, group):
    """Columns of a product hold parts of 128 k, each with a scale of its own; K ends within a group, within 128 k."""
    kernel = row_of(dtype, act, "decode", 1)["name"]
    if group < least_group(kernel):
        pytest.skip(f"{kernel} takes groups from {least_group(kernel)} on")
    for i, (n, k) in enumerate([(17, 16), (520, 4096), (1000, 1304), (200, 8200), (24000, 1024)]):
        kind = ("zero", "min", "whole")[(i + len(dtype)) % 3] if dtype.startswith("u") else "none"
        weight = oracle.make(dtype, (n, k), group, kind, seed=i)
        x, bias = oracle.normal(1, k, dtype=act, seed=k), bias_for(n, i)
        with forced(kernel):
            y = lowbit.matmul(x, weight.pw, bias)
            again = [lowbit.matmul(x, weight.pw, bias) for _ in range(2)]
        assert_exact(x, weight, bias, y)
        assert all(oracle.same_bits(one, y) for one in again), f"{weight.pw}: runs differ"


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["int3", "uint6", "float4_e2m1"])
def test_sanitizer_small_products_on_whole_multiprocessors(dtype, group):
    """For compute-sanitizer too: few rows of W, but x too long for blocks of which two share a multiprocessor."""
    for tokens, k in ((1, 40008), (4, 16456)):
        if tokens > 1 and group < 128:
            continue
        weight = oracle.make(dtype, (40, k), group, "zero" if dtype.startswith("u") else "none")
        with forced(row_of(dtype, torch.float16, "decode", tokens)["name"]):
            assert_exact(oracle.normal(tokens, k, dtype=torch.float16), weight, bias_for(40, tokens))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", ["int3", "uint3", "int5", "uint5"])
def test_sanitizer_slices_as_long_as_a_ring_and_not(dtype, tokens):
    """Rings of 5 bits have four stages, of a step each, and are filled at once by slices of four steps; stages of 3
    bits have two steps, the last one of a slice has one at times. For compute-sanitizer too."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters came with compute capability 9.0")
    row, kind = row_of(dtype, torch.float16, "decode", tokens), "zero" if dtype.startswith("u") else "none"
    for n, steps in ((40, 32), (24, 33), (40, 40), (16, 15)):  # by four warps of two blocks each
        k = 128 * steps - 8
        weight = oracle.make(dtype, (n, k), 128, kind, seed=steps)
        x = oracle.normal(tokens, k, dtype=torch.float16, seed=n)
        for split in ((2, 4, 2, 4, 8, 0), (2, 4, 2, 1, 8, 6), (2, 8, 1, 1, 16, 0)):
            assert right_by_split(row["name"], split, x, weight, bias_for(n, steps)), split
