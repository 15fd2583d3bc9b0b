"""Risk: the plan that people see is not the one that the library makes, or a bad question crashes it."""

import re
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import extension, kernel_list, libraries
from lowbit.autotune.plan import BUCKETS, DEVICES, Candidate, Device, candidates, device_of, find_device
from lowbit.autotune.table import plan_table
from lowbit.cli import main
from lowbit.dtypes import KERNEL_TYPES
from lowbit.scheme import Scheme
from native.build import load

DOCS = Path(__file__).parents[1] / "docs/plans.md"
H200 = DEVICES["h200"]
INT4 = Scheme.make("int4", 128, None, "float16")


class Function:
    """A C function: what it was called with, and what it says."""

    def __init__(self, answer: bytes):
        self.answer, self.calls = answer, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.answer


class Library:
    def __init__(self, answer: bytes):
        self.lowbit_cuda_plan, self.lowbit_cuda_archs = Function(answer), Function(b"80;90a")


@pytest.fixture
def library(monkeypatch):
    made = Library(b"w4a16_gemm_sm90_n32 14.600000\nw4a16_gemm_sm80_n32 later\nw4a16_decode_n1 never\n")
    monkeypatch.setattr(extension, "cuda_library", lambda: made)
    return made


@pytest.mark.parametrize(
    "group_size, kind, number", [(128, "zero", 1), (64, "zero", 1), (-1, "zero", 1), (128, "min", 2)]
)
def test_numbers_reach_the_library_in_order(library, group_size, kind, number):
    scheme = Scheme.make("uint4", group_size, kind, "float16")
    found = candidates(scheme, "bfloat16", 20, 8192, 4096, H200)
    later = Candidate("w4a16_gemm_sm80_n32", None, "later")
    assert found == [Candidate("w4a16_gemm_sm90_n32", 14.6), later, Candidate("w4a16_decode_n1", None, "never")]
    assert list(map(str, found)) == ["w4a16_gemm_sm90_n32 14.6 us", "w4a16_gemm_sm80_n32", "w4a16_decode_n1"]
    assert library.lowbit_cuda_plan.calls == [(11, 2, 20, 8192, 4096, group_size, number, 0, 90, 132, 66)]


def test_scales_of_float32_and_codebooks_are_asked_for_as_such(library):
    candidates(Scheme.make("int4", 128, None, "float32"), "float16", 1, 16, 32, H200)
    candidates(Scheme.make("uint4", 64, "none", "bfloat16"), "float16", 1, 16, 32, H200, codebook=True)
    book = [t.name for t in KERNEL_TYPES].index("codebook4")
    assert library.lowbit_cuda_plan.calls == [
        (3, 1, 1, 16, 32, 128, 0, 2, 90, 132, 66), (book, 1, 1, 16, 32, 64, 0, 1, 90, 132, 66),
    ]  # fmt: skip


def test_what_can_not_be_planned_is_one_sentence(library, monkeypatch, tmp_path):
    with pytest.raises(lowbit.ShapeError, match="sizes of at least 1 and at most 2147483136, got M 0, N 16, K 16"):
        candidates(INT4, "float16", 0, 16, 16, H200)
    with pytest.raises(lowbit.ShapeError, match="got M 1, N 68719476736, K 16"):
        candidates(INT4, "float16", 1, 1 << 36, 16, H200)
    for device in (5, torch.device("cpu"), ["h200"], "90,0,0"):
        with pytest.raises(lowbit.DeviceError, match="expected h200"):
            find_device(device)
    library.lowbit_cuda_device = Function(1)
    monkeypatch.setattr(extension, "cuda", lambda: library)
    with pytest.raises(lowbit.DeviceError, match="expected the index of a CUDA device that answers, got 99"):
        device_of(99)
    monkeypatch.undo()
    monkeypatch.setattr(extension, "_cuda", "torch sees no CUDA device")
    with pytest.raises(lowbit.ExtensionError, match="torch sees no CUDA device"):
        device_of(0)
    monkeypatch.setattr(libraries, "CUDA_LIBRARY", tmp_path / "none.so")
    with pytest.raises(lowbit.ExtensionError, match="built without CUDA kernels"):
        candidates(INT4, "float16", 1, 16, 16, H200)
    (tmp_path / "none.so").write_bytes(b"\x7fELF no library")
    with pytest.raises(lowbit.ExtensionError, match="does not load"):
        candidates(INT4, "float16", 1, 16, 16, H200)


def test_devices_have_names_or_numbers():
    assert find_device("h200") == Device(90, 132, 66) and find_device("80, 108,0") == Device(80, 108, 0)
    for wrong in ("h300", "80,108", "80,108,-1", ""):
        with pytest.raises(lowbit.DeviceError, match="expected h200, or"):
            find_device(wrong)


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_a_table_shows_what_is_tried_first_and_every_time(library):
    table = plan_table(INT4, "float16", 8192, 4096, H200, [1, 300])
    assert list(table) == [1, 300] and table[1][0].us == 14.6 and table.device == H200
    title, head, *lines = str(table).splitlines()
    assert "compute capability 9.0, 132 blocks, 66 pairs" in title and head.split() == [
        "M",
        "first",
        "w4a16_gemm_sm90_n32",
    ]
    assert [line.split() for line in lines] == [[m, "w4a16_gemm_sm90_n32", "14.6"] for m in ("1", "300")]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            b"w4a16_decode_n2 untimed\nw4a16_decode_n4 untimed\nw4a16_decode_n1 never\n",
            "w4a16_decode_n2, w4a16_decode_n4",
        ),
        (b"w4a16_decode_n1 never\n", "none, some rows at a time, or expanded for torch's product"),
        (b"", "none, the weight is expanded for torch's product"),
    ],
)
def test_a_table_without_times_shows_the_order(library, answer, words):
    library.lowbit_cuda_plan.answer = answer
    assert str(plan_table(INT4, "float16", 64, 64, H200, [2])).splitlines()[-1] == f"2  {words}"


def test_a_weight_on_the_cpu_is_planned_for_a_gpu_that_is_asked_for(library):
    pw = lowbit.pack_weight(lowbit.quantize(torch.ones(64, 128), "int4"))
    assert not [name for name in lowbit.info(pw) if name.startswith("plan")]
    facts = lowbit.info(pw, "h200")
    assert [name for name in facts if name.startswith("plan")] == ["plan for x float16", "plan for x bfloat16"]
    assert list(facts["plan for x bfloat16"]) == list(BUCKETS) and "\n  " in str(facts)
    assert {call[3:5] for call in library.lowbit_cuda_plan.calls} == {(64, 128)}
    assert lowbit.info(pw, Device(80, 108, 0))["plan for x float16"].device.blocks == 108
    with pytest.raises(lowbit.ExtensionError, match="kernels for 80;90a, none for compute capability 7.5"):
        lowbit.info(pw, "75,72,0")
    with pytest.raises(lowbit.DtypeError, match="expected a PackedWeight to plan for a device, got None"):
        lowbit.info(device="h200")


def test_the_command_plans_without_a_gpu(library, capsys):
    assert main(["info", "--plan", "uint4", "8192x4096", "--m", "1,16", "--group-size", "64", "--act", "bfloat16"]) == 0
    assert library.lowbit_cuda_plan.calls == [(11, 2, m, 8192, 4096, 64, 1, 0, 90, 132, 66) for m in (1, 16)]
    out = capsys.readouterr().out
    assert "uint4 [8192, 4096], group size 64, zeros zero" in out and "on h200, x bfloat16" in out
    assert f"{kernel_list.kernel_name('uint4', 'bfloat16')}, in use: {extension.isa()}" in out
    assert main(["info", "--plan", "int4", "64x64", "--device", "80,108,0"]) == 0
    assert [call[2] for call in library.lowbit_cuda_plan.calls[2:]] == list(BUCKETS)
    assert library.lowbit_cuda_plan.calls[2][8:] == (80, 108, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "int4", "8192"], "expected whole numbers, --plan TYPE NxK such as int4 8192x8192, got '8192'"),
        (["--plan", "int4", "8x8x8"], "got '8x8x8'"),
        (["--plan", "int4", "0x64"], "sizes of at least 1"),
        (["--plan", "int44", "8x8"], "did you mean int4"),
        (["--plan", "int4", "8x8", "--m", "1,a"], "--m 1,16,256, got '1,a'"),
        (["--plan", "int4", "8x8", "--group-size", "7"], "group_size must be one of"),
        (["--plan", "int4", "8x8", "--device", "h300"], "expected h200"),
        (["--m", "1"], "go with --plan TYPE NxK"),
    ],
)
def test_a_plan_that_is_asked_for_wrongly_is_one_sentence(library, arguments, words, capsys):
    assert main(["info", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_the_command_says_why_it_can_not_plan(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(libraries, "CUDA_LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(extension, "_cuda", "torch sees no CUDA device")
    assert main(["info", "--plan", "int4", "64x64"]) == 2
    assert "built without CUDA kernels" in capsys.readouterr().err


# ---- the library itself, without a GPU ------------------------------------------------------------------------------


def built_for_h200() -> bool:
    try:
        library = extension.cuda_library()
    except lowbit.ExtensionError:
        return False
    rows = library.lowbit_cuda_kernel_rows().decode().split()
    return "90a" in library.lowbit_cuda_archs().decode().split(";") and "w4a16_gemm_sm90_n256" in rows


needs_library = pytest.mark.skipif(not built_for_h200(), reason="needs int4's CUDA kernels for 90a in this build")


@needs_library
@pytest.mark.parametrize("group_size, kind", [(128, "zero"), (64, "zero"), (-1, "min")])
def test_the_library_plans_as_its_header_computes(group_size, kind):
    """The header, compiled apart, is the reference."""
    native, scheme = load("deal_math"), Scheme.make("uint4", group_size, kind)
    families = {"decode": 0, "gemm_sm80": 1, "gemm_sm90": 2}
    for m in (*BUCKETS, 3, 20, 200, 5000):
        found = candidates(scheme, "bfloat16", m, 4096, 14336, H200)
        us = []
        for one in found:
            family, tokens = re.fullmatch(r"wu4ab16_(\w+)_n(\d+)", one.name).groups()
            question = [m, 4096, 14336], 4, False, True, group_size, {"zero": 1, "min": 2}[kind], 90, [132, 66]
            us.append(native.tile_us(families[family], int(tokens), *question))
            assert one.us is None or one.us == pytest.approx(us[-1], abs=1e-4)
            assert (one.place == "never") == (us[-1] >= native.kNever)
            assert (one.place == "timed") == (family != "gemm_sm80" and us[-1] < 1e9)
        assert us == sorted(us) and len(found) >= 9


@needs_library
def test_the_page_of_plans_shows_what_the_command_prints(capsys):
    blocks = re.findall(r"\$ lowbit (info --plan .*)\n((?:.+\n)+)", DOCS.read_text())
    assert len(blocks) >= 2
    for words, shown in blocks:
        assert main([*words.split(), "--device", "h200"]) == 0
        without_cpu = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("on the CPU")]
        assert without_cpu == [line for line in shown.splitlines() if not line.startswith(("on the CPU", "```"))]


@needs_library
def test_plan_of_a_weight_with_whole_zeros_is_the_one_that_products_go_by():
    """Its kernels are those of a weight without zeros; a plan for any zeros would name others."""
    codes = torch.zeros(8192, 128, dtype=torch.uint8)
    scales = torch.ones(8192, 1, dtype=torch.float16)
    found = {}
    for zero in (7, 7.5):
        qt = lowbit.QuantTensor.from_codes(codes, scales, torch.full_like(scales, zero), dtype="uint4", group_size=128)
        plan = lowbit.info(lowbit.pack_weight(qt), device="h200")["plan for x float16"]
        found[zero] = {c.name: c.place for c in plan[128]}
    assert found[7]["wu4a16_gemm_sm90_n96"] == "timed" and found[7.5]["wu4a16_gemm_sm90_n96"] == "never"
