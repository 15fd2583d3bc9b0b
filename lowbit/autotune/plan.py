"""The choice of a CUDA kernel, and the times that it rests on: csrc/cuda/plan.h, for people to read."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .. import extension
from ..dtypes import act_id, act_type, weight_id
from ..errors import ExtensionError, ShapeError
from ..scheme import ZERO_KINDS, Scheme


@dataclass(frozen=True)
class Device:
    """What a plan depends on of a GPU: ``capability``, 90 for compute capability 9.0; ``blocks``, and ``pairs`` of them
    (clusters of two), that run at once with a multiprocessor for each block.
    """

    capability: int
    blocks: int
    pairs: int


@dataclass(frozen=True)
class Candidate:
    """A kernel's name, and the microseconds that it would take, about, from constants fitted on an H200: None where no
    time is known (family decode, GPUs of another compute capability, kernels that are only tried after others).
    """

    name: str
    us: float | None

    def __str__(self) -> str:
        return self.name if self.us is None else f"{self.name} {self.us:.1f} us"


def device_of(index: int) -> Device:
    """The CUDA device `index`. Raises ExtensionError when lowbit's CUDA library is not loaded."""
    numbers = (ctypes.c_int * 3)()
    _library().lowbit_cuda_device(index, numbers)
    return Device(*numbers)


def candidates(scheme: Scheme, act: str, m: int, n: int, k: int, device: Device) -> list[Candidate]:
    """The kernels of this build for x ``[m, k]`` of type ``act`` times a weight ``[n, k]`` on a device, the one that is
    tried first first; none where the weight is expanded (float32 x or scales).

    Raises ShapeError for a size below 1, ExtensionError when lowbit's CUDA library is not loaded.
    """
    if min(m, n, k) < 1:
        raise ShapeError(f"expected sizes of at least 1, got M {m}, N {n}, K {k}")
    library = _library()
    if scheme.scale_type == "float32":
        return []
    numbers = (
        weight_id(scheme.weight),
        act_id(act_type(act)),
        m,
        n,
        k,
        scheme.group_size,
        ZERO_KINDS.index(scheme.zero_kind),
        device.capability,
        device.blocks,
        device.pairs,
    )
    found = (line.split() for line in library.lowbit_cuda_plan(*map(int, numbers)).decode().splitlines())
    return [Candidate(name, float(us) if float(us) >= 0 else None) for name, us in found]


def _library() -> ctypes.CDLL:
    library = extension.cuda()
    if isinstance(library, str):
        raise ExtensionError(library)
    # Why here: sizes have 64 bits.
    library.lowbit_cuda_plan.argtypes = [ctypes.c_int] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_int] * 4
    library.lowbit_cuda_plan.restype = ctypes.c_char_p
    library.lowbit_cuda_device.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    library.lowbit_cuda_device.restype = None
    return library
