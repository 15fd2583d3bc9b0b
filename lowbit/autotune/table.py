"""A plan for many numbers of rows of x: for people, a table; for programs, a dict."""

from __future__ import annotations

from collections.abc import Iterable

from ..scheme import Scheme
from . import tuned
from .plan import BUCKETS, Device, candidates

#: What is said where no kernel multiplies, and where none does all rows at once.
_EXPANDED = "none, the weight is expanded for torch's product"
_PARTS = "none, some rows at a time, or expanded for torch's product"


class PlanTable(dict):
    """Number of rows of x -> its candidates, the one that is tried first first; ``device`` is what they are for.

    Prints as a table, a line for each M: the kernel that is tried first, and the microseconds of all that have a time
    there; where none has one, all that are tried, in order. Where times were measured they are a line below.
    """

    device: Device

    def __str__(self) -> str:
        shown = [c for found in self.values() for c in found if c.place == "timed" or c.measured is not None]
        columns = sorted({c.name for c in shown}, key=lambda name: ("decode" not in name, len(name), name))
        timed = sorted(c.name for c in shown if c.place == "timed")
        shared = timed[-1][: timed[-1].rindex("_") + 1] if len(set(timed)) > 1 else ""
        # n8 of the kernels with times, decode_n1 of others
        heads = [name.removeprefix(shared) if name.startswith(shared) else name.partition("_")[2] for name in columns]
        lines = [["M", "first" if columns else "in this order", *heads]]
        for m, found in self.items():
            us = {c.name: f"{c.us:.1f}" for c in found if c.place == "timed"}
            tried = [c.name for c in found if c.place != "never"] or [_PARTS if found else _EXPANDED]
            kernels = tried[0] if columns else ", ".join(tried)
            lines.append([str(m), kernels, *(us.get(name, "-") for name in columns)])
            measured = {c.name: f"{c.measured:.1f}" for c in found if c.measured is not None}
            if measured:
                lines.append(["", "measured", *(measured.get(name, "") for name in columns)])
        title = f"microseconds, about, of {shared}*" if columns else "no times are known"
        return "\n".join([f"{title}; {self.device}", *_aligned(lines)])


def plan_table(
    scheme: Scheme,
    act: str,
    n: int,
    k: int,
    device: Device,
    ms: Iterable[int] = BUCKETS,
    *,
    measured: bool = False,
    **known: bool,
) -> PlanTable:
    """The candidates for each number of rows of x in ``ms``; measured: with what this process knows to be measured on
    such devices, else by the plan alone; known: of the weight, as :func:`~lowbit.autotune.plan.candidates` takes it.
    Raises like that.
    """
    ask = tuned.candidates if measured else candidates
    table = PlanTable((m, ask(scheme, act, m, n, k, device, **known)) for m in ms)
    table.device = device
    return table


def _aligned(lines: list[list[str]]) -> list[str]:
    """Columns of equal width: numbers to the right, the kernel, the second one, to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.rjust, str.ljust, *[str.rjust] * len(widths)]
    return ["  ".join(map(lambda side, cell, w: side(cell, w), sides, line, widths)).rstrip() for line in lines]
