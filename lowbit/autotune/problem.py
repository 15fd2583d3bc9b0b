"""What products have in common that share tuned kernels, and the ranges of rows of x that they are tuned for."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from ..dtypes import act_id, act_type, weight_id, weight_type
from ..errors import ShapeError
from ..scheme import FAMILY_ACTS, OP_ZERO_KINDS, WHOLE_ZEROS, Scheme, why_not

#: Kinds of zeros by the numbers that ops get, each with a name of its own.
ZEROS = (*OP_ZERO_KINDS[:WHOLE_ZEROS], "whole")
#: The last rows of x of each range. Every tile of gemm_sm90 is repeated equally often for all rows of a range, as far
#: as it can be the fastest there: all multiples of 16 to 64 up to 64, of 96 to 256 up to 1024. By times of an H200
#: (tests/test_tuner.py) ranges that end at powers of two instead would lose 5% on average, 44% at worst.
EDGES = (
    1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 144, 160, 192, 208, 256, 288, 320, 384, 416, 432, 512,
    576, 624, 640, 720, 768, 800, 832, 864, 896, 960, 1008, 1024,
)  # fmt: skip
#: Rows of x in a range above those.
_WIDE = 256
#: What is tuned unless it is said: all ranges, and two of long prompts.
DEFAULT_MS = (*EDGES, 2048, 4096)
#: The largest N, K and M: padded to a tile of any kernel they still are an int (csrc/templates/layout.cuh, kSizeLimit).
MOST = (1 << 31) - 512

Span = tuple[int, int]  # least and most rows of x


@dataclass(frozen=True)
class Problem:
    """x of type ``act`` times a weight [n, k] of type ``weight`` in groups; zeros: one of :data:`ZEROS`."""

    weight: str
    act: str
    n: int
    k: int
    group_size: int
    zeros: str

    @classmethod
    def of(cls, scheme: Scheme, act: str, n: int, k: int, whole_zeros: bool = False) -> Problem:
        """The problem of a weight; whole_zeros: all its zeros are whole numbers."""
        return cls(scheme.weight.name, act, n, k, scheme.group_size, "whole" if whole_zeros else scheme.zero_kind)

    @property
    def scheme(self) -> Scheme:
        return Scheme(weight_type(self.weight), self.group_size, OP_ZERO_KINDS[ZEROS.index(self.zeros)])

    @property
    def numbers(self) -> tuple[int, ...]:
        """weight, act, n, k, group size and zero kind, as compiled code takes them."""
        weight, act = weight_id(weight_type(self.weight)), act_id(act_type(self.act))
        return (weight, act, self.n, self.k, self.group_size, ZEROS.index(self.zeros))

    def why_not(self) -> str | None:
        """What is wrong with a problem that was read from a file, or None. Raises LowbitError for unknown types."""
        sizes = all(type(size) is int and 1 <= size <= MOST for size in (self.n, self.k))
        if not sizes or self.zeros not in ZEROS or self.act not in FAMILY_ACTS["decode"]:
            return f"there is no product {self}"
        return why_not(self.weight, group_size=self.group_size)

    def __str__(self) -> str:
        group = "a row" if self.group_size < 0 else self.group_size
        zeros = "" if self.zeros == "none" else f", zeros {self.zeros}"
        return f"{self.weight} x {self.act}, {self.n}x{self.k}, group {group}{zeros}"


def span_of(m: int) -> Span:
    """The range that m rows of x lie in."""
    if m > EDGES[-1]:
        below = (m - 1) // _WIDE * _WIDE
        return below + 1, below + _WIDE
    at = bisect.bisect_left(EDGES, m)
    return (EDGES[at - 1] + 1 if at else 1), EDGES[at]


def spans_of(ms: Iterable[int] | None) -> list[Span]:
    """The ranges that numbers of rows lie in, each once, in order. Raises ShapeError for one that is none."""
    ms = DEFAULT_MS if ms is None else list(ms) if isinstance(ms, Iterable) else [ms]
    for m in ms:
        if isinstance(m, bool) or not isinstance(m, int) or not 1 <= m <= MOST - _WIDE:
            raise ShapeError(f"expected ms to be numbers of rows of x, whole and at least 1, got {m!r}")
    return sorted({span_of(m) for m in ms})
