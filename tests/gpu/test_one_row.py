"""Risk: one row of x, which comes alone to n8 of gemm_sm90 where k is a multiple of 64, is read at another place, with
what lies beside it, or into other sums than as the first of two rows."""

import pytest
import torch

from . import oracle
from .kernels import needs_kernels, product_by
from .products import bias_for, placed, right_by_split, row_of_sm90, why_wrong

pytestmark = needs_kernels

# Floats; integers in short groups, with sums of x and without.
WEIGHTS = [
    ("float3_e1m1", 128, "none"),
    ("float4_e2m1", 32, "none"),
    ("float5_e2m2", -1, "none"),
    ("float6_e3m2", 128, "none"),
    ("float6_e2m3", 16, "min"),
    ("float8_e4m3", 64, "zero"),
    ("int4", 32, "none"),
    ("int7", 16, "none"),
    ("uint2", 32, "zero"),
    ("uint6", 64, "min"),
]
SHAPES = [(72, 320), (200, 2624), (520, 4096), (17, 64)]


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dtype", "group", "kind"), WEIGHTS)
def test_sanitizer_one_row_is_right_and_as_the_first_of_two(dtype, group, kind, act):
    row = row_of_sm90(dtype, act, 8)
    for i, shape in enumerate(SHAPES):
        weight, bias = oracle.make(dtype, shape, group, kind), bias_for(shape[0], i)
        two = oracle.normal(2, shape[1], dtype=act, seed=i)
        x = placed(two[:1], spread=True)
        y = product_by(row["name"], x, weight.pw, bias)
        assert why_wrong(row["name"], y, x, weight, bias) is None, shape
        assert oracle.same_bits(y, product_by(row["name"], two, weight.pw, bias)[:1]), shape


@pytest.mark.parametrize(("dtype", "group", "kind"), [("float6_e3m2", 128, "none"), ("uint4", 32, "min")])
def test_one_row_by_warps_that_share_k(dtype, group, kind):
    row = row_of_sm90(dtype, torch.float16, 8)
    weight = oracle.make(dtype, (520, 4160), group, kind)
    x = placed(oracle.normal(1, 4160, dtype=torch.float16, seed=5), spread=True)
    splits = [(4, 2, 1, 3, 8, 0), (4, 2, 2, 2, 8, 0), (16, 1, 1, 2, 16, 0), (4, 4, 1, 2, 16, 0)]
    assert sum(right_by_split(row["name"], split, x, weight, None) for split in splits) > 1
