"""Every environment variable of lowbit, in one table; the README prints it with :func:`table`."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

from .errors import EnvironmentVariableError, nearest

_PREFIX = "LOWBIT_"


@dataclass(frozen=True)
class Variable:
    """One variable: ``expects`` says what a value may be; ``values`` are the legal ones where they are a fixed list."""

    name: str
    when: str
    expects: str
    meaning: str
    values: tuple[str, ...] | None = None


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "LOWBIT_FORCE_ISA",
        "run",
        "an instruction set that `lowbit info` lists",
        "Use the CPU kernels of this instruction set, not those of the best one; an error if this CPU lacks it.",
    ),
    Variable(
        "LOWBIT_FORCE_KERNEL",
        "run",
        "a CUDA kernel of the manifest, such as `w4a16_gemm_sm90_n32`",
        "Use this kernel for the products on CUDA of its types and rows of x; an error where it can't hold one.",
    ),
    Variable(
        "LOWBIT_LOG",
        "run",
        "`plan`",
        "plan: one line for each new product on CUDA: its kernel, the others and their times (docs/plans.md).",
        ("plan",),
    ),
    Variable(
        "LOWBIT_BATCH_INVARIANT",
        "run",
        "`1` or `0`",
        "1: a row of a product on CUDA is the same to the bit whatever rows x has beside it; slower.",
        ("1", "0"),
    ),
    Variable(
        "LOWBIT_TUNED",
        "run",
        "`1` or `0`",
        "0: read no tables of measured times; products on CUDA go by predicted ones, until `lowbit.tune` is called.",
        ("1", "0"),
    ),
    Variable(
        "LOWBIT_CACHE",
        "run",
        "a folder",
        "Where the times that `lowbit.tune` measured are kept; unset: `lowbit` in `$XDG_CACHE_HOME` or `~/.cache`.",
    ),
    Variable(
        "LOWBIT_ONLY",
        "build",
        "globs of kernel names, comma-separated, such as `w4*_cpu_avx2`, or `none`",
        "Build only the kernels that match; a product without a kernel then raises an error.",
    ),
    Variable(
        "LOWBIT_PORTABLE",
        "build",
        "`1` or `0`",
        "1: the library must run wherever manylinux_2_28 does; 0: link for this machine; unset: the first if possible.",
        ("1", "0"),
    ),
    Variable(
        "LOWBIT_CUDA_ARCHS",
        "build",
        "such as `80;90a`, or `none`",
        "Compute capabilities to build CUDA kernels for; unset: the GPUs of this machine, if it also has nvcc.",
    ),
    Variable(
        "LOWBIT_LINEINFO",
        "build",
        "`1` or `0`",
        "1: CUDA kernels tell profilers their source lines; the library grows.",
        ("1", "0"),
    ),
)

_BY_NAME = {v.name: v for v in VARIABLES}


def get(name: str) -> str | None:
    """The value of a variable of the table, None when unset or empty.

    Raises EnvironmentVariableError for a value outside the variable's list, KeyError for a name outside the table.
    """
    variable = _BY_NAME[name]
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    if variable.values is not None and value not in variable.values:
        raise unknown_value(name, value, variable.values)
    return value


def unknown_value(name: str, value: str, known) -> EnvironmentVariableError:
    """The error for a value that does not exist, with the nearest ones that do."""
    return EnvironmentVariableError(f"{name} does not know {value!r}; did you mean {nearest(value, known)}?")


def warn_about_unknown_names() -> None:
    """One warning for each ``LOWBIT_*`` variable that is set and that no version of this table knows."""
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in _BY_NAME:
            warnings.warn(f"{name} is set, but lowbit reads {nearest(name, _BY_NAME)}", stacklevel=3)


def table() -> str:
    """The table as Markdown."""
    rows = [f"| `{v.name}` | {v.when} | {v.expects} | {v.meaning} |" for v in VARIABLES]
    return "\n".join(["| variable | read at | value | meaning |", "| --- | --- | --- | --- |", *rows])
