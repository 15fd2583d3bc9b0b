"""The decode kernels of this build, and how a test makes a product use one of them."""

from __future__ import annotations

import contextlib

import pytest
import torch

import lowbit
from lowbit import extension

BUILT = extension.CUDA_LIBRARY.is_file()
needs_kernels = pytest.mark.skipif(not BUILT, reason="this build of lowbit has no CUDA kernels")

#: The variants of the family decode, by the most tokens that they take.
TILES = ("n1", "n2", "n4", "n8", "n16")
#: Bytes of x that a block of a kernel for few tokens can hold at least, whatever else it keeps in shared memory.
ROOM_FOR_X = 20 * 1024


def decode_rows() -> list[dict]:
    """The manifest's rows of the family decode; none where nothing is built for CUDA."""
    return extension.manifest("decode") if BUILT else []


def tile(name: str) -> str:
    """``n8`` of a kernel such as ``w4a16_decode_n8``."""
    return name.rpartition("_")[2]


def tokens(name: str) -> int:
    """The most rows of x that a kernel takes."""
    return int(tile(name).removeprefix("n"))


def forced(name: str | None) -> contextlib.AbstractContextManager:
    """Products of the ``with`` block use the decode kernel of this name; None leaves the choice to the library.

    A product of another weight type, or with more rows of x, is not affected.
    """
    return contextlib.nullcontext() if name is None else extension.force_cuda_kernel(name)


def may_refuse(name: str, m: int, k: int) -> bool:
    """Whether x [m, k] is so long that a kernel may refuse it: blocks that share it hold more than ROOM_FOR_X each.

    Kernels for more than 4 tokens hold a part of x at a time; they refuse only where a block's memory is too small.
    """
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    if tokens(name) > 4:
        return not hopper
    steps = -(-k // 128)
    return -(-steps // (2 if hopper else 1)) * m * 256 > ROOM_FOR_X


def product_by(name: str, x: torch.Tensor, pw, bias=None, **options) -> torch.Tensor | None:
    """The product by one kernel; None where it refuses an x that it may refuse. Any other refusal raises."""
    try:
        with forced(name):
            return lowbit.matmul(x, pw, bias, **options)
    except RuntimeError as error:
        if f"{name} was forced and can't hold" in str(error) and may_refuse(name, *x.shape):
            return None
        raise


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


def ran_decode(launched: list[str], tile: int) -> bool:
    """Whether a product ran by the decode kernel for up to ``tile`` tokens: one, or two of them."""
    names = [name.replace("(int)", "") for name in launched]
    return 1 <= len(names) <= 2 and all("decode" in name and f"Tile<{tile}," in name for name in names)
