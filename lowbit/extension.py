"""Loads the compiled libraries, once, and switches what this process runs: instruction sets and CUDA kernels."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
from collections.abc import Iterator

from . import env, libraries
from .errors import EnvironmentVariableError, ExtensionError, SchemeError, nearest

_lock = threading.RLock()
_library: ctypes.CDLL | None = None
_cuda: ctypes.CDLL | str = "lowbit's libraries are not loaded yet"  # the CUDA library, or why there is none
_forced: bytes | None = None  # the CUDA kernel that force_cuda_kernel or LOWBIT_FORCE_KERNEL chose
_split = (0, 0, 0, 0, 0, 0, False)  # what force_cuda_split chose; zeros: nothing

_OK, _UNKNOWN, _UNUSABLE = range(3)  # what lowbit_set_isa returns


def load() -> ctypes.CDLL:
    """Load the libraries, so that ``torch.ops.lowbit.*`` work; later calls return at once. All of lowbit does it when
    it needs to; do it yourself before ``torch.export.load`` of a program that has these ops. The CUDA library is loaded
    where torch sees a CUDA device; :func:`~lowbit.cuda_devices.cuda_kernels` says whether its kernels can be used.

    Raises ExtensionError when it is missing or does not load, EnvironmentVariableError for a ``LOWBIT_FORCE_ISA`` that
    does not exist or that this CPU lacks, a ``LOWBIT_BATCH_INVARIANT`` or ``LOWBIT_TUNED`` other than 1 and 0, a
    ``LOWBIT_LOG`` other than plan, or, where the CUDA library is loaded, a ``LOWBIT_FORCE_KERNEL`` that it lacks.
    """
    global _library, _cuda
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            library = libraries.open_cpu()
            env.warn_about_unknown_names()
            for name in ("LOWBIT_BATCH_INVARIANT", "LOWBIT_LOG", "LOWBIT_TUNED"):
                env.get(name)  # a value that does not exist is an error without a GPU too
            _apply_forced_isa(library)
            _cuda = _open_cuda()
            _library = library
    return _library


def is_loaded() -> bool:
    """Whether the libraries are loaded, without loading them."""
    return _library is not None


def isas() -> list[str]:
    """Instruction sets that this CPU can use, best first. Raises like :func:`load`."""
    return load().lowbit_isas().decode().split()


def isa() -> str:
    """The instruction set in use. Raises like :func:`load`."""
    return load().lowbit_isa().decode()


def cuda() -> ctypes.CDLL | str:
    """The CUDA library, or one sentence that says why it is not loaded. Raises like :func:`load`."""
    load()
    return _cuda


def cuda_library() -> ctypes.CDLL:
    """The CUDA library, without a GPU too: there only for what needs none, such as plans. Raises like :func:`load`, and
    ExtensionError when this build has none or it does not load.
    """
    library = cuda()
    return libraries.open_cuda() if isinstance(library, str) else library


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


@contextlib.contextmanager
def force_cuda_kernel(name: str) -> Iterator[None]:
    """Inside a ``with`` block, products of a kernel's types with no more rows of x than it takes use this kernel, and
    raise RuntimeError where it can't hold them: for tests, benchmarks and selftest. It changes the whole process.

    Raises SchemeError where the library has no such kernel or there is no library.
    """
    library, before = cuda(), _forced
    reason = library if isinstance(library, str) else _force(library, name.encode())
    if reason:
        raise SchemeError(reason)
    try:
        yield
    finally:
        _force(library, before)


@contextlib.contextmanager
def force_cuda_split(
    row_tiles: int,
    parts: int,
    blocks: int,
    early: int = 1,
    warps: int = 16,
    next_after: int = 0,
    two_each: bool = False,
) -> Iterator[None]:
    """Inside a ``with`` block, kernels for few rows of x share a product in this way (``struct Split`` of csrc/args.h):
    for tests and benchmarks; ``two_each``: with two blocks of half of a multiprocessor on each. It changes the whole
    process. A kernel that can't do so refuses the product, which raises RuntimeError where it is the one of
    :func:`force_cuda_kernel`; else another one is taken.

    Raises SchemeError where there is no CUDA library, or a number is not in 1 to 255 (next_after: 0 to 8).
    """
    global _split
    library, before, split = cuda(), _split, (row_tiles, parts, blocks, early, warps, next_after, bool(two_each))
    if isinstance(library, str):
        raise SchemeError(library)
    if not (all(1 <= number <= 255 for number in split[:5]) and 0 <= next_after <= 8):
        raise SchemeError(
            f"row_tiles, parts, blocks, early and warps must be in 1 to 255, next_after in 0 to 8, got {split}"
        )
    numbers = ctypes.c_int * 7
    library.lowbit_cuda_force_split(numbers(*split))
    _split = split
    try:
        yield
    finally:
        library.lowbit_cuda_force_split(numbers(*before))
        _split = before


@contextlib.contextmanager
def try_cuda_kernel(name: str) -> Iterator[None]:
    """Like :func:`force_cuda_kernel`, but only for products that this thread launches: for timing a kernel while other
    threads go on. One thread at a time may do so.

    Raises SchemeError where the library has no such kernel, there is no library, or another kernel is forced already.
    """
    library = cuda()
    reason = library if isinstance(library, str) else None
    if reason is None and _forced is not None:
        reason = f"{_forced.decode()} is forced (LOWBIT_FORCE_KERNEL), so no other kernel can be tried"
    elif reason is None and library.lowbit_cuda_try(name.encode()):
        reason = f"no kernel for products on CUDA of this build is called {name!r}"
    if reason:
        raise SchemeError(reason)
    try:
        yield
    finally:
        library.lowbit_cuda_try(None)


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """Inside a ``with`` block, a row of a product on CUDA is the same to the bit whatever rows x has beside it, at the
    cost of speed. It changes the whole process, as ``LOWBIT_BATCH_INVARIANT=1`` does from the start. Products that
    can't be so (float32 x or scales, codebooks) raise RuntimeError. On CPUs with AVX-512 products of types with a byte
    form (``WeightType.byte_form``) are so; other floats and codebooks, AVX2 and plain C++ sum a row alone in another
    order.
    """
    library = cuda()
    before = None if isinstance(library, str) else library.lowbit_cuda_batch_invariant(on)
    try:
        yield
    finally:
        if before is not None:
            library.lowbit_cuda_batch_invariant(before)


def _open_cuda() -> ctypes.CDLL | str:
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        library = libraries.open_cuda()
    except ExtensionError as error:
        return str(error)
    library.lowbit_cuda_batch_invariant(env.get("LOWBIT_BATCH_INVARIANT") == "1")
    name = env.get("LOWBIT_FORCE_KERNEL")
    if name is not None and (reason := _force(library, name.encode())):
        raise EnvironmentVariableError(f"LOWBIT_FORCE_KERNEL: {reason}")
    if env.get("LOWBIT_LOG") == "plan":
        # Why here: a later room, which only this variable asks for.
        importlib.import_module(f"{__package__}.autotune.log").watch(library)
    return library


def _force(library: ctypes.CDLL, name: bytes | None) -> str | None:
    """Force a CUDA kernel, or none; the reason why not when the library has no such kernel."""
    global _forced
    if library.lowbit_cuda_force(name):
        names = library.lowbit_cuda_kernel_rows().decode().split()
        word = name.decode()
        return f"no CUDA kernel of this build is called {word!r}; did you mean {nearest(word, names)}?"
    _forced = name
    return None


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
