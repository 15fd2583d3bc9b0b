"""Timing on a GPU: one CUDA graph launches every copy of a weight once, back to back; the median of its replays.

Why a graph: launched one by one, kernels of a few microseconds wait for the host. Why copies: a weight that is read
again comes from the cache, in a model it never does.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
#: The copies of a weight take this many bytes at least, and three times the last cache.
ROTATE_BYTES = 190_000_000


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median of all trials, the least, the most; ``how`` they were launched."""

    us: float
    least: float
    most: float
    how: str


def cache_bytes() -> int:
    """Bytes of the last cache of the current CUDA device."""
    return getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 60 << 20)


def copies_for(weight_bytes: int, cache: int) -> int:
    """How many copies of a weight make every launch miss a cache of ``cache`` bytes; two at least."""
    return max(2, math.ceil(max(ROTATE_BYTES, 3 * cache) / max(weight_bytes, 1)))


def graph_us(
    calls: Sequence[Callable[[], object]], least_ms: float = 15, trials: int = 7, heat_ms: float = 0
) -> Timing:
    """Time calls that launch on the current stream, after ``heat_ms`` of them. Where a graph can't be made of them
    (``how`` says why), a plain loop is timed, with the gaps between its launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once, how = all_at_once(calls)
        return summary(_replays(once, least_ms, trials, heat_ms), len(calls), how)


def all_at_once(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], str]:
    """A graph of the calls, made on the current stream, which is not the default one, and "graph"; or a loop of them,
    and why there can't be a graph."""
    graph, loop = torch.cuda.CUDAGraph(), loop_of(calls)
    loop()
    torch.cuda.synchronize()
    try:
        graph.capture_begin()
        try:
            loop()
        finally:
            graph.capture_end()
    except RuntimeError as why:
        torch.cuda.synchronize()
        return loop, f"loop: {str(why).splitlines()[0]}"
    return graph.replay, "graph"


def loop_of(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """All of the calls, one after the other."""

    def loop():
        for call in calls:
            call()

    return loop


def stopwatch(once: Callable[[], object]) -> Callable[[int], float]:
    """Tells how many milliseconds ``once`` takes on the current stream, in so many turns without a pause."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(turns: int) -> float:
        begin.record()
        for _ in range(turns):
            once()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / turns

    return timed


def host_stopwatch(once: Callable[[], object]) -> Callable[[int], float]:
    """The same of what is done when it returns: for a dry run on the CPU."""

    def timed(turns: int) -> float:
        begin = time.perf_counter()
        for _ in range(turns):
            once()
        return (time.perf_counter() - begin) * 1e3 / turns

    return timed


def in_turns(
    sides: dict[Name, Callable[[], object]],
    least_ms: float = 8,
    rounds: int = 6,
    heat_ms: float = 0,
    watch: Callable[[Callable[[], object]], Callable[[int], float]] = stopwatch,
) -> dict[Name, list[float]]:
    """Milliseconds that each of ``sides`` takes on the current stream in each of ``rounds``, of ``least_ms`` at least:
    all of them in random order, again and again, after a round that is not kept. Each turn begins with ``heat_ms`` of
    the side itself that are not kept. Why: at its limit of power a device takes some 0.2 s to find the clock at which a
    side draws what it may. Shorter turns all run at one clock between those of the sides, so that the one that draws
    the least is slowed down by the others; and of sides that are timed once, the first one finds the device coolest."""
    watches = {name: watch(once) for name, once in sides.items()}
    for timed in watches.values():
        timed(1)  # the first replay uploads a graph
    each = {name: max(timed(1), 1e-3) for name, timed in watches.items()}
    order, found, shuffled = list(sides), {name: [] for name in sides}, random.Random(1)
    for kept in [False] + [True] * rounds:
        shuffled.shuffle(order)
        for name in order:
            if kept and heat_ms:
                watches[name](max(1, int(heat_ms / each[name])))
            ms = watches[name](max(1, int(least_ms / each[name])))
            if kept:
                found[name].append(ms)
    return found


def host_us(calls: Sequence[Callable[[], object]], least_ms: float = 2, trials: int = 3) -> Timing:
    """The same as graph_us for calls that are done when they return: for a dry run on the CPU."""
    found = in_turns({"host": loop_of(calls)}, least_ms, trials, watch=host_stopwatch)
    return summary(found["host"], len(calls), "host")


def _replays(once: Callable[[], object], least_ms: float, trials: int, heat_ms: float) -> list[float]:
    """Milliseconds that ``once`` takes on the current stream, for each trial of at least ``least_ms``."""
    timed = stopwatch(once)
    timed(2)  # the first replay uploads the graph
    each = max(timed(2), 1e-3)
    if heat_ms:
        timed(max(1, int(heat_ms / each)))
    turns = max(1, int(least_ms / each))
    return [timed(turns) for _ in range(trials)]


def summary(found: list[float], calls: int, how: str) -> Timing:
    """Of trials in milliseconds, each of so many calls."""
    each = sorted(ms * 1e3 / calls for ms in found)
    return Timing(statistics.median(each), each[0], each[-1], how)
