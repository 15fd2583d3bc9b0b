"""Compiles a test module, tests/native/<name>.cpp, over the headers that also compile on a host."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
BUILD = HERE.parent.parent / "build" / "tests"


def load(name: str, *folders: Path):
    """The module, compiled when its source or a header has changed. Skips the test without pybind11 or a compiler.

    folders: of headers that are not lowbit's."""
    import pytest

    pybind11 = pytest.importorskip("pybind11", reason="the test modules over the C++ headers need pybind11")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the test modules over the C++ headers need a C++ compiler")
    source = HERE / f"{name}.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags += ["-Wno-unknown-pragmas"]  # CUDA's `unroll`
    includes = [
        f"-I{CSRC}",
        f"-I{HERE}",
        f"-isystem{pybind11.get_include()}",
        f"-isystem{sysconfig.get_path('include')}",
    ]
    includes += [f"-isystem{folder}" for folder in folders]
    digest = hashlib.sha256(" ".join([compiler, *flags, *includes]).encode())
    headers = [*(CSRC / "templates").rglob("*"), *(CSRC / "cuda").glob("*.h"), *(HERE / "on_host").glob("*.h")]
    for path in [source, *sorted(p for p in headers if p.is_file())]:
        digest.update(path.read_bytes())
    target = BUILD / digest.hexdigest()[:16] / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}.tmp")
        subprocess.run([compiler, *flags, *includes, str(source), "-o", str(unfinished)], check=True)
        unfinished.replace(target)
    spec = importlib.util.spec_from_file_location(name, target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
