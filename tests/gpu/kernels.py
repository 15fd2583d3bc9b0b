"""The kernels for products of this build, and how a test makes a product use one of them."""

from __future__ import annotations

import contextlib
import functools
import re

import pytest
import torch

import lowbit
from lowbit import extension, kernel_list, libraries
from lowbit.scheme import EVEN_SCALES, WHOLE_ZEROS

BUILT = libraries.CUDA_LIBRARY.is_file()
needs_kernels = pytest.mark.skipif(not BUILT, reason="this build of lowbit has no CUDA kernels")

#: Families of kernels that multiply a packed weight, each by tiles of so many rows of x.
FAMILIES = ("decode", "gemm_sm80", "gemm_sm90")
#: Bytes of x that a block of a kernel for few tokens can hold at least, whatever else it keeps in shared memory.
ROOM_FOR_X = 20 * 1024


def product_rows() -> list[dict]:
    """The manifest's rows of these families, but for codebooks; none where nothing is built for CUDA."""
    found = [row for family in FAMILIES for row in kernel_list.manifest(family)] if BUILT else []
    return [row for row in found if not row["weight"].startswith("codebook")]


def family(name: str) -> str:
    """``gemm_sm90`` of a kernel such as ``w4a16_gemm_sm90_n8``."""
    return name.partition("_")[2].rpartition("_")[0]


def tile(name: str) -> str:
    """``n8`` of a kernel such as ``w4a16_gemm_sm90_n8``."""
    return name.rpartition("_")[2]


def tokens(name: str) -> int:
    """Rows of x in a tile of a kernel: the most with which it can be forced, but for wide ones, which are repeated."""
    return int(tile(name).removeprefix("n"))


def is_wide(name: str) -> bool:
    """Whether a kernel may round values of the weight to x's type."""
    return tokens(name) >= 32


def scales_integers(name: str, bits: int, group_size: int, even: bool = False) -> bool:
    """Whether a kernel applies scales to values of integers, whatever their zeros: wide ones do, but those of gemm_sm90
    with groups of at least 128; of these from 64 tokens on some do, for fp16, and more, also with fewer, where scales
    are even and there are no zeros.
    """
    if not is_wide(name) or family(name) == "gemm_sm80" or 0 < group_size < 128:
        return is_wide(name)
    of_tile = {32: (), 48: (), 64: (3, 4, 5, 6, 7), 96: (3, 6, 7), 128: range(2, 9)}
    if even:
        of_tile |= dict.fromkeys((48, 64, 96), range(1, 9)) | {32: (3, 5)}
    return "a16_" in name and bits in of_tile.get(tokens(name), (5, 6, 7))


def scales_values(name: str, pw: lowbit.PackedWeight) -> bool:
    """Whether a kernel applies scales to values of a weight: also wide ones with zeros that are no whole numbers."""
    even = pw.numbers[-1] >= EVEN_SCALES
    if scales_integers(name, 0 if pw.dtype.kind == "float" else pw.dtype.bits, pw.group_size, even):
        return True
    return is_wide(name) and pw.zero_kind != "none" and pw.numbers[-1] != WHOLE_ZEROS


def forced(name: str | None) -> contextlib.AbstractContextManager:
    """Products of the ``with`` block use the kernel of this name; None leaves the choice to the library.

    A product of another weight type, or with more rows of x than a kernel takes, is not affected.
    """
    return contextlib.nullcontext() if name is None else extension.force_cuda_kernel(name)


@functools.cache
def least_group(name: str) -> int:
    """The shortest groups that a kernel takes, as the manifest says."""
    return next(row.get("least_group", 16) for row in product_rows() if row["name"] == name)


def serves(name: str, pw: lowbit.PackedWeight) -> bool:
    """Whether a tile has a kernel for a weight: none for groups shorter than its least, decode none for floats with
    zeros, tiles of gemm_sm90 that are no powers of two none for zeros that are no whole numbers; scales of float32 are
    for gemm_sm90 with groups of 32 and more, in wide tiles for floats and 5 bits and more alone.
    """
    if pw.scheme.scale_type == "float32":
        if family(name) != "gemm_sm90" or pw.group_size == 16:
            return False
        if is_wide(name) and (scales_values(name, pw) or (pw.dtype.kind != "float" and pw.dtype.bits < 5)):
            return False
    if family(name) == "gemm_sm80" or (family(name) == "gemm_sm90" and tokens(name).bit_count() == 1):
        return True
    zeros = pw.zero_kind != "none" and (
        pw.dtype.kind == "float" if family(name) == "decode" else pw.numbers[-1] != WHOLE_ZEROS
    )
    return not zeros and not 0 < pw.group_size < least_group(name)


def may_refuse(name: str, m: int, k: int) -> bool:
    """Whether a kernel may refuse x [m, k]: one of decode when x is so long that blocks that share it hold more than
    ROOM_FOR_X each, one of gemm_sm90 on devices that it is not for, one of gemm_sm80 where shared memory is small.
    """
    capability = torch.cuda.get_device_capability()
    if family(name) == "gemm_sm80":
        return capability in ((8, 6), (8, 9)) or capability >= (12, 0)
    if family(name) == "gemm_sm90":
        return capability != (9, 0) if is_wide(name) else not (9, 0) <= capability < (12, 0)
    steps = -(-k // 128)
    return -(-steps // (2 if capability >= (9, 0) else 1)) * m * 256 > ROOM_FOR_X


def product_by(name: str, x: torch.Tensor, pw, bias=None, **options) -> torch.Tensor | None:
    """The product by one kernel; None where it refuses what it may refuse. Any other refusal raises."""
    try:
        with forced(name):
            return lowbit.matmul(x, pw, bias, **options)
    except RuntimeError as error:
        if f"{name} was forced and can't hold" in str(error) and (may_refuse(name, *x.shape) or not serves(name, pw)):
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


def ran(launched: list[str], name: str) -> bool:
    """Whether a product ran by one kernel: one launch, of a gemm family two where sums of parts are added up."""
    tile = re.compile(rf"Tile<(\(int\))?{tokens(name)}\b")
    if family(name) == "decode":
        wanted = ["decode::"]
    else:
        wanted = [f"{family(name)}::add_parts", f"{family(name)}::multiply"][-len(launched) :]
    return len(launched) == len(wanted) and all(
        part in seen and tile.search(seen) for part, seen in zip(wanted, sorted(launched), strict=True)
    )
