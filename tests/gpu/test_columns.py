"""Risk: n256 of gemm_sm90 multiplies fewer columns than it has (templates/columns.cuh), and leaves tokens out, or takes
what was not brought for some."""

import pytest
import torch

from . import oracle
from .kernels import needs_kernels, product_by
from .products import assert_exact, bias_for, placed, right_by_split, row_of_sm90

pytestmark = needs_kernels

TOKENS = range(112, 257, 8)
TYPES = ["int4", "uint2", "int7", "float4_e2m1", "float8_e5m2"]


def kind_of(dtype: str) -> str:
    return "zero" if dtype.startswith("u") else "none"


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("group", [32, 128])
def test_every_number_of_columns_is_right(dtype, act, group):
    """One tile, with all rows of x that it may have or fewer, and three of them; what lies around x is NaN."""
    row = row_of_sm90(dtype, act, 256)
    weight = oracle.make(dtype, (200, 1096), group, kind_of(dtype), plain=True)
    for tokens in TOKENS:
        for m in (tokens, tokens - 5, 3 * tokens - 7):
            x, bias = placed(oracle.normal(m, 1096, dtype=act, seed=m), spread=True), bias_for(200, m)
            y = torch.full((m, 200), torch.nan, dtype=act, device="cuda")
            assert_exact(x, weight, bias, product_by(row["name"], x, weight.pw, bias, out=y))


@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_of_columns_is_right_where_sums_meet(dtype):
    row = row_of_sm90(dtype, torch.float16, 256)
    weight = oracle.make(dtype, (520, 2048), 128, kind_of(dtype))
    for i, tokens in enumerate(TOKENS):
        x, meet = oracle.normal(tokens, 2048, dtype=torch.float16, seed=tokens), 2 + i % 3
        assert right_by_split(row["name"], (8, 1, meet, 1, 16, 0), x, weight, None), (tokens, meet)


@pytest.mark.parametrize("m", [150, 190, 220, 256])
def test_columns_beyond_the_last_token_may_be_anything(m):
    """What a product before left in shared memory, infinities here, stays out of those that count."""
    row = row_of_sm90("int4", torch.float16, 256)
    weight = oracle.make("int4", (17000, 512), 128, "none", plain=True)
    infinite = torch.full((256, 512), torch.inf, dtype=torch.float16, device="cuda")
    x = oracle.normal(m, 512, dtype=torch.float16, seed=m)
    product_by(row["name"], infinite, weight.pw)
    assert_exact(x, weight, None, product_by(row["name"], x, weight.pw))


@pytest.mark.parametrize("m", [150, 190, 220])
def test_sanitizer_small_product_of_fewer_columns(m):
    row = row_of_sm90("int4", torch.float16, 256)
    weight = oracle.make("int4", (300, 520), 128, "none", plain=True)
    x = oracle.normal(m, 520, dtype=torch.float16, seed=m)
    assert_exact(x, weight, None, product_by(row["name"], x, weight.pw))
