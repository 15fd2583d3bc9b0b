"""Risk: a CUDA kernel spills, is too large, or fetches on the wrong side of its wait, and the check lets it pass."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tools import check_cuda

DECODE, OTHER = "_ZN6lowbit6decode6kernelEv", "_ZN6lowbit7dequant6kernelEv"
GOOD = ["S2R", "PREEXIT", "LDGSTS.E.BYPASS.128", "ACQBULK", "LDG.E.128", "HMMA.16816.F32", "STG.E", "EXIT"]


def replaced(old: str, *new: str) -> list[str]:
    return [c for instruction in GOOD for c in (new if instruction == old else [instruction])]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (replaced("ACQBULK"), "waits 0 times"),
        (replaced("S2R", "ACQBULK"), "waits 2 times"),
        (replaced("LDGSTS.E.BYPASS.128"), "fetches nothing above the wait"),
        (replaced("LDG.E.128"), "fetches nothing below the wait"),
        (replaced("S2R", "STG.E"), "has STG.E above the wait"),
        (replaced("S2R", "EXIT"), "has EXIT above the wait"),
        (replaced("S2R", "RED.E.ADD.F32"), "has RED.E.ADD.F32 above the wait"),
        (replaced("LDG.E.128", "LDG.E.128", "LDG.E.128.CONSTANT"), "has LDG.E.128.CONSTANT"),
    ],
)
def test_an_order_that_would_race_is_found(code, words):
    found = list(check_cuda.order_problems(DECODE, code))
    assert any(words in sentence for sentence in found), found


def test_only_decode_may_let_the_next_kernel_start_early():
    assert list(check_cuda.order_problems(DECODE, GOOD)) == []
    assert list(check_cuda.order_problems(OTHER, replaced("PREEXIT"))) == []
    assert "lets the next kernel start early" in next(check_cuda.order_problems(OTHER, GOOD))


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ((128, 0, 1024, 256), None),
        ((121, 0, 114 * 1024, 256), None),
        ((129, 0, 1024, 256), "takes 34816 registers a block"),
        ((32, 8, 1024, 256), "a stack frame of 8 bytes"),
        ((32, 0, 114 * 1024 + 1, 256), "bytes of shared memory a block"),
        ((32, 0, 1024, None), "no __launch_bounds__"),
    ],
)
def test_a_kernel_that_takes_too_much_is_found(usage, words):
    found = list(check_cuda.usage_problems(*usage))
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ((120, 0, 205 * 1024), None),
        ((129, 0, 205 * 1024), "takes 69632 registers a block"),
        ((120, 8, 205 * 1024), "a stack frame of 8 bytes"),
        ((120, 0, 228 * 1024 + 1), "bytes of shared memory a block"),
        ((120, 0, 113 * 1024), "expected more than"),
    ],
)
def test_two_blocks_of_a_kernel_that_must_be_alone_never_fit(usage, words):
    found = list(check_cuda.alone_problems(*usage))
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)
    for size in check_cuda.ALONE.values():
        assert check_cuda.MAX_SHARED < check_cuda.constant(size) + 1024 <= check_cuda.ALONE_SHARED


def test_a_kernel_that_adds_up_parts_needs_no_weight_above_its_wait():
    code = replaced("LDGSTS.E.BYPASS.128")
    assert list(check_cuda.order_problems(check_cuda.ADDS + "INS_3IntILi4EEEEEv", code)) == []


def test_shared_memory_of_launchers_is_read_from_the_templates(tmp_path):
    for name, text in (
        ("one", "static constexpr int kSharedBytes = 112 * 1024, kRegisters = 7;"),
        ("four", "constexpr int kSharedTwo = 100 * 1024;"),
        ("two", "extern __shared__ char shared[];  // how much, nobody knows"),
        ("three", "__shared__ float part[32];"),
    ):
        (tmp_path / f"family_{name}.cuh").write_text(f"#pragma once\nnamespace lowbit::{name} {{\n  {text}\n}}\n")
    found = check_cuda.dynamic_shared(tmp_path)
    assert (
        found["one"] == 112 * 1024
        and found["four"] == 100 * 1024
        and found["two"] > check_cuda.MAX_SHARED
        and "three" not in found
    )


KERNELS = """
#if __CUDA_ARCH__ >= 900
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define WAIT
#endif
#define FETCH(to, from) asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" \\
  : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(from) : "memory")
#define KERNEL __global__ void __launch_bounds__(256, 2)
namespace lowbit::decode {
KERNEL good(const uint4* w, const uint4* x, uint4* y) {
  uint4 a, b;
  FETCH(a, w + threadIdx.x);
  WAIT;
  FETCH(b, x + threadIdx.x);
  y[threadIdx.x] = {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
KERNEL late_weights(const uint4* __restrict__ w, const uint4* x, uint4* y) {
  uint4 a = __ldg(w + threadIdx.x), b;
  WAIT;
  FETCH(b, x + threadIdx.x);
  y[threadIdx.x] = {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
KERNEL leaves_early(const uint4* w, const uint4* x, uint4* y, int n) {
  uint4 a, b;
  if (threadIdx.x >= n) return;
  FETCH(a, w + threadIdx.x);
  WAIT;
  FETCH(b, x + threadIdx.x);
  y[threadIdx.x] = {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
}
namespace lowbit::dequant {
KERNEL stacked(float* y, int n) {
  float part[512];
  for (int i = 0; i < 512; ++i) part[(i * n) % 512] = y[i];
  y[0] = part[n];
}
__global__ void unbounded(float* y) { y[threadIdx.x] = 1; }
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif(check_cuda.find_cuobjdump() is None, reason="needs cuobjdump (pip install triton)")
def test_real_machine_code_is_read_right(tmp_path):
    (tmp_path / "k.cu").write_text(KERNELS)
    target = tmp_path / "k.cu.o"
    command = ["nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_80,code=sm_80"]
    subprocess.run([*command, "--compress-mode=size", "-c", tmp_path / "k.cu", "-o", target], check=True)
    count, found = check_cuda.problems(target, check_cuda.find_cuobjdump())
    assert count == 10

    def about(arch: str, name: str) -> str:
        return "; ".join(s.split(": ", 1)[1] for s in found if f"sm_{arch}:" in s and f"{len(name)}{name}E" in s)

    assert about("90a", "good") == about("80", "good") == about("80", "late_weights") == ""
    for words in ("fetches nothing above the wait", "CONSTANT"):
        assert words in about("90a", "late_weights")
    assert "has EXIT above the wait" in about("90a", "leaves_early")
    for arch in ("80", "90a"):
        assert "a stack frame of 2048 bytes" in about(arch, "stacked")
        assert "no __launch_bounds__" in about(arch, "unbounded")
