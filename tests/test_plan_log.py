"""Risk: the log of plans names the wrong product or kernel, repeats itself, or costs those who did not ask for it."""

import ctypes
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowbit
from lowbit import extension, kernel_list
from lowbit.autotune import log
from lowbit.autotune.plan import BUCKETS, Candidate

ROOT = Path(lowbit.__file__).parents[1]
SOURCES = Path(__file__).parents[1]
FOUND = [
    Candidate("n1", None, "untimed"),
    Candidate("n8", 10.0),
    Candidate("n16", 12.5),
    Candidate("n32", None, "later"),
    Candidate("n2", None, "never"),
]
FACTS = {"weight": 3, "act": 1, "m": 20, "n": 8192, "k": 4096, "group_size": 128, "zero_kind": 0, "scale_type": 0}
FACTS |= {"capability": 90, "blocks": 132, "pairs": 66}


def product(kernel="w4a16_gemm_sm90_n32", why="plan", **changes) -> log.Product:
    return log.Product(kernel.encode(), why.encode(), **{**FACTS, **changes})


class Library:
    """Keeps what watches it, and calls it as the compiled code does: a C function, with a pointer."""

    def lowbit_cuda_watch(self, watcher):
        self.watcher = watcher

    def launched(self, *arguments, **changes):
        self.watcher(ctypes.byref(product(*arguments, **changes)))


@pytest.fixture
def library(monkeypatch, caplog):
    monkeypatch.setattr(log, "candidates", lambda *question, **_: [Candidate("w4a16_gemm_sm90_n32", 14.4)])
    monkeypatch.setattr(log, "_kept", [])
    made, level = Library(), logging.getLogger("lowbit").level
    log.watch(made)
    yield made
    logging.getLogger("lowbit").setLevel(level)


def test_the_struct_is_that_of_the_header():
    text = (SOURCES / "csrc/cuda/matmul.h").read_text()
    body = re.search(r"struct WatchedProduct \{(.*?)\};", text, re.DOTALL)[1]
    declared = re.findall(r"(const char\*|int64_t) ([\w, ]+);", body)
    types = {"const char*": ctypes.c_char_p, "int64_t": ctypes.c_int64}
    assert [(name, types[kind]) for kind, names in declared for name in names.split(", ")] == log.Product._fields_
    body = (SOURCES / "csrc/cuda/matmul.cpp").read_text().split("Ran run_tiles(")[1].split("\n}\n")[0]
    known = {"plan", "forced", "tried", "batch-invariant", *log._REASONS}
    assert set(re.findall(r'"([\w-]+)"', body)) == known, "each reason has its words"


def test_each_new_product_is_one_line(library, caplog):
    library.launched()
    library.launched(m=17)
    library.launched(m=32)
    library.launched(m=32, follows=1)
    assert len(caplog.records) == 1
    for change in (
        {"m": 16}, {"m": 33}, {"m": 4097}, {"n": 64}, {"k": 64}, {"act": 2}, {"weight": 11, "zero_kind": 1},
        {"weight": 11, "zero_kind": 2}, {"group_size": -1}, {"scale_type": 2}, {"blocks": 78},
    ):  # fmt: skip
        before = len(caplog.records)
        library.launched(**change)
        library.launched(**change)
        assert len(caplog.records) == before + 1, change
    library.launched(m=10**9)  # in the bucket of 4097
    assert caplog.records[-1].name == "lowbit" and caplog.records[-1].levelno == logging.INFO
    assert len(caplog.records) == 12


def test_the_line_says_which_product_it_was(monkeypatch):
    asked = []
    monkeypatch.setattr(log, "candidates", lambda *question, **_: asked.append(question) or [])
    line = log.sentence(product("x", "forced", weight=11, act=2, group_size=-1, zero_kind=2, scale_type=1))
    assert line == ("plan: uint4 x bfloat16, M 20 (of 17 to 32), N 8192, K 4096, group a row, zeros 'min': x, forced")
    scheme, *rest = asked[0]
    assert (scheme.weight.name, scheme.group_size, scheme.zero_kind, scheme.scale_type) == (
        "uint4",
        -1,
        "min",
        "bfloat16",
    )
    assert rest[:4] == ["bfloat16", 20, 8192, 4096] and str(rest[4]) == "compute capability 9.0, 132 blocks, 66 pairs"


def test_buckets_are_the_lines_of_the_tables():
    assert [log.bucket(m)[1] for m in BUCKETS] == list(BUCKETS)
    assert [log.bucket(m) for m in (1, 2, 3, 5, 4096, 4097)] == [
        (1, 1), (2, 2), (3, 4), (5, 8), (1025, 4096), (4097, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "why", "line"),
    [
        ("n1", "plan", "n1, by a rule, no time is known; with times: n8 10.0 us, n16 12.5 us; "
         "tried only after all others: n32; not for it: n2"),
        ("n8", "plan", "n8 10.0 us; can't hold it here: n1; slower: n16 12.5 us (+2.5); "
         "tried only after all others: n32; not for it: n2"),
        ("n32", "plan", "n32, no other one holds it; can't hold it here: n1, n8 10.0 us, n16 12.5 us; not for it: n2"),
        ("n16", "forced", "n16 12.5 us, forced; with times: n8 10.0 us (-2.5); tried after it: n1; "
         "tried only after all others: n32; not for it: n2"),
        ("n2", "batch-invariant", "n2, batch-invariant; with times: n8 10.0 us, n16 12.5 us; tried after it: n1; "
         "tried only after all others: n32"),
        ("n2", "parts", "n2, some rows at a time; can't hold it here: n1, n8 10.0 us, n16 12.5 us, n32"),
        ("rows", "expanded", "rows, which expands the weight for torch's product; "
         "can't hold it here: n1, n8 10.0 us, n16 12.5 us, n32; not for it: n2"),
    ],
)  # fmt: skip
def test_every_candidate_is_named_once_by_why_it_lost(kernel, why, line):
    assert log.outcome(kernel, why, FOUND) == line


def test_a_logger_that_fails_breaks_no_product(library, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: seen.append(raised.exc_type))
    monkeypatch.setattr(log, "sentence", lambda product: 1 / 0)
    library.launched()
    assert seen == [ZeroDivisionError]


# ---- the whole way, in a process of its own -------------------------------------------------------------------------


#: Loads the libraries as on a machine with a GPU, and then launches products, as far as Python can tell.
AS_IF = """
import ctypes, sys, torch
torch.version.cuda, torch.cuda.is_available = "13.0", lambda: True
from lowbit import extension
extension.load()
assert not isinstance(extension.cuda(), str), extension.cuda()
log = sys.modules.get("lowbit.autotune.log")
"""
LAUNCH = """
for kernel, m in (("w4a16_decode_n1", 1), ("w4a16_gemm_sm90_n32", 20), ("w4a16_gemm_sm90_n32", 24)):
    numbers = 3, 1, m, 8192, 8192, 128, 0, 0, 90, 132, 66
    log._kept[-1](ctypes.byref(log.Product(kernel.encode(), b"plan", *numbers)))
"""


def python(code, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOWBIT_")}
    environment.update(PYTHONPATH=str(ROOT), **variables)
    options = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run([sys.executable, "-c", code], **options)


def loads() -> bool:
    try:
        return bool(extension.cuda_library())
    except lowbit.ExtensionError:
        return False


needs_library = pytest.mark.skipif(not loads(), reason="this build of lowbit has no CUDA kernels")


@needs_library
def test_lines_go_to_stderr_as_the_page_shows_them():
    done = python(AS_IF + LAUNCH, LOWBIT_LOG="plan")
    assert done.returncode == 0 and done.stdout == "", done.stderr
    lines = done.stderr.splitlines()
    assert [line.split(", ")[1][:4] for line in lines] == ["M 1", "M 20"]
    archs = extension.cuda_library().lowbit_cuda_archs().decode()
    if archs == "90a" and len(kernel_list.manifest("gemm_sm90")) > 400:  # what the page was made with
        assert "\n".join(lines) in (SOURCES / "docs/plans.md").read_text()


@needs_library
def test_lines_go_where_the_program_logs():
    start = "import logging; logging.basicConfig(stream=__import__('sys').stdout, format='mine %(name)s')\n"
    done = python(start + AS_IF + LAUNCH, LOWBIT_LOG="plan")
    assert (done.stdout, done.stderr) == ("mine lowbit\n" * 2, "")


@needs_library
def test_nothing_is_watched_without_the_variable():
    done = python(AS_IF + "print(log)")
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_misspelt_log_is_an_error_without_a_gpu():
    done = python("from lowbit import extension; extension.load()", LOWBIT_LOG="plans")
    assert "EnvironmentVariableError: LOWBIT_LOG does not know 'plans'; did you mean plan?" in done.stderr
