"""Which families of kernels exist: one entry each. Everything else follows from this list and lowbit/dtypes.py.

To add a family: write its template, add an entry to :func:`families`, and let ``lowbit.scheme.why_not`` say which
combinations it serves. A family for a new device class also needs a frame in render.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lowbit.dtypes import ACT_TYPES

ROOT = Path(__file__).resolve().parent.parent
_ISA_ROW = re.compile(r'^LOWBIT_ISA\((\w+), "([^"]*)", .+\)$', re.MULTILINE)


@dataclass(frozen=True)
class Variant:
    """One machine that a family is compiled for: an instruction set of a CPU, or an architecture of a GPU."""

    name: str
    arch: str  # what --arch picks
    target: str  # the compiler's name for it


@dataclass(frozen=True)
class Family:
    """One kind of kernel. In ``template`` and ``shared``, {variant} stands for the variant's name."""

    name: str
    device: str  # picks the frame of render.py
    variants: tuple[Variant, ...]
    acts: tuple[str, ...]
    template: tuple[str, ...]  # headers of a unit of kernels, in order; the last one has the algorithm
    shared: tuple[str, ...] = ()  # headers of the unit that holds what all kernels of a variant call


def cpu_variants(path: Path = ROOT / "csrc/cpu_isa.inc") -> tuple[Variant, ...]:
    """The instruction sets of cpu_isa.inc, best first."""
    return tuple(Variant(name, "cpu", target) for name, target in _ISA_ROW.findall(path.read_text()))


def families() -> tuple[Family, ...]:
    """Every family, in the order of the manifest."""
    simd = "templates/cpu/simd_{variant}.h"
    return (
        Family(
            name="cpu",
            device="cpu",
            variants=cpu_variants(),
            acts=tuple(a.name for a in ACT_TYPES),
            template=(simd, "templates/cpu/dequant.h", "templates/cpu/gemm.h"),
            shared=(simd, "templates/cpu/product.h"),
        ),
    )
