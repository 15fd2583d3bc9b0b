"""The one enumeration: every kernel that is built, in a stable order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lowbit.dtypes import ACT_TYPES, KERNEL_TYPES, ActType, WeightType
from lowbit.errors import SchemeError
from lowbit.scheme import why_not

from .families import Family, Variant, families
from .naming import row_name, unit_name, unit_tag


@dataclass(frozen=True)
class Row:
    """One kernel."""

    family: Family
    variant: Variant
    weight: WeightType
    act: ActType

    @property
    def name(self) -> str:
        return row_name(self.weight, self.act, self.family.name, self.variant.name)

    @property
    def unit(self) -> str:
        """The file that this kernel is instantiated in: few enough to link, many enough to compile side by side."""
        part = {"width": self.weight.bits, "type": unit_tag(self.weight), "all": "all"}[self.family.unit_of]
        return unit_name(self.family, self.variant, part, self.act)

    @property
    def shared_unit(self) -> str:
        """The file of what this kernel shares with those of other weights."""
        return unit_name(self.family, self.variant, "shared", self.act)

    def compiled_for(self, archs: Sequence[str]) -> tuple[str, ...]:
        """Those of some CUDA architectures such as ("80", "90a") that the kernel is compiled for."""
        return tuple(arch for arch in archs if re.fullmatch(self.variant.archs, arch))

    @property
    def affine(self) -> tuple[int, int]:
        """``(step, offset)`` with value = step * code - offset; (1, 0) where codes mean something else."""
        if self.weight.kind not in ("int", "uint"):
            return 1, 0
        first, second = map(int, self.weight.values[:2])
        return second - first, -first


def decoder(weight: WeightType) -> tuple[str, int]:
    """How integer products see a code: ``("codes", m)`` the byte is m * code, ``("bytes", 0)`` it stands in a table,
    ``("floats", 0)`` it has no byte, ``("codebook", 0)`` nor a value before the weight brings its table.

    The byte of a code is ``value * 2**shift + offset`` (WeightType.byte_form); floats have no such form.
    """
    if weight.byte_form is None:
        return "codebook" if weight.kind == "codebook" else "floats", 0
    for multiplier in (1, 2):
        if all(byte == multiplier * code for code, byte in enumerate(byte_table(weight))):
            return "codes", multiplier
    return "bytes", 0


def byte_table(weight: WeightType) -> tuple[int, ...]:
    """``value * 2**shift + offset`` of each code; the type must have a byte form."""
    shift, offset = weight.byte_form
    return tuple(int(v * 2**shift) + offset for v in weight.values)


def rows(arch: str | None = None, only: str | None = None, cuda_archs: Sequence[str] | None = None) -> list[Row]:
    """Every legal kernel of the families, or those of some devices (``arch``) whose names match ``only`` (globs), and
    of those for CUDA the ones that are compiled for any of ``cuda_archs``.

    ``only="none"`` gives no kernel at all: a build for work on everything else. Raises SchemeError when a filter
    matches nothing, because a misspelt filter must not give an empty library.
    """
    found = [
        Row(family, variant, weight, act)
        for family in families()
        for variant in family.variants
        for weight in KERNEL_TYPES
        for act in ACT_TYPES
        if re.fullmatch(variant.weights, weight.name) and why_not(weight, act, family=family.name) is None
    ]
    if arch is not None:
        known = sorted({row.family.device for row in found})
        if not set(arch.split(",")) <= set(known):
            raise SchemeError(f"expected devices out of {', '.join(known)}, got {arch!r}")
        found = [row for row in found if row.family.device in arch.split(",")]
    if cuda_archs is not None:
        found = [row for row in found if row.family.device != "cuda" or row.compiled_for(cuda_archs)]
    if only is not None:
        matching = [row for row in found if any(fnmatchcase(row.name, glob) for glob in only.split(","))]
        if not matching and only != "none":
            raise SchemeError(f"no kernel's name matches {only!r}; a name looks like {found[0].name}")
        found = matching
    return found


def units(found: Sequence[Row], which: str = "unit") -> dict[str, list[Row]]:
    """The rows of each file, a property of them, in the order of the rows."""
    grouped: dict[str, list[Row]] = {}
    for row in found:
        grouped.setdefault(getattr(row, which), []).append(row)
    return grouped
