"""The decode kernels of this build, and how a test makes a product use one of them."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator

import pytest
import torch

from lowbit import extension

BUILT = extension.CUDA_LIBRARY.is_file()
needs_kernels = pytest.mark.skipif(not BUILT, reason="this build of lowbit has no CUDA kernels")

#: The variants of the family decode: tokens a tile (n), row tiles a pass (r).
TILES = ("n8r1", "n8r2", "n8r4", "n16r1", "n16r2", "n16r4")


def decode_rows() -> list[dict]:
    """The manifest's rows of the family decode; none where nothing is built for CUDA."""
    return extension.manifest("decode") if BUILT else []


def tile(name: str) -> str:
    """``n8r4`` of a kernel such as ``w4a16_decode_n8r4``."""
    return name.rpartition("_")[2]


def tokens(name: str) -> int:
    """The most rows of x that a kernel takes."""
    return int(re.fullmatch(r"n(\d+)r\d+", tile(name)).group(1))


@contextlib.contextmanager
def forced(name: str | None) -> Iterator[None]:
    """Products of the ``with`` block use the decode kernel of this name; None leaves the choice to the library.

    A product that the kernel does not serve (another weight type, more rows of x) is not affected.
    """
    library = extension.cuda()
    assert not isinstance(library, str), library
    force = library.lowbit_cuda_force
    force.argtypes, force.restype = [ctypes.c_char_p], ctypes.c_int
    if name is not None:
        assert force(name.encode()) == 0, f"lowbit_cuda_force knows no kernel called {name}"
    try:
        yield
    finally:
        force(None)


def kernels_launched(call) -> list[str]:
    """Names of the kernels that ``call`` runs on the GPU. Skips the test where the profiler sees none at all."""
    activity = torch.profiler.ProfilerActivity
    call()  # what is done once only is not counted
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not found:
        pytest.skip("the profiler sees no kernels on this machine")
    return found
