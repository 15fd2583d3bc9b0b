"""Risk: the plan that people see is not the one that the library makes, or a bad question crashes it."""

import pytest

import lowbit
from lowbit import extension
from lowbit.autotune.plan import Candidate, Device, candidates
from lowbit.scheme import Scheme

H200 = Device(90, 132, 66)


class Function:
    """A C function: what it was called with, and what it says."""

    def __init__(self, answer: bytes):
        self.answer, self.calls = answer, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.answer


class Library:
    def __init__(self, answer: bytes):
        self.lowbit_cuda_plan, self.lowbit_cuda_device = Function(answer), Function(b"")


@pytest.fixture
def library(monkeypatch):
    made = Library(b"w4a16_gemm_sm90_n32 14.600000\nw4a16_gemm_sm80_n32 -1.000000\n")
    monkeypatch.setattr(extension, "cuda", lambda: made)
    return made


@pytest.mark.parametrize(
    "group_size, kind, number", [(128, "zero", 1), (64, "zero", 1), (-1, "zero", 1), (128, "min", 2)]
)
def test_numbers_reach_the_library_in_order(library, group_size, kind, number):
    scheme = Scheme.make("uint4", group_size, kind, "float16")
    found = candidates(scheme, "bfloat16", 20, 8192, 4096, H200)
    assert found == [Candidate("w4a16_gemm_sm90_n32", 14.6), Candidate("w4a16_gemm_sm80_n32", None)]
    assert list(map(str, found)) == ["w4a16_gemm_sm90_n32 14.6 us", "w4a16_gemm_sm80_n32"]
    assert library.lowbit_cuda_plan.calls == [(11, 2, 20, 8192, 4096, group_size, number, 90, 132, 66)]


def test_scales_of_float32_have_no_plan(library):
    assert candidates(Scheme.make("int4", 128, None, "float32"), "float16", 1, 16, 16, H200) == []


def test_what_can_not_be_planned_is_one_sentence(library, monkeypatch):
    scheme = Scheme.make("int4", 128, None, "float16")
    with pytest.raises(lowbit.ShapeError, match="sizes of at least 1, got M 0, N 16, K 16"):
        candidates(scheme, "float16", 0, 16, 16, H200)
    monkeypatch.setattr(extension, "cuda", lambda: "torch sees no CUDA device")
    with pytest.raises(lowbit.ExtensionError, match="torch sees no CUDA device"):
        candidates(scheme, "float16", 1, 16, 16, H200)
