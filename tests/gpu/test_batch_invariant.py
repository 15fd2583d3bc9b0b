"""Risk: in batch-invariant mode a row of y still depends on the rows that x has beside it."""

import pytest
import torch

import lowbit
from lowbit import extension

from . import oracle
from .kernels import needs_kernels
from .products import FLOATS, assert_right, bias_for

pytestmark = needs_kernels


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize(
    ("dtype", "kind", "group"),
    [("int4", "none", 128), ("uint3", "zero", 32), ("uint8", "min", -1), ("float6_e2m3", "none", 64)],
)
def test_row_of_y_is_the_same_whatever_rows_come_with_it(dtype, kind, group, act):
    for n, k in ((4112, 1096), (200, 8200)):
        weight = oracle.make(dtype, (n, k), group, kind)
        x, bias = oracle.normal(300, k, dtype=act), bias_for(n, n)
        with extension.batch_invariant():
            whole = lowbit.matmul(x, weight.pw, bias)
            assert_right(x, weight, bias, whole)
            for first, count in ((0, 1), (7, 2), (100, 5), (40, 17), (3, 64), (200, 65), (60, 200), (299, 1)):
                rows = slice(first, first + count)
                assert oracle.same_bits(lowbit.matmul(x[rows], weight.pw, bias), whole[rows]), (
                    f"{count} rows from {first}"
                )
            order = torch.randperm(300, device="cuda")
            assert oracle.same_bits(lowbit.matmul(x[order], weight.pw, bias), whole[order])


def test_what_can_not_be_invariant_is_refused_in_one_sentence():
    weight, x = oracle.make("int4", (64, 256)), oracle.normal(3, 256)
    with extension.batch_invariant(), pytest.raises(RuntimeError, match="need x in float16 or bfloat16, got float32"):
        lowbit.matmul(x, weight.pw)
    wide = oracle.make("int4", (64, 256), scale_type="float32")
    with extension.batch_invariant(), pytest.raises(RuntimeError, match="need a kernel for the weight on the device"):
        lowbit.matmul(x.half(), wide.pw)
    assert_right(x.half(), wide)  # the block has ended
