"""Risk: zeros with a fraction, which hqq makes, are rounded to whole numbers or lost by a kernel."""

from functools import lru_cache

import pytest
import torch

import lowbit
from lowbit.commands.selftest import TOLERANCE

from . import oracle
from .kernels import family, needs_kernels, product_by, tokens
from .products import ROWS, name, skip_refused, why_wrong

pytestmark = needs_kernels
HALVES = [torch.float16, torch.bfloat16]
#: With more bits scale_type holds few fractions.
TYPES = ("uint2", "uint3", "uint4")
KERNELS = [row for row in ROWS if row["weight"] in TYPES]
SHAPE = (264, 1024)


@lru_cache(maxsize=8)
def weight_of(dtype: str, group_size: int, scale_type: str) -> oracle.Weight:
    w = oracle.normal(*SHAPE, dtype=getattr(torch, scale_type), seed=3) / SHAPE[1] ** 0.5
    qt = lowbit.quantize(w, dtype, group_size=group_size, method="hqq")
    weight = oracle.weight_of(dtype, qt.unpack(), qt.scales, qt.zeros, group_size, "zero", scale_type)
    zeros = weight.qt.zeros.double()
    assert weight.qt == qt and (zeros != zeros.round()).double().mean() > 0.25, "the test sees no fraction"
    return weight


@pytest.mark.parametrize("row", KERNELS, ids=name)
def test_every_kernel_reads_the_fraction(row):
    kernel, refused, right = row["name"], [], 0
    for group_size, scale_type in ((128, "float16"), (64, "bfloat16"), (-1, "float16")):
        weight = weight_of(row["weight"], group_size, scale_type)
        for kind, change in oracle.INPUTS.items():
            x = change(oracle.normal(tokens(kernel), SHAPE[1])).to(getattr(torch, row["act"]))
            y = product_by(kernel, x, weight.pw)
            if y is None:
                refused.append(f"group_size {group_size}, {kind}")
                continue
            reason = why_wrong(kernel, y, x, weight, together=kind == "zero_mean")
            assert reason is None, f"{kernel}, {kind} x, {weight.pw}: {reason}"
            right += 1
    skip_refused(refused if not right else [], right)


@pytest.mark.parametrize("act", HALVES, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_error_is_what_the_readme_promises(dtype, act, record_property):
    """On Hopper up to 4 rows values are exact, from 17 on rounded once: a fifth over the bound at most."""
    weight, worst = weight_of(dtype, 128, "float16"), 0.0
    for m in (1, 4, 17, 64, 256, 1024):
        x = oracle.normal(m, SHAPE[1], dtype=act)
        exact = oracle.product(x, weight)[0]
        error = ((lowbit.matmul(x, weight.pw).double() - exact).norm() / exact.norm()).item()
        allowed = TOLERANCE[str(act).removeprefix("torch.")] * (1 if m <= 4 else 1.2)
        assert error <= allowed, f"M={m}, {weight.pw}: {error:.2e}"
        worst = max(worst, error)
    record_property("worst relative error", worst)


def test_kernels_of_each_family_are_tried():
    built = {family(row["name"]) for row in ROWS}
    assert {family(row["name"]) for row in KERNELS} == built and built
