"""Risk: a CUDA kernel spills, is too large, or fetches on the wrong side of its wait, and the check lets it pass."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tools import check_cuda

DECODE, OTHER = "_ZN6lowbit6decode6kernelEv", "_ZN6lowbit7dequant6kernelEv"
NARROW, WIDE = (f"{check_cuda.BOXES[0]}INS0_4TileILi{tokens}EEEEvv" for tokens in (16, 128))
SM80 = "_ZN6lowbit9gemm_sm80{}INS_3IntILi4EEE6__halfNS0_4TileILi{}ELb1EEENS_4FormILb0ELi0EEEEEvNS0_7ProblemE"
LARGE = f"{check_cuda.BOXES[1]}INS0_4TileILi256EEEEvv"
PLAIN = "FormILb0ELNS_8ZeroFormE1E"
GOOD = ["S2R", "PREEXIT", "LDGSTS.E.BYPASS.128", "ACQBULK", "LDG.E.128", "HMMA.16816.F32", "STG.E", "EXIT"]


EMPTY = ["LDC", "EXIT", "BRA", "NOP", "NOP"]
BOXED = ["PREEXIT", "UTMALDG.2D", "ACQBULK", "UTMALDG.2D", "UTMALDG.2D", "HGMMA.64x32x16.F32", "STG.E.128", "EXIT"]
#: Of a kernel of which one thread brings x.
BROUGHT = ["PREEXIT", "UTMALDG.2D", "ACQBULK", "HGMMA.64x32x16.F32", "STG.E.128", "EXIT", "ACQBULK", "UTMALDG.2D"]
BROUGHT_TWICE = [*BROUGHT, "ACQBULK", "UTMALDG.3D", "EXIT"]
CODE = {NARROW: BROUGHT_TWICE, WIDE: BROUGHT, LARGE: BOXED}


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


@pytest.mark.parametrize("name", [NARROW, WIDE, LARGE])
def test_weights_and_x_that_come_as_boxes_are_found_on_both_sides(name):
    def found(code):
        return list(check_cuda.order_problems(name, code))

    boxed = CODE[name]
    without_x = [*boxed[:3], *(c for c in boxed[3:] if not c.startswith("UTMALDG"))]
    assert found(boxed) == []
    assert "nothing above the wait, expected its weights there, by UTMALDG" in found(boxed[:1] + boxed[2:])[0]
    assert "nothing below the wait, expected x there, by UTMALDG" in found(without_x)[-1]
    other = [c.replace("UTMALDG.2D", "LDG.E.128").replace("UTMALDG.3D", "LDG.E.128") for c in boxed]
    assert any("by UTMALDG" in sentence for sentence in found(other)), "other loads are no boxes"
    assert "has UTMASTG.2D above the wait" in found(["UTMASTG.2D", *boxed])[0]


@pytest.mark.parametrize(("name", "code"), [(NARROW, BROUGHT_TWICE), (WIDE, BROUGHT)])
def test_x_that_is_brought_by_a_thread_that_has_not_waited_is_found(name, code):
    def found(code):
        return list(check_cuda.order_problems(name, code))

    at = 6  # its first wait, then the copy
    assert "waits" in found(code[:at] + code[at + 1 :])[0]
    swapped = [*code[:at], code[at + 1], code[at], *code[at + 2 :]]
    assert found(swapped)[0] == "brings x and multiplies after wait 1"
    # The same where the thread that brings x comes first, behind those of its warp that were not elected.
    first = [*code[:2], "ELECT", "EXIT", *code[at:], *code[2:at]]
    assert found(first) == []
    assert found([c for c in first if c != "ELECT"]) == [
        "has EXIT above the wait, expected neither writes nor exits there"
    ]
    assert "neither brings x nor multiplies after wait 1" in found([*first[:4], first[5], first[4], *first[6:]])


@pytest.mark.parametrize(
    ("name", "arch", "runs"),
    [
        *((NARROW, arch, True) for arch in ("90", "90a", "100", "103a", "110f")),
        *((NARROW, arch, False) for arch in ("80", "89", "120", "121a")),
        *((name, "90a", True) for name in (WIDE, LARGE)),
        *((name, arch, False) for name in (WIDE, LARGE) for arch in ("80", "90", "100a", "120")),
    ],
)
def test_kernel_is_empty_where_it_never_runs_and_only_there(name, arch, runs):
    assert (list(check_cuda.code_problems(name, arch, CODE[name])) == []) is runs
    assert (list(check_cuda.code_problems(name, arch, EMPTY)) == []) is not runs
    assert list(check_cuda.code_problems(OTHER, arch, EMPTY)) == []


def test_a_stage_that_is_given_back_while_it_is_read_is_found():
    def found(*loop):
        return list(check_cuda.ring_problems(NARROW, ["FENCE.VIEW.ASYNC.S", "ACQBULK", *loop, "EXIT"]))

    good = ["LDSM.16.M88.4", "LDS", "MEMBAR.ALL.CTA", "FENCE.VIEW.ASYNC.S", "HMMA.16816.F32", "SYNCS.ARRIVE.TRANS64"]
    assert found(*good) == [] and list(check_cuda.ring_problems(WIDE, ["ACQBULK", "EXIT"])) == []
    assert "gives stages back without" in found(*good[:3], *good[4:])[0]
    assert "loads between" in found(*good[:4], "LDS.64", *good[4:])[0]
    without_wait = list(check_cuda.code_problems(NARROW, "90a", good))
    assert len(without_wait) == 1 and "waits 0 times" in without_wait[0]


def test_only_families_of_products_may_let_the_next_kernel_start_early():
    for name in (DECODE, SM80.format("8multiply", 64)):
        assert list(check_cuda.order_problems(name, GOOD)) == []
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


@pytest.mark.parametrize("bounds", check_cuda.ALONE.values(), ids=str)
def test_two_blocks_of_a_kernel_that_must_be_alone_never_fit(bounds):
    most, shared = bounds.registers, check_cuda.constant(bounds.shared) + 1024
    for usage, words in (
        ((most, 0, shared), None),
        ((most + 1, 0, shared), f"takes {most + 1} registers a thread, expected at most {most}"),
        ((most, 8, shared), "a stack frame of 8 bytes"),
        ((most, 0, 228 * 1024 + 1), "bytes of shared memory a block"),
        ((most, 0, 113 * 1024), "expected more than"),
    ):
        found = list(check_cuda.alone_problems(*usage, bounds))
        assert len(found) == (words is not None) and all(words in sentence for sentence in found)
    assert -(-most // 8) * 8 * bounds.threads <= 64 * 1024, "so many threads with so many registers never start"


def test_kernels_that_must_be_alone_are_told_by_their_names():
    def bounds(name):
        return [(b.threads, b.registers) for names, b in check_cuda.ALONE.items() if names.match(name)][:1]

    assert bounds(NARROW) == [(640, 88)] and bounds(WIDE) == [(384, 168)]
    narrow = next(found for names, found in check_cuda.ALONE.items() if names.match(NARROW))
    assert [narrow.on(arch).registers for arch in ("90a", "100", "120")] == [88, 96, 96]
    assert bounds(NARROW + PLAIN) == bounds(NARROW.replace("16", "8") + PLAIN) == [(544, 96)]
    assert bounds(NARROW + "FormILb1E") == [(640, 96)] and bounds(NARROW.replace("16", "8")) == [(640, 88)]
    assert bounds(WIDE.replace("128", "64")) == bounds(WIDE.replace("128", "32")) == bounds(WIDE) == bounds(LARGE)
    assert all(bounds(SM80.format("15multiply_narrow", n)) == [(640, 96)] for n in (8, 16, 32))
    assert all(bounds(SM80.format("8multiply", n)) == [(256, 255)] for n in (48, 64, 96, 128))
    resident = "_ZN6lowbit6decode8residentINS_3IntILi4EEE6__halfNS0_4TileILi1ELNS0_4KindE{}EEELb0ELb1EEEvNS0_7ProblemE"
    assert bounds(resident.format(1)) == [(512, 128)] and bounds(resident.format(0)) == bounds(OTHER) == []


def test_two_blocks_of_half_a_multiprocessor_fit_and_are_told_by_their_names():
    half = NARROW.replace("TileILi16E", "TileILi16ELi8E")
    for name, most, too_many in ((half, 80, 33792), (half + PLAIN, 112, 34560)):
        shared, threads = next(found for names, found in check_cuda.HALVES.items() if names.match(name))
        taken = check_cuda.constant(shared) + 1024
        assert taken > 1024 and not list(check_cuda.usage_problems(most, 0, taken, threads))
        assert f"takes {too_many} registers" in next(check_cuda.usage_problems(most + 1, 0, taken, threads))
        assert not any(names.match(name.replace("ELi8E", "ELi16E")) for names in check_cuda.HALVES)


def test_a_kernel_that_adds_up_parts_needs_no_weight_above_its_wait():
    code = replaced("LDGSTS.E.BYPASS.128")
    for name in check_cuda.ADDS:
        assert list(check_cuda.order_problems(name + "INS_3IntILi4EEEEEv", code)) == []


LOG = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function '_ZN4slow'
ptxas info    : Compiling entry function '_ZN4slow' for 'sm_90a'
ptxas info    : Function properties for _ZN4slow
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for _ZN5spilt
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
""".replace("\\\n", "")


def test_what_the_assembler_complains_of_is_found_in_its_log():
    assert list(check_cuda.log_problems(LOG)) == [
        ("_ZN5spilt", "spills, 12 bytes of stores and 16 of loads"),
        (
            "_ZN4slow",
            "loses time: wgmma.mma_async instructions are serialized due to insufficient register resources "
            "for the wgmma pipeline",
        ),
    ]


def test_shared_memory_of_launchers_is_read_from_the_templates(tmp_path):
    for name, text in (
        ("one", "static constexpr int kSharedTwo = 112 * 1024, kRegisters = 7;"),
        ("four", "constexpr int kSharedTwo = 100 * 1024;"),
        ("five", "constexpr int kSharedAlone = 200 * 1024;"),
        ("two", "extern __shared__ char shared[];  // how much, nobody knows"),
        ("three", "__shared__ float part[32];"),
    ):
        (tmp_path / f"family_{name}.cuh").write_text(f"#pragma once\nnamespace lowbit::{name} {{\n  {text}\n}}\n")
    found = check_cuda.dynamic_shared(tmp_path)
    assert (
        found["one"] == 112 * 1024
        and found["four"] == 100 * 1024
        and found["five"] == 200 * 1024
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
#define BOX(map) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes" \\
  " [%0], [%1, {%2, %2}], [%0];" :: "r"(0), "l"(&map), "r"(0) : "memory")
#define MULTIPLY(to) asm volatile("{ .reg .f32 a, b, c; mov.f32 a, 0f00000000; mov.f32 b, a; mov.f32 c, a;" \\
  " mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, a, b, c}, {%1, %1, %1, %1}, {%1, %1}, {a, a, a, a}; }" \\
  : "=f"(to) : "r"(threadIdx.x))
#define GIVE_BACK asm volatile("{ .reg .b64 state; fence.proxy.async.shared::cta;" \\
  " mbarrier.arrive.shared.b64 state, [%0]; }" :: "r"(0) : "memory")
#define KERNEL __global__ void __launch_bounds__(256, 2)
struct Map { alignas(64) long words[16]; };
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
namespace lowbit::gemm_sm90 {
template <int Tokens> struct Tile {};
template <class Tile, bool Late>
__global__ void __maxnreg__(88) multiply(const __grid_constant__ Map w, const __grid_constant__ Map x, float* parts) {
#if __CUDA_ARCH__ >= 900
  if (!Late) BOX(w);
  WAIT;
  if (Late) BOX(w);
  MULTIPLY(parts[threadIdx.x]);
  GIVE_BACK;
  WAIT;
  BOX(x);
  WAIT;
  BOX(x);
#endif
}
using Out = float*;
template __global__ void multiply<Tile<8>, false>(const __grid_constant__ Map, const __grid_constant__ Map, Out);
template __global__ void multiply<Tile<16>, true>(const __grid_constant__ Map, const __grid_constant__ Map, Out);
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
    assert count == 14

    def about(arch: str, name: str, plain: bool = False) -> str:
        mangled = name if plain else f"{len(name)}{name}E"
        return "; ".join(s.split(": ", 1)[1] for s in found if f"sm_{arch}:" in s and mangled in s)

    assert about("90a", "good") == about("80", "good") == about("80", "late_weights") == ""
    assert about("90a", "8multiplyINS0_4TileILi8EEELb0", plain=True) == ""
    assert "nothing above the wait" in about("90a", "8multiplyINS0_4TileILi16EEELb1", plain=True)
    assert about("80", "8multiply", plain=True) == ""
    for words in ("fetches nothing above the wait", "CONSTANT"):
        assert words in about("90a", "late_weights")
    assert "has EXIT above the wait" in about("90a", "leaves_early")
    for arch in ("80", "90a"):
        assert "a stack frame of 2048 bytes" in about(arch, "stacked")
        assert "no __launch_bounds__" in about(arch, "unbounded")
