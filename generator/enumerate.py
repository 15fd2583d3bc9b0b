"""The one enumeration: every kernel that is built, in a stable order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lowbit.dtypes import WEIGHT_TYPES, ActType, WeightType, act_type
from lowbit.errors import SchemeError
from lowbit.scheme import why_not

from .families import Family, Variant, families
from .naming import row_name, unit_name


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
        """The file that this kernel is instantiated in: one per width, so that they compile side by side."""
        return unit_name(self.family.name, self.variant.name, self.weight.bits)


def decoder(weight: WeightType) -> tuple[str, int]:
    """How integer products see a code: ``("codes", m)`` the byte is m * code, ``("bytes", 0)`` it stands in a table,
    ``("floats", 0)`` it has no byte.

    The byte of a code is ``value * 2**shift + offset`` (WeightType.byte_form); floats have no such form.
    """
    if weight.byte_form is None:
        return "floats", 0
    for multiplier in (1, 2):
        if all(byte == multiplier * code for code, byte in enumerate(byte_table(weight))):
            return "codes", multiplier
    return "bytes", 0


def byte_table(weight: WeightType) -> tuple[int, ...]:
    """``value * 2**shift + offset`` of each code; the type must have a byte form."""
    shift, offset = weight.byte_form
    return tuple(int(v * 2**shift) + offset for v in weight.values)


def rows(arch: str | None = None, only: str | None = None) -> list[Row]:
    """Every legal kernel of the families, or those of one arch whose names match ``only`` (globs, comma-separated).

    ``only="none"`` gives no kernel at all: a build for work on everything else. Raises SchemeError when a filter
    matches nothing, because a misspelt filter must not give an empty library.
    """
    found = [
        Row(family, variant, weight, act_type(act))
        for family in families()
        for variant in family.variants
        for weight in WEIGHT_TYPES
        for act in family.acts
        if why_not(weight, act, family=family.name) is None
    ]
    if arch is not None:
        known = sorted({row.variant.arch for row in found})
        found = [row for row in found if row.variant.arch in arch.split(",")]
        if not found:
            raise SchemeError(f"expected an architecture out of {', '.join(known)}, got {arch!r}")
    if only is not None:
        matching = [row for row in found if any(fnmatchcase(row.name, glob) for glob in only.split(","))]
        if not matching and only != "none":
            raise SchemeError(f"no kernel's name matches {only!r}; a name looks like {found[0].name}")
        found = matching
    return found


def units(found: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each file, in the order of the rows."""
    grouped: dict[str, list[Row]] = {}
    for row in found:
        grouped.setdefault(row.unit, []).append(row)
    return grouped
