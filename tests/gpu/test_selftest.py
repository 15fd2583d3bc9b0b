"""Risk: `lowbit selftest` passes a CUDA kernel that is wrong, or leaves kernels out."""

import time

import pytest

import lowbit
from lowbit import extension
from lowbit.commands import selftest_cuda

from .kernels import needs_kernels

pytestmark = needs_kernels


def test_every_cuda_kernel_is_right_in_under_a_minute():
    begin, built = time.monotonic(), extension.manifest("decode") + extension.manifest("dequant")
    summary = lowbit.selftest("*_de*")
    assert summary and summary.passed == len(built) and not summary.without_cuda, str(summary)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("family", ["decode", "dequant"])
def test_a_kernel_that_is_wrong_or_does_not_run_is_found(monkeypatch, family):
    rows = [row["name"] for row in extension.manifest(family) if row["weight"] == "int4"]
    if not rows:
        pytest.skip("this build has no such kernel for int4")
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
