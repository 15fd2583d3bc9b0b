"""Says on which CUDA devices lowbit's kernels run, and why not on others."""

from __future__ import annotations

import importlib
import warnings

from . import env, extension
from .errors import EnvironmentVariableError

_warned: set[str] = set()
_tables_read: set[int] = set()  # CUDA devices


def why_no_cuda(device: int) -> str | None:
    """Why lowbit's kernels cannot run on a CUDA device, or None when they can.

    Raises like :func:`lowbit.extension.load`.
    """
    library = extension.cuda()
    if isinstance(library, str):
        return library
    built, driver = library.lowbit_cuda_runtime(), library.lowbit_cuda_driver()
    if driver // 1000 < built // 1000:
        return (
            f"lowbit's CUDA kernels were built with CUDA {cuda_version(built)}, "
            f"this driver has {cuda_version(driver)}: CUDA 13 needs driver 580 or newer"
        )
    import torch

    archs, capability = library.lowbit_cuda_archs().decode(), torch.cuda.get_device_capability(device)
    if not any(code_runs(arch, *capability) for arch in archs.split(";")):
        return (
            f"lowbit's CUDA kernels were built for {archs}, cuda:{device} has compute capability "
            f"{capability[0]}.{capability[1]}: build lowbit with LOWBIT_CUDA_ARCHS on this machine"
        )
    return None


def cuda_kernels(device: int) -> bool:
    """Whether lowbit's kernels run on a CUDA device. If not, torch operations must do; one warning says why.

    The first time that they do, tables of times measured on such a device are read (autotune/tuned.py). Raises
    EnvironmentVariableError when they don't and a variable needs them.
    """
    reason = why_no_cuda(device)
    if reason is not None and env.get("LOWBIT_BATCH_INVARIANT") == "1":
        raise EnvironmentVariableError(
            f"LOWBIT_BATCH_INVARIANT=1 needs lowbit's kernels, torch operations promise nothing: {reason}"
        )
    if reason is not None and (name := env.get("LOWBIT_FORCE_KERNEL")):
        raise EnvironmentVariableError(f"LOWBIT_FORCE_KERNEL={name} needs lowbit's kernels: {reason}")
    if reason is not None and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"{reason}; products on CUDA use torch operations, which is slower", stacklevel=3)
    if reason is None and device not in _tables_read:
        _tables_read.add(device)
        # Why here: a later room; and no earlier, because only now CUDA is in use.
        importlib.import_module(f"{__package__}.autotune.tuned").load(device)
    return reason is None


def cuda_version(number: int) -> str:
    """13000 -> 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def code_runs(arch: str, major: int, minor: int) -> bool:
    """Whether code for an architecture such as 80, 90a or 100f runs on a device. PTX comes with 80 (tools/cuda.py)."""
    built = divmod(int(arch.rstrip("af")), 10)
    if arch.endswith("a"):
        return built == (major, minor)
    return (built[0] == major and built[1] <= minor) or (arch == "80" and major >= 8)
