"""Risk: with AVX-512 a row of y depends on the rows that x has beside it, which extension.py says it does not."""

import pytest
import torch

import lowbit
from lowbit import extension


@pytest.mark.parametrize("act", [torch.float32, torch.float16, torch.bfloat16, "int8"], ids=str)
@pytest.mark.parametrize("dtype", ["int1", "uint3", "int4", "int8", "float6_e2m3"])
def test_row_of_y_is_the_same_whatever_rows_come_with_it(dtype, act):
    torch.manual_seed(3)
    pw = lowbit.pack_weight(lowbit.quantize(torch.randn(200, 1096), dtype, group_size=64))
    x = torch.randn(130, 1096).to(torch.float32 if act == "int8" else act)
    options = {"act": act} if act == "int8" else {}
    for isa in [isa for isa in extension.isas() if isa in ("avx512", "amx")]:
        with extension.force_isa(isa), extension.batch_invariant():
            whole = lowbit.matmul(x, pw, **options)
            for first, count in ((0, 1), (5, 2), (9, 3), (17, 8), (40, 17), (60, 33), (1, 64), (0, 129)):
                rows = slice(first, first + count)
                assert torch.equal(lowbit.matmul(x[rows], pw, **options), whole[rows]), (
                    f"{isa}: {count} rows from {first}"
                )
