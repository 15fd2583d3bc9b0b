"""Compiles programs that run the kernels' own code on a CPU, by tests/native/on_host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import cuda

NATIVE = Path(__file__).parent
CSRC = NATIVE.parent.parent / "csrc"
#: Headers of csrc/templates in whose place those of on_host come.
REPLACED = {"ptx": ("async.cuh", "cluster.cuh", "mma.cuh", "pairs.cuh", "tma.cuh", "wgmma.cuh"), ".": ("launch.cuh",)}


def built(folder: Path, source: str, *includes: Path) -> Path:
    """The program of a source of tests/native; skips the test where it can't be compiled."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    headers = cuda.find(("80",)).include if shutil.which("nvcc") else folder
    if compiler is None or not (headers / "cuda_fp16.h").is_file():
        pytest.skip("needs g++ and the headers of a CUDA toolkit")
    program = folder / "run"
    found = [*(f"-I{path}" for path in includes), f"-I{NATIVE}", f"-isystem{headers}"]
    # Why -O1: -O2 compiles for a third longer, which what it saves does not pay.
    subprocess.run([compiler, "-std=c++17", "-O1", *found, str(NATIVE / source), "-o", str(program)], check=True)
    return program


def built_of_kernels(folder: Path, source: str) -> Path:
    """The same of one that includes kernels, copied to a folder beside what plays the device."""
    shutil.copytree(CSRC / "templates", folder / "templates")
    shutil.copy(CSRC / "args.h", folder)
    for place, names in REPLACED.items():
        for name in names:
            assert (folder / "templates" / place / name).is_file(), f"{name} is no header of templates/{place}"
            shutil.copy(NATIVE / "on_host" / name, folder / "templates" / place)
    return built(folder, source, folder)
