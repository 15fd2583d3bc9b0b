"""Compiles the headers that need no GPU into a module for tests: every ``*.cpp`` beside this file becomes one module.

    native = build.module("lowbit_native")     # tests/native/lowbit_native.cpp, PYBIND11_MODULE(lowbit_native, m)

Sources may include anything of csrc/ ("templates/cpu/prelude.h") and the generated "types.inc". Nothing of this is in a
wheel. A module is compiled again only when a source or header is newer; the calling test skips when pybind11, a
compiler or Python's headers are missing, and fails when the source does not compile.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "build/native"


def _command(source: Path, target: Path) -> list[str]:
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is missing: pip install pybind11")
    cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if cxx is None:
        pytest.skip("no C++ compiler found")
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").is_file():
        pytest.skip(f"Python's headers are missing: no Python.h in {python}")
    folders = (ROOT / "csrc", OUT / "gen", python, pybind11.get_include())
    includes = [f"-I{folder}" for folder in folders]
    # Why -O1: half the compile time of -O2, and the tests run for milliseconds.
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    return [cxx, *options, *includes, str(source), "-o", str(target)]


def module(name: str) -> ModuleType:
    """The module made of ``tests/native/<name>.cpp``, compiled when needed."""
    source = HERE / f"{name}.cpp"
    target = OUT / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest-xdist and a second terminal build the same file
        inputs = [source, *(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.inc"), *ROOT.glob("generator/*.py")]
        if not target.is_file() or target.stat().st_mtime < max(path.stat().st_mtime for path in inputs):
            generator = [sys.executable, "-m", "generator", "--only", "none", "--out", str(OUT / "gen")]
            subprocess.run(generator, cwd=ROOT, check=True, capture_output=True)
            fresh = target.with_suffix(".new")
            done = subprocess.run(_command(source, fresh), capture_output=True, text=True)
            assert done.returncode == 0, f"{source.name} does not compile:\n{done.stderr}"
            os.replace(fresh, target)
    spec = importlib.util.spec_from_file_location(name, target)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
