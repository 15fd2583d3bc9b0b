"""The list of this build's kernels: the manifest, the names in the libraries, and which CPU kernel serves what."""

from __future__ import annotations

import json

from . import extension, libraries
from .errors import ExtensionError

#: The list that was made with the libraries, whether it exists or not.
MANIFEST = libraries.LIBRARY.with_name("manifest.json")


def kernel_rows() -> list[str]:
    """Names of all CPU kernels of this build, usable here or not. Raises like :func:`lowbit.extension.load`."""
    return extension.load().lowbit_kernel_rows().decode().split()


def manifest(family: str | None = None) -> list[dict]:
    """The rows of the build's manifest, one a kernel, or those of one family: ``name``, ``family``, ``variant``,
    ``weight``, ``act``, ``library``; on the CPU also ``isa``; on CUDA ``archs``, the architectures that it was compiled
    for, and, for products, ``tokens``, rows of x in a tile.

    Raises ExtensionError when it is missing or names other kernels than the libraries have.
    """
    cpu, cuda = libraries.LIBRARY, libraries.CUDA_LIBRARY
    try:
        rows = json.loads(MANIFEST.read_text())["kernels"]
        listed = {path.name: [] for path in (cpu, cuda)}
        for row in rows:
            listed[row["library"]].append(row["name"])
    except (OSError, ValueError, KeyError) as error:
        raise ExtensionError(
            f"expected the list of kernels in {MANIFEST}, got {error!r}: install lowbit again"
        ) from error
    built = {cpu.name: kernel_rows()}
    if not isinstance(extension.cuda(), str):
        built[cuda.name] = extension.cuda().lowbit_cuda_kernel_rows().decode().split()
    elif not cuda.is_file():
        built[cuda.name] = []
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
    usable = extension.isas()
    below = usable[usable.index(extension.isa() if isa_name is None else isa_name) :]
    found = {row["isa"]: row["name"] for row in manifest("cpu") if (row["weight"], row["act"]) == (weight, act)}
    return next((found[name] for name in below if name in found), None)
