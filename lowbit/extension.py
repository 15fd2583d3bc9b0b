"""Loads the compiled library, once, and talks to its few C functions about instruction sets.

Why C functions and not ops: they are asked before any tensor exists, and a command such as ``lowbit info`` wants them
as plain text.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from . import env
from .errors import EnvironmentVariableError, ExtensionError, SchemeError, nearest

#: The CPU library of this installation and the list of its kernels, whether they exist or not.
LIBRARY = Path(__file__).parent / "lib" / "liblowbit_cpu.so"
MANIFEST = LIBRARY.with_name("manifest.json")

_lock = threading.RLock()
_library: ctypes.CDLL | None = None

_OK, _UNKNOWN, _UNUSABLE = range(3)  # what lowbit_set_isa returns


def load() -> ctypes.CDLL:
    """Load the library, so that ``torch.ops.lowbit.*`` work; later calls return at once. All of lowbit does it when it
    needs to; do it yourself before ``torch.export.load`` of a program that has these ops.

    Raises ExtensionError when it is missing or does not load, EnvironmentVariableError for a ``LOWBIT_FORCE_ISA`` that
    does not exist or that this CPU lacks.
    """
    global _library
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            library = _open(LIBRARY)
            env.warn_about_unknown_names()
            _apply_forced_isa(library)
            _library = library
    return _library


def isas() -> list[str]:
    """Instruction sets that this CPU can use, best first. Raises like :func:`load`."""
    return load().lowbit_isas().decode().split()


def isa() -> str:
    """The instruction set in use. Raises like :func:`load`."""
    return load().lowbit_isa().decode()


def kernel_rows() -> list[str]:
    """Names of all kernels of this build, usable here or not. Raises like :func:`load`."""
    return load().lowbit_kernel_rows().decode().split()


def manifest() -> list[dict]:
    """The rows of the build's manifest, one a kernel: ``name``, ``family``, ``isa``, ``weight``, ``act`` and more.

    Raises ExtensionError when it is missing or names other kernels than the library has.
    """
    try:
        rows = json.loads(MANIFEST.read_text())["kernels"]
    except (OSError, ValueError, KeyError) as error:
        raise ExtensionError(
            f"expected the list of kernels in {MANIFEST}, got {error!r}: install lowbit again"
        ) from error
    built = kernel_rows()
    if sorted(row["name"] for row in rows) != sorted(built):
        raise ExtensionError(
            f"{MANIFEST} lists {len(rows)} kernels, {LIBRARY.name} has {len(built)}, expected the same: build again"
        )
    return rows


def kernel_name(weight: str, act: str, isa_name: str | None = None) -> str | None:
    """The kernel that serves a weight type and an activation type under an instruction set (by default the one in
    use): its own, or that of the next one below that this CPU has; None when the build has none.
    """
    usable = isas()
    below = usable[usable.index(isa() if isa_name is None else isa_name) :]
    found = {row["isa"]: row["name"] for row in manifest() if (row["weight"], row["act"]) == (weight, act)}
    return next((found[name] for name in below if name in found), None)


@contextlib.contextmanager
def force_isa(name: str) -> Iterator[None]:
    """Use another instruction set inside a ``with`` block: for tests and selftest. It changes the whole process.

    Raises SchemeError for a name that does not exist or that this CPU lacks.
    """
    library, before = load(), isa()
    result = library.lowbit_set_isa(name.encode())
    if result != _OK:
        raise SchemeError(_why_not(library, name, result))
    try:
        yield
    finally:
        library.lowbit_set_isa(before.encode())


def _open(path: Path) -> ctypes.CDLL:
    import torch

    # Why here: ops are a later room, but schemas, fakes and gradients must exist before any op is called.
    importlib.import_module(f"{__package__}.ops.gradient")
    if not path.is_file():
        raise ExtensionError(
            f"lowbit's compiled library is missing, expected {path}: "
            "install lowbit with `pip install --no-build-isolation .` in its source folder, or from a wheel"
        )
    try:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
        for name in ("lowbit_isas", "lowbit_isa", "lowbit_kernel_rows"):
            function = getattr(library, name)
            function.argtypes, function.restype = [], ctypes.c_char_p
        library.lowbit_set_isa.argtypes, library.lowbit_set_isa.restype = [ctypes.c_char_p], ctypes.c_int
    except (OSError, AttributeError) as error:
        raise ExtensionError(
            f"lowbit's compiled library {path} does not load ({error}); it needs Linux on x86-64 and torch 2.10 or "
            f"newer, got torch {torch.__version__}: update torch or build lowbit again"
        ) from error
    return library


def _apply_forced_isa(library: ctypes.CDLL) -> None:
    name = env.get("LOWBIT_FORCE_ISA")
    if name is None:
        return
    result = library.lowbit_set_isa(name.encode())
    if result != _OK:
        raise EnvironmentVariableError("LOWBIT_FORCE_ISA: " + _why_not(library, name, result))


def _why_not(library: ctypes.CDLL, name: str, result: int) -> str:
    usable = library.lowbit_isas().decode().split()
    if result == _UNKNOWN:
        return f"no instruction set is called {name!r}; did you mean {nearest(name, usable)}?"
    return f"this CPU has no {name!r}; expected one of {', '.join(usable)}"
