"""Loads the compiled libraries, once, and talks to their few C functions about instruction sets and drivers.

Why C functions and not ops: they are asked before any tensor exists, and a command such as ``lowbit info`` wants them
as plain text.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from . import env
from .errors import EnvironmentVariableError, ExtensionError, SchemeError, nearest

#: The libraries of this installation and the list of their kernels, whether they exist or not.
LIBRARY = Path(__file__).parent / "lib" / "liblowbit_cpu.so"
CUDA_LIBRARY = LIBRARY.with_name("liblowbit_cuda.so")
MANIFEST = LIBRARY.with_name("manifest.json")

_lock = threading.RLock()
_library: ctypes.CDLL | None = None
_cuda: ctypes.CDLL | str = "lowbit's libraries are not loaded yet"  # the CUDA library, or why there is none
_forced: bytes | None = None  # the CUDA kernel that force_cuda_kernel or LOWBIT_FORCE_KERNEL chose
_warned: set[str] = set()
_tables_read: set[int] = set()  # CUDA devices

_OK, _UNKNOWN, _UNUSABLE = range(3)  # what lowbit_set_isa returns


def load() -> ctypes.CDLL:
    """Load the libraries, so that ``torch.ops.lowbit.*`` work; later calls return at once. All of lowbit does it when
    it needs to; do it yourself before ``torch.export.load`` of a program that has these ops. The CUDA library is loaded
    where torch sees a CUDA device; :func:`cuda_kernels` says whether its kernels can be used.

    Raises ExtensionError when it is missing or does not load, EnvironmentVariableError for a ``LOWBIT_FORCE_ISA`` that
    does not exist or that this CPU lacks, a ``LOWBIT_BATCH_INVARIANT`` or ``LOWBIT_TUNED`` other than 1 and 0, a
    ``LOWBIT_LOG`` other than plan, or, where the CUDA library is loaded, a ``LOWBIT_FORCE_KERNEL`` that it lacks.
    """
    global _library, _cuda
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            library = _open(LIBRARY)
            env.warn_about_unknown_names()
            for name in ("LOWBIT_BATCH_INVARIANT", "LOWBIT_LOG", "LOWBIT_TUNED"):
                env.get(name)  # a value that does not exist is an error without a GPU too
            _apply_forced_isa(library)
            _cuda = _open_cuda()
            _library = library
    return _library


def isas() -> list[str]:
    """Instruction sets that this CPU can use, best first. Raises like :func:`load`."""
    return load().lowbit_isas().decode().split()


def isa() -> str:
    """The instruction set in use. Raises like :func:`load`."""
    return load().lowbit_isa().decode()


def kernel_rows() -> list[str]:
    """Names of all CPU kernels of this build, usable here or not. Raises like :func:`load`."""
    return load().lowbit_kernel_rows().decode().split()


def cuda() -> ctypes.CDLL | str:
    """The CUDA library, or one sentence that says why it is not loaded. Raises like :func:`load`."""
    load()
    return _cuda


def cuda_library() -> ctypes.CDLL:
    """The CUDA library, without a GPU too: there only for what needs none, such as plans. Raises like :func:`load`, and
    ExtensionError when this build has none or it does not load.
    """
    library = cuda()
    return _open_cuda_library() if isinstance(library, str) else library


def why_no_cuda(device: int) -> str | None:
    """Why lowbit's kernels cannot run on a CUDA device, or None when they can. Raises like :func:`load`."""
    library = cuda()
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


def manifest(family: str | None = None) -> list[dict]:
    """The rows of the build's manifest, one a kernel, or those of one family: ``name``, ``family``, ``variant``,
    ``weight``, ``act``, ``library``; on the CPU also ``isa``; on CUDA ``archs``, the architectures that it was compiled
    for, and, for products, ``tokens``, rows of x in a tile.

    Raises ExtensionError when it is missing or names other kernels than the libraries have.
    """
    try:
        rows = json.loads(MANIFEST.read_text())["kernels"]
        listed = {path.name: [] for path in (LIBRARY, CUDA_LIBRARY)}
        for row in rows:
            listed[row["library"]].append(row["name"])
    except (OSError, ValueError, KeyError) as error:
        raise ExtensionError(
            f"expected the list of kernels in {MANIFEST}, got {error!r}: install lowbit again"
        ) from error
    built = {LIBRARY.name: kernel_rows()}
    if not isinstance(cuda(), str):
        built[CUDA_LIBRARY.name] = cuda().lowbit_cuda_kernel_rows().decode().split()
    elif not CUDA_LIBRARY.is_file():
        built[CUDA_LIBRARY.name] = []
    for library, names in built.items():
        if sorted(listed[library]) != sorted(names):
            raise ExtensionError(
                f"{MANIFEST} lists {len(listed[library])} kernels of {library}, which has {len(names)}, "
                "expected the same: build again"
            )
    return [row for row in rows if family is None or row["family"] == family]


def kernel_name(weight: str, act: str, isa_name: str | None = None) -> str | None:
    """The CPU kernel that serves a type of dtypes.KERNEL_TYPES and an activation type under an instruction set (by
    default the one in use): its own, or that of the next one below that this CPU has; None when the build has none.
    """
    usable = isas()
    below = usable[usable.index(isa() if isa_name is None else isa_name) :]
    found = {row["isa"]: row["name"] for row in manifest("cpu") if (row["weight"], row["act"]) == (weight, act)}
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
        library = _open_library(path, "lowbit_isas", "lowbit_isa", "lowbit_kernel_rows")
        library.lowbit_set_isa.argtypes, library.lowbit_set_isa.restype = [ctypes.c_char_p], ctypes.c_int
    except (OSError, AttributeError) as error:
        raise ExtensionError(
            f"lowbit's compiled library {path} does not load ({error}); it needs Linux on x86-64 and torch 2.10 or "
            f"newer, got torch {torch.__version__}: update torch or build lowbit again"
        ) from error
    return library


def _open_library(path: Path, *texts: str) -> ctypes.CDLL:
    """A library with its ops registered; ``texts`` are its functions without arguments that return a string."""
    import torch

    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    for name in texts:
        function = getattr(library, name)
        function.argtypes, function.restype = [], ctypes.c_char_p
    return library


def _open_cuda() -> ctypes.CDLL | str:
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        library = _open_cuda_library()
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


def _open_cuda_library() -> ctypes.CDLL:
    if not CUDA_LIBRARY.is_file():
        raise ExtensionError(
            f"this lowbit was built without CUDA kernels, {CUDA_LIBRARY} is missing: build it with LOWBIT_CUDA_ARCHS"
        )
    try:
        library = _open_library(CUDA_LIBRARY, "lowbit_cuda_kernel_rows", "lowbit_cuda_archs")
        library.lowbit_cuda_force.argtypes = library.lowbit_cuda_try.argtypes = [ctypes.c_char_p]
        # Why argtypes: sizes have 64 bits.
        library.lowbit_cuda_plan.argtypes = [ctypes.c_int] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_int] * 5
        library.lowbit_cuda_plan.restype = library.lowbit_cuda_choice.restype = ctypes.c_char_p
        library.lowbit_cuda_choice.argtypes = [*library.lowbit_cuda_plan.argtypes, ctypes.POINTER(ctypes.c_int)]
        library.lowbit_cuda_tune.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.lowbit_cuda_tune.restype = ctypes.c_int64
        library.lowbit_cuda_watch.restype = None
        return library
    except (OSError, AttributeError) as error:
        raise ExtensionError(
            f"lowbit's CUDA library {CUDA_LIBRARY} does not load ({error}): build lowbit again"
        ) from error


def _force(library: ctypes.CDLL, name: bytes | None) -> str | None:
    """Force a CUDA kernel, or none; the reason why not when the library has no such kernel."""
    global _forced
    if library.lowbit_cuda_force(name):
        names = library.lowbit_cuda_kernel_rows().decode().split()
        word = name.decode()
        return f"no CUDA kernel of this build is called {word!r}; did you mean {nearest(word, names)}?"
    _forced = name
    return None


def code_runs(arch: str, major: int, minor: int) -> bool:
    """Whether code for an architecture such as 80, 90a or 100f runs on a device. PTX comes with 80 (tools/cuda.py)."""
    built = divmod(int(arch.rstrip("af")), 10)
    if arch.endswith("a"):
        return built == (major, minor)
    return (built[0] == major and built[1] <= minor) or (arch == "80" and major >= 8)


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
