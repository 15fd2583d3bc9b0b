"""The measured times that this process goes by: what ships with lowbit, what files of this machine hold, what
:func:`lowbit.tune` found. The compiled library gets the winners of them (csrc/cuda/choice.h).
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from pathlib import Path

from .. import cuda_devices, env, extension, libraries
from . import cache, plan
from .cache import Machine, Table
from .plan import Candidate, Device, device_of, numbers_of
from .problem import Problem
from .tuner import Times, winner

#: Tables that ship, by the name of a GPU: {"format": 1, "device": "NVIDIA H200", "capability": 90, "blocks": 132, ...}.
SHIPPED = Path(__file__).parent / "tables"

_lock = threading.RLock()
_shipped: dict[tuple[int, int], Table] = {}  # by capability and blocks
_own: dict[tuple[int, int], Table] = {}


class Choice(ctypes.Structure):
    """struct TunedChoice of csrc/cuda/choice.h."""

    _NUMBERS = "weight act n k group_size zero_kind capability blocks least most"
    _fields_ = [("kernel", ctypes.c_char_p)] + [(name, ctypes.c_int64) for name in _NUMBERS.split()]


def load(index: int) -> None:
    """Use what is known of CUDA device ``index``: once for each, when its first weight is packed."""
    if env.get("LOWBIT_TUNED") == "0":
        return
    device, machine = device_of(index), machine_of(index)
    with _lock:
        place = (device.capability, device.blocks)
        shipped = SHIPPED / f"{machine.device.lower().replace(' ', '-')}.json"
        _shipped[place] = cache.merge(_built(cache.read(shipped, device=machine.device)), _shipped.get(place, {}))
        _own[place] = cache.merge(cache.of_machine(machine), _own.get(place, {}))
        _push()


def use(device: Device, table: Table) -> None:
    """Let products on such devices go by these times from now on, those of them that were not measured by others."""
    with _lock:
        place = (device.capability, device.blocks)
        _own[place] = cache.merge(_own.get(place, {}), table)
        _push()


def forget() -> None:
    """Let all products go by the plan again."""
    with _lock:
        _shipped.clear()
        _own.clear()
        _push()


def known(device: Device) -> Table:
    """What was measured on this machine, by this process or by others; not what ships."""
    with _lock:
        return cache.merge(_own.get((device.capability, device.blocks), {}))


def counts() -> tuple[int, int]:
    """Problems that tables which ship, and those of this machine, have times of."""
    with _lock:
        return tuple(sum(map(len, tables.values())) for tables in (_shipped, _own))


def times(problem: Problem, device: Device, m: int) -> Times:
    """Kernel -> measured microseconds, in the range of m rows of x; empty where nothing was measured."""
    place = (device.capability, device.blocks)
    with _lock:
        for tables in (_own, _shipped):
            spans = tables.get(place, {}).get(problem, {})
            for (least, most), found in reversed(spans.items()):
                if least <= m <= most:
                    return dict(found)
    return {}


def candidates(
    scheme, act, m, n, k, device: Device, *, whole_zeros=False, uneven_scales=False, codebook=False
) -> list[Candidate]:
    """Like :func:`lowbit.autotune.plan.candidates`, with the times that this process knows to be measured, and the
    kernel in front that products here try first.
    """
    options = {"whole_zeros": whole_zeros, "uneven_scales": uneven_scales, "codebook": codebook}
    found = plan.candidates(scheme, act, m, n, k, device, **options)
    if not found or codebook or scheme.scale_type == "float32":  # those are not tuned
        return found
    problem = Problem.of(scheme, act, n, k, whole_zeros)
    us = times(problem, device, m)
    numbers = numbers_of(problem, m, device, scheme.scale_type, uneven_scales=uneven_scales)
    first = extension.cuda_library().lowbit_cuda_choice(*numbers, ctypes.c_int()).decode()
    found = [dataclasses.replace(c, measured=us.get(c.name)) for c in found]
    return sorted(found, key=lambda c: c.name != first)


def machine_of(index: int) -> Machine:
    """What times measured on CUDA device ``index`` are true for."""
    import torch

    cuda = cuda_devices.cuda_version(extension.cuda_library().lowbit_cuda_driver())
    build = cache.build_id(libraries.CUDA_LIBRARY)
    return Machine(torch.cuda.get_device_name(index), cache.driver_version(cuda=cuda), build)


def _built(table: Table) -> Table:
    """A table without the kernels that this build lacks."""
    if not table:
        return table
    names = set(extension.cuda_library().lowbit_cuda_kernel_rows().decode().split())
    made: Table = {}
    for problem, spans in table.items():
        kept = {span: {name: us for name, us in found.items() if name in names} for span, found in spans.items()}
        made[problem] = {span: found for span, found in kept.items() if found}
    return made


def lines() -> list[Choice]:
    """What the compiled library gets; later ones win."""
    return [
        Choice(winner(found).encode(), *problem.numbers, *place, *span)
        for tables in (_shipped, _own)
        for place, table in tables.items()
        for problem, spans in table.items()
        for span, found in spans.items()
    ]


def _push() -> None:
    made = lines()
    extension.cuda_library().lowbit_cuda_tune((Choice * len(made))(*made), len(made))
