"""Risk: kernels of decode, gemm_sm80 and gemm_sm90 read what has not come, the wrong place or beyond it, race in shared
memory, wait forever, or add up the wrong sums.

The kernels' own code runs on a CPU: threads of a block are fibers, and the few instructions that they are made of are
plain functions (tests/native/on_host), which also keep track of what barriers put in order. That needs CUDA's headers,
and no GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import cuda

NATIVE = Path(__file__).parent / "native"
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
    subprocess.run([compiler, "-std=c++17", "-O2", *found, str(NATIVE / source), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(
    ("kernels", "cases"), [("decode", 66), ("gemm_sm80", 54), ("gemm_sm90_narrow", 56), ("gemm_sm90_wide", 44)]
)
def test_products_of_every_tile_are_right(tmp_path, kernels, cases):
    shutil.copytree(CSRC / "templates", tmp_path / "templates")
    shutil.copy(CSRC / "args.h", tmp_path)
    for folder, names in REPLACED.items():
        for name in names:
            assert (tmp_path / "templates" / folder / name).is_file(), f"{name} is no header of templates/{folder}"
            shutil.copy(NATIVE / "on_host" / name, tmp_path / "templates" / folder)
    program = built(tmp_path, f"{kernels}_on_host.cpp", tmp_path)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == cases, done.stdout + done.stderr
    assert all(line.startswith("right: ") for line in lines), done.stdout


def test_a_race_is_found_where_a_barrier_is_missing_and_nowhere_else(tmp_path):
    program = built(tmp_path, "races_on_host.cpp", CSRC)
    for case in range(14):
        done = subprocess.run([str(program), str(case)], capture_output=True, text=True, timeout=60)
        missing = case % 2 == 1
        assert done.returncode == missing and done.stdout.startswith("WRONG") == missing, f"case {case}: {done.stdout}"
