"""Compiles the CUDA sources of this folder, kernels that only tests need, into build/gpu_tests.

    python tests/gpu/build.py          all of them, so that a machine without nvcc can be given the folder

A library's name holds a digest of what it was made from, so an old one is never loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "gpu_tests"

#: What each source includes of csrc/, and what it is compiled for. wgmma exists in sm_90a alone.
SOURCES = {
    "foreign": ((), ("-gencode=arch=compute_90,code=[sm_90,compute_90]",)),
    "layout_proof": (("templates/layout.cuh",), ("-gencode=arch=compute_90a,code=sm_90a",)),
}
_FLAGS = ("-std=c++17", "-O2", "-shared", "-cudart=static", "-Xcompiler=-fPIC,-Wall,-Wextra", "-Werror=all-warnings")


def target(name: str) -> Path:
    """The library that the present sources give."""
    headers, archs = SOURCES[name]
    digest = hashlib.sha256(" ".join(_FLAGS + archs).encode())
    for path in (HERE / f"{name}.cu", *(CSRC / header for header in headers)):
        digest.update(path.read_bytes())
    return BUILD / f"{name}-{digest.hexdigest()[:16]}.so"


def compile_library(name: str, nvcc: str) -> Path:
    """Compile one source unless it was before; the library."""
    made = target(name)
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(f".{os.getpid()}.tmp")
        command = [nvcc, *_FLAGS, *SOURCES[name][1], f"-I{CSRC}", str(HERE / f"{name}.cu"), "-o", str(unfinished)]
        subprocess.run(command, check=True)
        for old in BUILD.glob(f"{name}-*.so"):
            old.unlink(missing_ok=True)
        unfinished.replace(made)
    return made


def load(name: str) -> ctypes.CDLL:
    """The library, compiled when it is missing. Skips the test on another device, or where nvcc is missing too."""
    import pytest
    import torch

    found = torch.cuda.get_device_capability()
    if found < (9, 0) or (name == "layout_proof" and found != (9, 0)):
        pytest.skip(f"{name}.cu is for compute capability 9.0, got {found[0]}.{found[1]}")
    if not target(name).exists() and shutil.which("nvcc") is None:
        pytest.skip(
            f"{target(name).name} is not in build/gpu_tests, and there is no nvcc to compile tests/gpu/{name}.cu"
        )
    return ctypes.CDLL(str(compile_library(name, "nvcc")))


if __name__ == "__main__":
    for source in SOURCES:
        print(compile_library(source, "nvcc").relative_to(ROOT))
