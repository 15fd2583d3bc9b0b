"""Risk: measured times get lost, torn or mixed up between processes, machines and builds; a damaged file stops a
program or chooses a kernel."""

import fnmatch
import json
import multiprocessing
import os
import warnings
from pathlib import Path

import pytest
from test_plan import H200, needs_library

from lowbit import cuda_devices
from lowbit.autotune import cache, tuned
from lowbit.autotune.cache import Machine
from lowbit.autotune.problem import Problem

H = Machine("NVIDIA H200", "580.65.06", "ceb8b32aa1493e81")
INT4 = Problem("int4", "float16", 8192, 8192, 128, "none")
UINT3 = Problem("uint3", "bfloat16", 4096, 14336, -1, "whole")
TABLE = {
    INT4: {
        (9, 16): {"w4a16_gemm_sm90_n32": 13.9, "w4a16_gemm_sm90_n16": 14.2},  # by the plan n16 is first
        (17, 32): {"w4a16_gemm_sm90_n48": 15.0},
    },
    UINT3: {(1, 1): {"wu3ab16_decode_n1": 8.25}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "new" / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "new" / "cache"


def only_warning(call, match):
    """What a call returns that warns once; a second call is silent."""
    with pytest.warns(UserWarning, match=match) as seen:
        found = call()
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call() == found
    return found


# ---- files ----------------------------------------------------------------------------------------------------------


def test_what_is_added_is_read_again(folder):
    path = cache.add(H, TABLE)
    assert path == folder / "tuned-nvidia-h200-580.65.06-ceb8b32aa1493e81.json" and cache.of_machine(H) == TABLE
    assert {p.suffix for p in folder.iterdir()} == {".json", ".lock"}, "nothing unfinished stays"
    newer = {INT4: {(17, 32): {"w4a16_gemm_sm90_n32": 14.0}, (1, 1): {"w4a16_decode_n1": 8.0}}}
    cache.add(H, newer)
    merged = cache.of_machine(H)
    assert merged[UINT3] == TABLE[UINT3] and merged[INT4] == {**TABLE[INT4], **newer[INT4]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.of_machine(Machine("NVIDIA H100", *list(vars(H).values())[1:])) == {}, "no file is no warning"


@pytest.mark.parametrize("name", vars(H))
def test_a_file_of_another_machine_is_ignored_with_one_warning(name):
    path = cache.add(H, TABLE)
    other = Machine(**{**vars(H), name: "other"})
    path.rename(path.with_name(other.file))
    assert only_warning(lambda: cache.of_machine(other), f"ignored: expected {name} 'other', got '") == {}


def damaged(change):
    content = json.loads(cache.render(TABLE, **vars(H)))
    change(content)
    return json.dumps(content)


DAMAGES = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "binary": lambda text: "\x00\x01",
    "list": lambda text: "[]",
    "newer": lambda text: damaged(lambda c: c.update(format=2)),
    "no rows": lambda text: damaged(lambda c: c.pop("rows")),
    "row of text": lambda text: damaged(lambda c: c["rows"].append("row")),
    "short row": lambda text: damaged(lambda c: c["rows"][0].pop()),
    "type": lambda text: damaged(lambda c: c["rows"][0].__setitem__(0, "int44")),
    "type of x": lambda text: damaged(lambda c: c["rows"][0].__setitem__(1, "float32")),
    "list as type": lambda text: damaged(lambda c: c["rows"][0].__setitem__(1, ["float16"])),
    "n": lambda text: damaged(lambda c: c["rows"][0].__setitem__(2, 0)),
    "n of text": lambda text: damaged(lambda c: c["rows"][0].__setitem__(2, "8192")),
    "n true": lambda text: damaged(lambda c: c["rows"][0].__setitem__(2, True)),
    "large k": lambda text: damaged(lambda c: c["rows"][0].__setitem__(3, 1 << 40)),
    "group": lambda text: damaged(lambda c: c["rows"][0].__setitem__(4, 100)),
    "zeros": lambda text: damaged(lambda c: c["rows"][0].__setitem__(5, "some")),
    "span": lambda text: damaged(lambda c: c["rows"][0][6].append([3, 2, {"a": 1.0}])),
    "no span": lambda text: damaged(lambda c: c["rows"][0][6].append([1, 2])),
    "no times": lambda text: damaged(lambda c: c["rows"][0][6].append([1, 2, {}])),
    "negative": lambda text: damaged(lambda c: c["rows"][0][6].append([1, 2, {"a": -1.0}])),
    "nan": lambda text: damaged(lambda c: c["rows"][0][6].append([1, 2, {"a": float("nan")}])),
    "huge": lambda text: damaged(lambda c: c["rows"][0][6].append([1, 2, {"a": 10**400}])),
    "text": lambda text: damaged(lambda c: c["rows"][0][6].append([1, 2, {"a": "1"}])),
    "surrogate": lambda text: damaged(lambda c: c["rows"][0][6].append([1, 2, {"\ud800": 1.0}])),
    "deep": lambda text: "[" * 100_000,
    "number": lambda text: "1" * 10_000,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_ignored_with_one_warning_and_written_anew(name, folder):
    path = cache.add(H, TABLE)
    path.write_text(DAMAGES[name](path.read_text()))
    assert only_warning(lambda: cache.of_machine(H), "are ignored") == {}
    assert cache.add(H, TABLE) == path and cache.of_machine(H) == TABLE


def test_a_file_that_can_not_be_read_or_written_is_one_warning(folder, monkeypatch):
    folder.mkdir(parents=True)
    (folder / H.file).mkdir()
    assert only_warning(lambda: cache.of_machine(H), "ignored") == {}
    monkeypatch.setattr(cache, "_warned", set())
    assert only_warning(lambda: cache.add(H, {INT4: TABLE[INT4]}), "ignored|not kept") is None
    (folder / H.file).rmdir()
    monkeypatch.setattr(cache, "_MOST_BYTES", 10)
    monkeypatch.setattr(cache, "_warned", set())
    cache.add(H, TABLE)
    assert only_warning(lambda: cache.of_machine(H), "too large") == {}
    monkeypatch.setattr(cache, "_warned", set())
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("LOWBIT_CACHE", str(folder.parent / "file" / "below"))
    assert only_warning(lambda: cache.add(H, TABLE), "are not kept for other processes") is None
    assert cache.of_machine(H) == {}


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("LOWBIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "lowbit"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder() == tmp_path / "home" / ".cache" / "lowbit"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache.of_machine(H) == {}
    with pytest.warns(UserWarning, match="no home folder"):
        assert cache.add(H, TABLE) is None


def _add_many(args):
    folder, number = args
    os.environ["LOWBIT_CACHE"] = folder
    for i in range(10):
        problem = Problem("int4", "float16", 64 * (number + 1), 64 * (i + 1), 128, "none")
        cache.add(H, {problem: {(1, 1): {"w4a16_decode_n1": number + 1.0}}})
        assert cache.of_machine(H)[problem]


def test_no_time_is_lost_when_many_processes_write(folder):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_add_many, [(str(folder), number) for number in range(6)])
    found = cache.of_machine(H)
    assert len(found) == 60 and all(times == {(1, 1): {"w4a16_decode_n1": p.n / 64}} for p, times in found.items())


def test_a_build_is_told_by_its_digest(tmp_path):
    note = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0" + bytes(range(20))
    path = tmp_path / "library.so"
    path.write_bytes(b"\x7fELF" + b"\0" * 700 + note + b"rest")
    assert cache.build_id(path) == bytes(range(8)).hex()
    path.write_bytes(b"\x7fELF" + b"\0" * 700)
    first = cache.build_id(path)
    path.write_bytes(b"\x7fELF" + b"\0" * 7000)
    assert len(first) == 16 and cache.build_id(path) != first


def test_the_driver_is_told_by_its_module(tmp_path):
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: gcc 12.3.0\n"
    )
    (tmp_path / "version").write_text(text)
    assert cache.driver_version(tmp_path / "version") == "580.65.06"
    assert cache.driver_version(tmp_path / "none", "13.0") == "cuda 13.0"


# ---- what a process goes by -----------------------------------------------------------------------------------------


@pytest.fixture
def process(monkeypatch, tmp_path):
    """As if there were an H200, with a folder of tables that ship."""
    monkeypatch.setattr(tuned, "device_of", lambda index: H200)
    monkeypatch.setattr(tuned, "machine_of", lambda index: H)
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    monkeypatch.delenv("LOWBIT_TUNED", raising=False)
    tuned.forget()
    yield tmp_path / "nvidia-h200.json"
    tuned.forget()


def first(m: int) -> str:
    return tuned.candidates(INT4.scheme, "float16", m, 8192, 8192, H200)[0].name


@needs_library
def test_tables_that_ship_are_used_and_those_of_the_machine_before_them(process):
    shipped = {INT4: {(9, 16): {"w4a16_gemm_sm90_n160": 9.0}, (17, 32): {"w4a16_gemm_sm90_n144": 9.0}}}
    process.write_text(cache.render(shipped, device="NVIDIA H200"))
    cache.add(H, {INT4: {(9, 16): TABLE[INT4][9, 16]}})
    before = first(9), first(33)
    assert before[0] == "w4a16_gemm_sm90_n16"
    tuned.load(0)
    assert (first(9), first(16), first(17), first(33)) == (
        "w4a16_gemm_sm90_n32",
        "w4a16_gemm_sm90_n32",
        "w4a16_gemm_sm90_n144",
        before[1],
    )
    assert tuned.counts() == (1, 1) and tuned.known(H200) == {INT4: {(9, 16): TABLE[INT4][9, 16]}}
    assert tuned.times(INT4, H200, 12) == TABLE[INT4][9, 16] and tuned.times(INT4, H200, 33) == {}
    found = {c.name: c.measured for c in tuned.candidates(INT4.scheme, "float16", 12, 8192, 8192, H200)}
    assert found["w4a16_gemm_sm90_n32"] == 13.9 and found["w4a16_gemm_sm90_n48"] is None
    tuned.use(H200, {INT4: {(9, 16): {"w4a16_gemm_sm90_n8": 1.0, "w4a16_gemm_sm90_n192": 2.0}}})
    assert first(12) == "w4a16_gemm_sm90_n160", "a kernel that can't hold the product is passed over"
    tuned.use(H200, {INT4: {(9, 16): {"w4a16_gemm_sm90_n192": 2.0}}})
    assert first(12) == "w4a16_gemm_sm90_n192"
    tuned.forget()
    assert (first(9), first(33)) == before and tuned.counts() == (0, 0)


@needs_library
def test_kernels_that_the_build_lacks_are_left_out_of_tables_that_ship(process):
    times = {"w4a16_gemm_sm90_n24": 5.0, "w4a16_gemm_sm90_n32": 9.0, "w4a16_gemm_sm90_n16": 10.0}
    process.write_text(cache.render({INT4: {(9, 16): times, (17, 32): {"new": 1.0}}}, device="NVIDIA H200"))
    tuned.load(0)
    assert first(12) == "w4a16_gemm_sm90_n32" and first(20) == "w4a16_gemm_sm90_n32"
    assert tuned.times(INT4, H200, 20) == {}


@needs_library
@pytest.mark.parametrize("text", ["{", '{"format": 1, "device": "NVIDIA H100", "rows": []}'])
def test_a_damaged_table_that_ships_is_ignored(process, text):
    process.write_text(text)
    with pytest.warns(UserWarning, match="nvidia-h200.json are ignored"):
        tuned.load(0)
    assert first(12) == "w4a16_gemm_sm90_n16"


@needs_library
def test_the_variable_leaves_tables_alone(process, monkeypatch):
    cache.add(H, TABLE)
    monkeypatch.setenv("LOWBIT_TUNED", "0")
    tuned.load(0)
    assert tuned.counts() == (0, 0)
    monkeypatch.setenv("LOWBIT_TUNED", "1")
    tuned.load(0)
    assert tuned.counts() == (0, 2)


@needs_library
def test_tables_are_read_when_a_gpu_is_first_used_and_once(monkeypatch):
    read = []
    monkeypatch.setattr(tuned, "load", read.append)
    monkeypatch.setattr(cuda_devices, "_tables_read", set())
    monkeypatch.setattr(cuda_devices, "why_no_cuda", lambda index: "it is old" if index == 2 else None)
    monkeypatch.setattr(cuda_devices, "_warned", {"it is old"})
    assert [cuda_devices.cuda_kernels(index) for index in (0, 1, 0, 2, 1)] == [True, True, True, False, True]
    assert read == [0, 1]


def test_tables_that_ship_are_right():
    """Whatever ships must be readable, and small."""
    for path in Path(tuned.__file__).parent.glob("tables/*.json"):
        content = json.loads(path.read_text())
        assert cache.parse(content, device=content["device"]) and path.stat().st_size < 1 << 20
        assert path.stem == content["device"].lower().replace(" ", "-")


@needs_library
def test_the_log_and_the_table_show_what_was_measured(process, monkeypatch):
    from lowbit.autotune import log
    from lowbit.autotune.table import plan_table

    tuned.use(H200, TABLE)
    line = log.sentence(log.Product(b"w4a16_gemm_sm90_n32", b"tuned", 3, 1, 12, 8192, 8192, 128, 0, 0, 90, 132, 66))
    words = "w4a16_gemm_sm90_n32 * us (measured 13.9), the fastest as measured; measured to be slower: "
    more = "w4a16_gemm_sm90_n16 * us (measured 14.2) (+0.3); with times: w4a16_gemm_sm90_n48 *"
    assert fnmatch.fnmatchcase(line, f"*{words}{more}"), line
    text = str(plan_table(INT4.scheme, "float16", 8192, 8192, H200, [12, 40], measured=True))
    assert [line.split() for line in text.splitlines()[3:4]] == [["measured", "14.2", "13.9"]]
    text = str(plan_table(INT4.scheme, "float16", 8192, 8192, H200, [12, 40]))
    assert "measured" not in text, "a GPU by its name is shown with its plan alone"


def test_a_kernel_that_is_tried_is_no_product_yet(monkeypatch, caplog):
    import ctypes

    from lowbit.autotune import log

    class Library:
        def lowbit_cuda_watch(self, watcher):
            self.watcher = watcher

    monkeypatch.setattr(log, "_say", caplog.records.append)
    monkeypatch.setattr(log, "candidates", lambda *question, **_: [])
    library = Library()
    log.watch(library)
    for why in (b"tried", b"tuned"):
        product = log.Product(b"w4a16_gemm_sm90_n32", why, 3, 1, 20, 512, 512, 128, 0, 0, 90, 132, 66)
        library.watcher(ctypes.byref(product))
    assert len(caplog.records) == 1 and "the fastest as measured" in caplog.records[0]
