"""Risk: zeros that are whole numbers, which up to 32 rows have kernels of their own, go to the wrong group or row."""

import pytest
import torch

from lowbit.scheme import GROUP_SIZES, WHOLE_ROW

from . import oracle
from .kernels import is_wide, needs_kernels, product_by, tokens
from .products import ROWS, bias_for, group_for, name, placed, skip_refused, why_wrong

pytestmark = needs_kernels

NARROW = [row for row in ROWS if row["weight"].startswith("uint") and not is_wide(row["name"])]


@pytest.mark.parametrize("row", NARROW, ids=name)
def test_whole_zeros_of_every_group_size(row):
    i, most, right, refused = ROWS.index(row), tokens(row["name"]), 0, []
    for j, group_size in enumerate((*GROUP_SIZES, WHOLE_ROW)):
        if group_size != WHOLE_ROW and group_for(row, group_size) != group_size:
            continue
        n, k = ((200, 1000), (33, 2184), (1040, 4096))[(i + j) % 3]
        weight = oracle.make(row["weight"], (n, k), group_size, "whole", ("float16", "bfloat16")[(i + j) % 2], seed=i)
        for m in {most, 1 + (5 * i + j) % most}:
            x = oracle.INPUTS[list(oracle.INPUTS)[j % len(oracle.INPUTS)]](oracle.normal(m, k, seed=m))
            x, bias = placed(x.to(getattr(torch, row["act"])), spread=j % 2 == 0), bias_for(n, i + j)
            y = product_by(row["name"], x, weight.pw, bias)
            if y is None:
                refused.append(f"M={m}, K={k}")
                continue
            reason = why_wrong(row["name"], y, x, weight, bias)
            assert reason is None, f"groups of {group_size}, M={m}: {reason}"
            right += 1
    skip_refused(refused, right)
