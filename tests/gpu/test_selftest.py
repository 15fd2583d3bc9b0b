"""Risk: `lowbit selftest` passes a CUDA kernel that is wrong, or leaves kernels out."""

import pytest

import lowbit
from lowbit import kernel_list
from lowbit.commands import selftest_cuda

from .kernels import FAMILIES, may_refuse, needs_kernels

pytestmark = needs_kernels


def test_every_cuda_kernel_is_right():
    built = [row for row in kernel_list.manifest() if row["family"] != "cpu"]
    summary = lowbit.selftest("*_[dg]e*")
    assert summary and not summary.without_cuda, str(summary)
    refused = sum(row["family"] in FAMILIES and may_refuse(row["name"], 1, 1) for row in built)
    assert (summary.passed, summary.not_usable) == (len(built) - refused, refused)


@pytest.mark.parametrize("family", [*FAMILIES, "dequant"])
def test_a_kernel_that_is_wrong_or_does_not_run_is_found(monkeypatch, family):
    rows = selftest_cuda.usable([row for row in kernel_list.manifest(family) if row["weight"] == "int4"])
    if not rows:
        pytest.skip("this build has no such kernel for int4, or this device runs none")
    cases = selftest_cuda._cases

    def changed(weight, act):
        for case in cases(weight, act):
            case.exact.mul_(1.01)
            case.y.mul_(1.01)
            yield case

    monkeypatch.setattr(selftest_cuda, "_cases", changed)
    summary = lowbit.selftest(f"w4a*_{family}_*")
    assert not summary and len(summary.failures) == len(rows) and "expected an error of at most" in str(summary)

    def fails(*args):
        raise RuntimeError("the launch failed")

    monkeypatch.setattr(selftest_cuda, "_cases", fails)
    summary = lowbit.selftest(f"w4a*_{family}_*")
    assert len(summary.failures) == len(rows) and summary.failures[0].endswith(": the launch failed")
