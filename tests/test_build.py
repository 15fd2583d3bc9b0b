"""The build: what it links against, what it refuses, and whether the installed library is what its name says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit import extension, kernel_list, libraries
from lowbit.errors import SchemeError
from tools import check_wheel, link_stubs

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = libraries.LIBRARY.with_name("manifest.json")
CXX = os.environ.get("CXX") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(
    CXX is None or shutil.which("readelf") is None, reason="needs g++ and readelf (binutils)"
)


def compile_library(folder: Path, text: str, *options: str) -> tuple[int, str, Path]:
    """(exit status, messages, library) of one source file compiled and linked."""
    (folder / "probe.cpp").write_text(text)
    target = folder / "libprobe.so"
    command = [CXX, "-std=c++17", "-shared", "-fPIC", "-O1", str(folder / "probe.cpp"), "-o", str(target), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr, target


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stubs")
    link_stubs.torch_stub(check_wheel.TORCH_SYMBOLS.read_text().split(), folder, CXX)
    link_stubs.system_stubs(folder, CXX)
    return folder


@needs_compiler
def test_a_name_that_the_oldest_torch_lacks_is_an_error_of_the_link(stubs, tmp_path):
    text = 'extern "C" int {0}(); extern "C" int lowbit_probe() {{ return {0}(); }}'
    options = ("-Wl,-z,defs", str(stubs / "libtorch_cpu.so"))
    assert compile_library(tmp_path, text.format("aoti_torch_get_sizes"), *options)[0] == 0
    status, messages, _ = compile_library(tmp_path, text.format("torch_stream_native_handle"), *options)  # since 2.13
    assert status != 0 and "torch_stream_native_handle" in messages


YOUNG = """
#include <dlfcn.h>
#include <memory>
#include <sstream>
// dlsym is of glibc 2.34, the constructor of stringstream of GLIBCXX_3.4.26, shared_ptr reads a variable of glibc 2.32.
extern "C" __attribute__((visibility("default"))) long lowbit_probe(long n) {
  std::stringstream text;
  text << *std::make_shared<long>(n) << (dlsym(nullptr, "lowbit_no_such_name") ? 1 : 0);
  try { if (n < 0) throw std::runtime_error(text.str()); } catch (const std::exception& error) { return -1; }
  return text.str().size();
}
"""


@needs_compiler
def test_a_portable_link_needs_nothing_younger_than_manylinux_2_28_and_still_runs(stubs, tmp_path):
    hidden = ("-fvisibility=hidden", "-Wl,-z,defs", f"-Wl,--version-script={ROOT}/csrc/exports.map")
    flags = link_stubs.flags("portable", str(stubs)).split()
    status, messages, library = compile_library(tmp_path, YOUNG, *hidden, *flags)
    assert status == 0, messages
    assert check_wheel.problems(library) == []
    program = f"import ctypes; f = ctypes.CDLL({str(library)!r}).lowbit_probe; print(f(12), f(-12))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["3", "-1"], done.stderr


@needs_compiler
def test_the_check_of_a_library_finds_what_is_wrong(stubs, tmp_path):
    text = 'extern "C" int torch_made_up(); extern "C" int stray() { return torch_made_up(); }'
    _, _, library = compile_library(tmp_path, text, "-Wl,-rpath,/opt/somewhere")
    found = "; ".join(check_wheel.problems(library))
    assert "exports stray" in found and "RUNPATH /opt/somewhere" in found or "RPATH /opt/somewhere" in found
    assert "needs torch_made_up, which torch 2.10 lacks" in found


@needs_compiler
@pytest.mark.parametrize("shares", [False, True])
def test_the_check_of_objects_finds_functions_that_older_cpus_might_get(tmp_path, shares):
    """std::sort compiled in a target region becomes the copy that every caller in the library shares."""
    header, region = "#include <algorithm>\n", '#pragma GCC push_options\n#pragma GCC target("avx2")\n'
    text = region + header if shares else region
    body = "std::sort(p, p + n);" if shares else "for (int i = 1; i < n; ++i) p[i] += p[i - 1];"
    text += f"namespace lowbit::cpu::avx2 {{ void kernel(int* p, int n) {{ {body} }} }}\n#pragma GCC pop_options\n"
    (tmp_path / "cpu_avx2_4.cpp").write_text(text)
    target = tmp_path / "cpu_avx2_4.o"
    subprocess.run([CXX, "-std=c++17", "-O1", "-c", str(tmp_path / "cpu_avx2_4.cpp"), "-o", str(target)], check=True)
    found = check_wheel.check(target)
    assert bool(found) == shares and all("expected only lowbit::cpu::avx2::*" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("GLIBC_2.28", (2, 28)), ("GLIBC_2.29", None), ("GLIBCXX_3.4.25", None), ("GLIBC_PRIVATE", None), ("X_1", None)],
)
def test_limits_of_manylinux_2_28(version, numbers):
    assert link_stubs.allowed(version) == numbers


def run_setup(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess:
    """setup.py of a copy of the build's own files, so that a failing build touches nothing here."""
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", dirs_exist_ok=True)
    (tmp_path / "lowbit").mkdir(exist_ok=True)
    (tmp_path / "lowbit/__init__.py").write_text('__version__ = "0"\n')
    (tmp_path / "README.md").touch()
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    return subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True)


def test_a_build_that_cannot_work_says_why_in_one_sentence(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools 77 or newer")
    (tmp_path / "old/torch").mkdir(parents=True)
    (tmp_path / "old/torch/__init__.py").touch()
    done = run_setup(tmp_path, PYTHONPATH=str(tmp_path / "old"), CXX=sys.executable)
    if "ninja" not in done.stderr:  # an environment that only runs tests need not have ninja
        assert done.returncode == 1 and "needs the headers of torch 2.10 or newer" in done.stderr
        assert "pip install --no-build-isolation ." in done.stderr
    done = run_setup(tmp_path, CXX="no-such-compiler")
    assert done.returncode == 1 and "found none called no-such-compiler" in done.stderr
    done = run_setup(tmp_path, LOWBIT_PORTABLE="maybe")
    assert done.returncode == 1 and "expected LOWBIT_PORTABLE to be 0, 1 or unset, got 'maybe'" in done.stderr
    done = run_setup(tmp_path, LOWBIT_CUDA_ARCHS="hopper")
    assert (
        done.returncode == 1 and "expected LOWBIT_CUDA_ARCHS to be like '80;90a' or 'none', got 'hopper'" in done.stderr
    )
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvcc").exists())
    done = run_setup(tmp_path, LOWBIT_CUDA_ARCHS="90a", PATH=path)
    assert done.returncode == 1 and "asks for CUDA kernels, but no nvcc is on PATH" in done.stderr


def test_no_kernel_is_named_outside_the_list():
    """setup.py and the build graph must read names from the manifest: a second list would drift."""
    names = re.compile(r"\b(w|wu|wf)\d\w*a(b?16|32|8)\b|avx|amx|_n\d+\b|int4|e4m3", re.IGNORECASE)
    own = [str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda").glob("registry.*")]
    for path in ("setup.py", "tools/build_graph.py", "tools/cuda.py", "csrc/registry.cpp", "csrc/bindings.cpp", *own):
        assert not names.findall((ROOT / path).read_text()), path
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 150


def cuda_rows() -> list[str]:
    """The kernels of the CUDA library. Asked in a process of its own: here it is loaded only where torch sees a GPU."""
    code = (
        "from lowbit import extension, libraries; extension.load()\n"
        "print(libraries.open_cuda().lowbit_cuda_kernel_rows().decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_installed_libraries_have_the_kernels_of_their_manifest():
    extension.load()
    kernels = json.loads(MANIFEST.read_text())["kernels"]
    names = {path.name: [] for path in (libraries.LIBRARY, libraries.CUDA_LIBRARY)}
    for kernel in kernels:
        names[kernel["library"]].append(kernel["name"])
    assert kernel_list.kernel_rows() == names[libraries.LIBRARY.name]
    assert (cuda_rows() if libraries.CUDA_LIBRARY.is_file() else []) == names[libraries.CUDA_LIBRARY.name]
    isas = {kernel["isa"] for kernel in kernels if kernel["family"] == "cpu"}
    assert set(extension.isas()) <= isas or not isas


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
@pytest.mark.parametrize("library", [libraries.LIBRARY, libraries.CUDA_LIBRARY], ids=lambda path: path.stem)
def test_the_installed_library_needs_no_symbol_that_the_oldest_torch_lacks(library):
    if not library.is_file():
        pytest.skip("this build has no CUDA kernels")
    found = check_wheel.problems(library)
    assert [
        sentence for sentence in found if "torch" in sentence or "exports" in sentence or "NEEDED" in sentence
    ] == []


def test_an_isa_is_chosen_refused_or_unknown():
    usable = extension.isas()
    assert usable[-1] == "scalar" and extension.isa() in usable
    for name in usable:
        with extension.force_isa(name):
            assert extension.isa() == name
    with pytest.raises(SchemeError, match="avx215"), extension.force_isa("avx215"):
        pass
    library = extension.load()
    assert [library.lowbit_set_isa(name) for name in (b"avx215", b"", b"avx")] == [1, 1, 1]
    absent = {"amx", "avx512", "avx2"} - set(usable)
    assert all(library.lowbit_set_isa(name.encode()) == 2 for name in absent)
