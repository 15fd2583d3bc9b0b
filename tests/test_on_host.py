"""Risk: kernels of decode, gemm_sm80 and gemm_sm90 read what has not come, the wrong place or beyond it, race in shared
memory, wait forever, or add up the wrong sums.

The kernels' own code runs on a CPU: threads of a block are fibers, and the few instructions that they are made of are
plain functions (tests/native/on_host), which also keep track of what barriers put in order. That needs CUDA's headers,
and no GPU.
"""

from __future__ import annotations

import subprocess

import pytest

from native.emulated import CSRC, built, built_of_kernels


@pytest.mark.parametrize(
    ("kernels", "cases"), [("decode", 164), ("gemm_sm80", 58), ("gemm_sm90_narrow", 100), ("gemm_sm90_wide", 208)]
)
def test_products_of_every_tile_are_right(tmp_path, kernels, cases):
    program = built_of_kernels(tmp_path, f"{kernels}_on_host.cpp")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == cases, done.stdout + done.stderr
    assert all(line.startswith("right: ") for line in lines), done.stdout


def test_a_race_is_found_where_a_barrier_is_missing_and_nowhere_else(tmp_path):
    program = built(tmp_path, "races_on_host.cpp", CSRC)
    for case in range(18):
        done = subprocess.run([str(program), str(case)], capture_output=True, text=True, timeout=60)
        missing = case % 2 == 1
        assert done.returncode == missing and done.stdout.startswith("WRONG") == missing, f"case {case}: {done.stdout}"
