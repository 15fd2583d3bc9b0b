"""The one list of weight types and activation types, and every fact that follows from a row.

This module needs neither torch nor numpy: the generator reads it while a wheel is being built.

A weight type says what a ``bits``-bit code means. Its value table is :meth:`WeightType.values`; everything else
(planes of the packed layouts, the byte form that integer dot products use) is derived from the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .errors import DtypeError, SchemeError, nearest


@dataclass(frozen=True)
class WeightType:
    """One weight type. ``kind`` is ``int`` (symmetric), ``uint`` (with a zero point), ``float``, or ``codebook`` (of
    :data:`KERNEL_TYPES` alone)."""

    name: str
    kind: str
    bits: int
    exponent: int = 0
    mantissa: int = 0

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The value of each of the 2**bits codes (NaN and infinity where the code means that); none of a codebook,
        whose values come with the weight."""
        if self.kind == "codebook":
            return ()
        return tuple(self._value(code) for code in range(1 << self.bits))

    def _value(self, code: int) -> float:
        if self.kind == "uint":
            return float(code)
        if self.kind == "int":
            return float(2 * code - 1) if self.bits == 1 else float(code - (1 << (self.bits - 1)))
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        e = (code >> self.mantissa) & ((1 << self.exponent) - 1)
        m = code & ((1 << self.mantissa) - 1)
        if self.name == "float8_e4m3" and e == 15 and m == 7:
            return float("nan")
        if self.name == "float8_e5m2" and e == 31:
            return float("nan") if m else sign * float("inf")
        bias = (1 << (self.exponent - 1)) - 1
        if e == 0:
            return sign * m * 2.0 ** (1 - bias - self.mantissa)
        return sign * (1 + m / (1 << self.mantissa)) * 2.0 ** (e - bias)

    @cached_property
    def invalid_codes(self) -> tuple[int, ...]:
        """Codes that mean NaN or infinity: never made by a quantizer, refused by ``QuantTensor.validate``."""
        return tuple(c for c, v in enumerate(self.values) if v != v or abs(v) == float("inf"))

    @cached_property
    def max_value(self) -> float:
        """The largest finite value."""
        return max(v for c, v in enumerate(self.values) if c not in self.invalid_codes)

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes a code is stored in, low bits first: 7 -> (4, 2, 1)."""
        return tuple(p for p in (8, 4, 2, 1) if self.bits & p)

    @cached_property
    def byte_form(self) -> tuple[int, int] | None:
        """``(shift, offset)`` such that ``value * 2**shift + offset`` is a whole number in 0..255 for every code.

        None where no such pair exists: then the CPU kernels multiply in floating point.
        """
        if self.invalid_codes or self.kind == "codebook":
            return None
        for shift in range(9):
            scaled = [v * 2.0**shift for v in self.values]
            if all(v == int(v) for v in scaled):
                low, high = int(min(scaled)), int(max(scaled))
                return (shift, -low) if high - low <= 255 else None
        return None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ActType:
    """One activation type. ``on_the_fly``: the caller's x is of a float type, and is quantized per token."""

    name: str
    tag: str
    bits: int
    on_the_fly: bool = False


def _float(name: str) -> WeightType:
    e, m = (int(d) for d in name.split("_e")[1].split("m"))
    return WeightType(name, "float", 1 + e + m, e, m)


_FLOATS = (
    "float3_e1m1", "float4_e2m1", "float5_e2m2", "float5_e3m1", "float6_e2m3",
    "float6_e3m2", "float7_e3m3", "float7_e4m2", "float8_e4m3", "float8_e5m2",
)  # fmt: skip

#: Every weight type, in the order of its id (its index): append only, exported programs hold ids.
WEIGHT_TYPES: tuple[WeightType, ...] = (
    *(WeightType(f"int{b}", "int", b) for b in range(1, 9)),
    *(WeightType(f"uint{b}", "uint", b) for b in range(1, 9)),
    *(_float(n) for n in _FLOATS),
)

#: What kernels are built for, in the order of their ids: the weight types, then a codebook of each width, which serves
#: weights of a uint type that have a table of 2**bits floats in place of the type's own values.
KERNEL_TYPES: tuple[WeightType, ...] = (
    *WEIGHT_TYPES,
    *(WeightType(f"codebook{b}", "codebook", b) for b in range(1, 9)),
)

#: Every activation type, in the order of its id.
ACT_TYPES: tuple[ActType, ...] = (
    ActType("float32", "a32", 32),
    ActType("float16", "a16", 16),
    ActType("bfloat16", "ab16", 16),
    ActType("int8", "a8", 8, on_the_fly=True),
)

_WEIGHTS = {t.name: t for t in WEIGHT_TYPES}
_KERNELS = {t.name: t for t in KERNEL_TYPES}
_ACTS = {t.name: t for t in ACT_TYPES}


def weight_type(name: str | WeightType) -> WeightType:
    """The weight type called ``name``. Raises SchemeError with the nearest names, DtypeError for a non-string."""
    if isinstance(name, WeightType):
        return name
    if not isinstance(name, str):
        raise DtypeError(f"expected the name of a weight type such as 'int4', got {type(name).__name__}")
    if name not in _WEIGHTS:
        raise SchemeError(f"no weight type is called {name!r}; did you mean {nearest(name, _WEIGHTS)}?")
    return _WEIGHTS[name]


def kernel_type(weight: str | WeightType, codebook: bool = False) -> WeightType:
    """The type whose kernels serve weights of a type (``codebook``: those with one), or that the manifest calls so.

    Raises SchemeError where a codebook goes with none, KeyError for another name.
    """
    wtype = _KERNELS[weight] if isinstance(weight, str) else weight
    if not codebook:
        return wtype
    if wtype.kind != "uint":
        raise SchemeError(f"a codebook goes with a uint type such as uint{wtype.bits}, got {wtype}")
    return _KERNELS[f"codebook{wtype.bits}"]


def act_type(name: str | ActType) -> ActType:
    """The activation type called ``name``. Raises SchemeError with the nearest names."""
    if isinstance(name, ActType):
        return name
    if name not in _ACTS:
        raise SchemeError(f"no activation type is called {name!r}; did you mean {nearest(name, _ACTS)}?")
    return _ACTS[name]


def weight_id(wtype: WeightType) -> int:
    """The number that stands for a type of :data:`KERNEL_TYPES` in compiled code."""
    return KERNEL_TYPES.index(wtype)


def act_id(act: ActType) -> int:
    """The number that stands for an activation type in compiled code."""
    return ACT_TYPES.index(act)
