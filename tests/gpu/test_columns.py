"""Risk: a tile of wgmma that multiplies fewer columns than it may have (gemm_sm90/warpgroup.cuh) leaves tokens out, or
takes those that were not brought for some."""

import pytest
import torch

from . import oracle
from .kernels import may_refuse, needs_kernels, product_by
from .products import assert_exact, bias_for, placed, right_by_split, row_of

pytestmark = needs_kernels

#: Type of the weight, tile, and which numbers of tokens, in eights: all that it multiplies apart, and fewer.
CASES = [
    ("int4", 64, range(3, 9)),
    ("int2", 96, range(6, 13)),
    ("int8", 128, range(6, 17)),
    ("int3", 160, range(14, 21)),
    ("int7", 208, range(18, 27)),
    ("int4", 256, range(14, 33)),
    ("float6_e3m2", 128, range(7, 17)),
    ("float4_e2m1", 256, range(14, 33)),
]


def row_for(dtype: str, act: torch.dtype, most: int) -> dict:
    row = row_of(dtype, act, "gemm_sm90", most)
    if may_refuse(row["name"], most, 1):
        pytest.skip(f"{row['name']} is not for this device")
    return row


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dtype", "most", "eights"), CASES, ids=lambda value: str(value))
def test_every_number_of_columns_is_right(dtype, most, eights, act):
    """One tile, whole or not a multiple of 8, and three tiles as full; what lies around x is NaN."""
    row = row_for(dtype, act, most)
    weight = oracle.make(dtype, (200, 1096), 128, "none", plain=True)
    for tokens in (8 * eight for eight in eights):
        for m in (tokens, tokens - 5, 3 * tokens - 7):
            x = placed(oracle.normal(m, 1096, dtype=act, seed=m), spread=True)
            bias = bias_for(200, m)
            y = torch.full((m, 200), torch.nan, dtype=act, device="cuda")
            assert_exact(x, weight, bias, product_by(row["name"], x, weight.pw, bias, out=y))


@pytest.mark.parametrize(("dtype", "most", "eights"), CASES, ids=lambda value: str(value))
def test_every_number_of_columns_is_right_where_sums_meet(dtype, most, eights):
    row = row_for(dtype, torch.float16, most)
    weight = oracle.make(dtype, (520, 2048), 128, "none")
    for i, tokens in enumerate(8 * eight for eight in eights):
        x, meet = oracle.normal(tokens, 2048, dtype=torch.float16, seed=tokens), 2 + i % 3
        assert right_by_split(row["name"], (8, 1, meet, 1, 8, 0), x, weight, None), (tokens, meet)
