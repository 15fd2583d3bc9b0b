"""The choice of a CUDA kernel, and the times that it rests on: csrc/cuda/plan.h, for people to read."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .. import extension
from ..dtypes import kernel_type, weight_id, weight_type
from ..errors import DeviceError, ExtensionError, ShapeError
from ..scheme import EVEN_SCALES, SCALE_TYPES, WIDER_SCALES, Scheme
from .problem import MOST, Problem

#: Rows of x, each standing for those from the one before on, that plans are shown and logged for.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class Device:
    """What a plan depends on of a GPU: ``capability``, 90 for compute capability 9.0; ``blocks``, and ``pairs`` of them
    (clusters of two), that run at once with a multiprocessor for each block.
    """

    capability: int
    blocks: int
    pairs: int

    def __str__(self) -> str:
        return f"compute capability {self.capability / 10}, {self.blocks} blocks, {self.pairs} pairs"


#: Devices by name, for plans without one: those that were measured.
DEVICES = {"h200": Device(90, 132, 66)}


@dataclass(frozen=True)
class Candidate:
    """A kernel's name, the microseconds that it would take, about, from constants fitted on an H200, and its place:
    "timed"; "untimed", tried in its turn though no time is known (GPUs of another compute capability); "later", only
    tried after those; "never", it can't hold the product. ``us`` is None unless it is timed; measured: the microseconds
    that it took on a GPU like this one, or None.
    """

    name: str
    us: float | None = None
    place: str = "timed"
    measured: float | None = None

    def __str__(self) -> str:
        predicted = "" if self.us is None else f" {self.us:.1f} us"
        return f"{self.name}{predicted}" + ("" if self.measured is None else f" (measured {self.measured:.1f})")


def device_of(index: int) -> Device:
    """The CUDA device `index`. Raises ExtensionError when lowbit's CUDA library is not loaded, DeviceError where no
    such device answers."""
    library = extension.cuda()
    if isinstance(library, str):
        raise ExtensionError(library)
    numbers = (ctypes.c_int * 3)()
    if library.lowbit_cuda_device(index, numbers):
        raise DeviceError(f"expected the index of a CUDA device that answers, got {index}")
    return Device(*numbers)


def find_device(text: str) -> Device:
    """A device of :data:`DEVICES` by its name, or one by its three numbers, such as "80,108,0". Raises DeviceError."""
    if isinstance(text, str) and text in DEVICES:
        return DEVICES[text]
    numbers = text.split(",") if isinstance(text, str) else []
    if len(numbers) != 3 or not all(n.strip().isdecimal() for n in numbers) or not int(numbers[1]):
        raise DeviceError(
            f"expected {', '.join(DEVICES)}, or a compute capability, blocks and pairs of blocks at once such as "
            f"80,108,0, got {text!r}"
        )
    return Device(*map(int, numbers))


def candidates(
    scheme: Scheme,
    act: str,
    m: int,
    n: int,
    k: int,
    device: Device,
    *,
    whole_zeros: bool = False,
    uneven_scales: bool = False,
    codebook: bool = False,
) -> list[Candidate]:
    """The kernels of this build for x ``[m, k]`` of type ``act`` times a weight ``[n, k]`` on a device, which need not
    exist here, in the order of the plan; none where the weight is always expanded (float32 x). whole_zeros,
    uneven_scales: all zeros are whole numbers, scales are not even (lowbit/pack/known.py), which is found out when a
    weight is packed; codebook: the weight has one.

    Raises ShapeError for a size below 1 or beyond 2^31 - 512, ExtensionError when this build has no CUDA library that
    loads.
    """
    if min(m, n, k) < 1 or max(m, n, k) > MOST:
        raise ShapeError(f"expected sizes of at least 1 and at most {MOST}, got M {m}, N {n}, K {k}")
    library = extension.cuda_library()
    problem = Problem.of(scheme, act, n, k, whole_zeros)
    numbers = numbers_of(problem, m, device, scheme.scale_type, codebook, uneven_scales)
    found = (line.split() for line in library.lowbit_cuda_plan(*numbers).decode().splitlines())
    return [Candidate(name, None, place) if place.isalpha() else Candidate(name, float(place)) for name, place in found]


def numbers_of(
    problem: Problem,
    m: int,
    device: Device,
    scale_type: str = "float16",
    codebook: bool = False,
    uneven_scales: bool = False,
) -> tuple[int, ...]:
    """The arguments of ``lowbit_cuda_plan``."""
    _, act, *sizes, zeros = problem.numbers
    kind = weight_type(problem.weight)
    held = WIDER_SCALES.get(scale_type, scale_type)
    if zeros == 0 and kind.kind == "int" and held == "float16" and not (codebook or uneven_scales):
        zeros = EVEN_SCALES
    weight = weight_id(kernel_type(kind, codebook))
    scales = SCALE_TYPES.index(held)
    return (weight, act, int(m), *map(int, sizes), zeros, scales, device.capability, device.blocks, device.pairs)
