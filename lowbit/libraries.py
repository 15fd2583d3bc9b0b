"""Finds and opens the compiled libraries: registers their ops with torch and declares their C functions.

Why C functions and not ops: they are asked before any tensor exists, and a command such as ``lowbit info`` wants them
as plain text.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path

from .errors import ExtensionError

#: The libraries of this installation, whether they exist or not.
LIBRARY = Path(__file__).parent / "lib" / "liblowbit_cpu.so"
CUDA_LIBRARY = LIBRARY.with_name("liblowbit_cuda.so")


def open_cpu() -> ctypes.CDLL:
    """The library of the CPU. Raises ExtensionError when it is missing or does not load."""
    import torch

    # Why here: ops are a later room, but schemas, fakes and gradients must exist before any op is called.
    importlib.import_module(f"{__package__}.ops.gradient")
    if not LIBRARY.is_file():
        raise ExtensionError(
            f"lowbit's compiled library is missing, expected {LIBRARY}: "
            "install lowbit with `pip install --no-build-isolation .` in its source folder, or from a wheel"
        )
    try:
        library = _open(LIBRARY, "lowbit_isas", "lowbit_isa", "lowbit_kernel_rows")
        library.lowbit_set_isa.argtypes, library.lowbit_set_isa.restype = [ctypes.c_char_p], ctypes.c_int
    except (OSError, AttributeError) as error:
        raise ExtensionError(
            f"lowbit's compiled library {LIBRARY} does not load ({error}); it needs Linux on x86-64 and torch 2.10 or "
            f"newer, got torch {torch.__version__}: update torch or build lowbit again"
        ) from error
    return library


def open_cuda() -> ctypes.CDLL:
    """The library of CUDA kernels, without a GPU too. Raises ExtensionError when this build has none or it does not
    load.
    """
    if not CUDA_LIBRARY.is_file():
        raise ExtensionError(
            f"this lowbit was built without CUDA kernels, {CUDA_LIBRARY} is missing: build it with LOWBIT_CUDA_ARCHS"
        )
    try:
        library = _open(CUDA_LIBRARY, "lowbit_cuda_kernel_rows", "lowbit_cuda_archs")
        library.lowbit_cuda_force.argtypes = library.lowbit_cuda_try.argtypes = [ctypes.c_char_p]
        # Why argtypes: sizes have 64 bits.
        library.lowbit_cuda_plan.argtypes = [ctypes.c_int] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_int] * 5
        library.lowbit_cuda_plan.restype = library.lowbit_cuda_choice.restype = ctypes.c_char_p
        library.lowbit_cuda_choice.argtypes = [*library.lowbit_cuda_plan.argtypes, ctypes.POINTER(ctypes.c_int)]
        library.lowbit_cuda_tune.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.lowbit_cuda_tune.restype = ctypes.c_int64
        library.lowbit_cuda_watch.restype = library.lowbit_cuda_force_split.restype = None
        return library
    except (OSError, AttributeError) as error:
        raise ExtensionError(
            f"lowbit's CUDA library {CUDA_LIBRARY} does not load ({error}): build lowbit again"
        ) from error


def _open(path: Path, *texts: str) -> ctypes.CDLL:
    """A library with its ops registered; ``texts`` are its functions without arguments that return a string."""
    import torch

    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    for name in texts:
        function = getattr(library, name)
        function.argtypes, function.restype = [], ctypes.c_char_p
    return library
