"""Which kernels are timed for a product, and for how long: few, and no longer than it takes to see which one wins.

What is searched is a list of kernels and of ranges of rows of x, both from what the hardware does (problem.py); sizes
of the weight only decide how many of them the plan's prediction leaves over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

from .plan import Candidate
from .problem import Span

#: Kernels whose predicted time is this much longer than the least one's are not timed, nor are more than so many. By
#: times of an H200 (tests/test_tuner.py) what is chosen so is 0.05% slower than the fastest on average, 6.5% at worst,
#: in some 65 timings of a weight; with 1.1 0.13% and 11%, in 37.
FACTOR, MOST = 1.2, 3
#: Kernels without a predicted time that are timed, the first ones of the plan: all three of family decode with floats,
#: of which none is the fastest always, up to so many on other GPUs.
UNTIMED = 3
#: Each kernel is timed so often, taking turns; one that is this much slower than the fastest so far is not timed again.
ROUNDS, GIVE_UP = 5, 1.05

#: Kernel and rows of x -> a function that returns microseconds of one trial, or None where it can't hold the product.
Ready = Callable[[str, int], "Callable[[], float] | None"]
Times = dict[str, float]  # kernel -> microseconds


def worth_timing(plan: list[Candidate]) -> list[str]:
    """The kernels of a plan that may be the fastest, the one that is tried first first."""
    timed = [c for c in plan if c.us is not None]
    near = [c for c in timed if c.us <= FACTOR * timed[0].us][:MOST]
    untimed = [c for c in plan if c.place == "untimed"][:UNTIMED]
    # Why two: where decode has a kernel only the best of the others comes near.
    return [c.name for c in [*untimed, *(near[:2] if untimed else near)]]


def race(trials: dict[str, Callable[[], float]]) -> Times:
    """Median microseconds of each kernel. Why in turns: a GPU gets slower while it gets warm, and then all are."""
    taken: dict[str, list[float]] = {name: [] for name in trials}
    left = list(trials)
    for _ in range(ROUNDS):
        for name in left:
            taken[name].append(trials[name]())
        best = min(min(taken[name]) for name in left)
        left = [name for name in left if min(taken[name]) <= GIVE_UP * best]
        if len(left) == 1:
            break
    return {name: statistics.median(found) for name, found in taken.items()}


def tune_spans(
    spans: Iterable[Span],
    plan: Callable[[int], list[Candidate]],
    ready: Ready,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Span, Times]:
    """Time what is worth it for the last number of rows of each range: range -> kernel -> microseconds.

    plan: the candidates for a number of rows; seconds: nothing new is begun after that; ranges that are left, and those
    where only one kernel is worth it, are not in the result and stay with the plan.
    """
    begin, found = clock(), {}
    for span in spans:
        if clock() - begin >= seconds:
            break
        names = worth_timing(plan(span[1]))
        if len(names) < 2:
            continue
        trials = {name: trial for name in names if (trial := ready(name, span[1])) is not None}
        if len(trials) > 1:
            found[span] = race(trials)
    return found


def winner(times: Times) -> str:
    """The fastest kernel of a range."""
    return min(times, key=times.__getitem__)
