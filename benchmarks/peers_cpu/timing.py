"""Clean samples on a busy machine: a time is kept only when nothing else was scheduled on our cores meanwhile.

The kernel counts, for every thread, the time it was ready to run but had to wait for a core (second field of
/proc/self/task/*/schedstat). A sample during which that grew by 1 % of its length or more is dropped. This removes
pre-emption; it does not remove the memory traffic of neighbours nor what a hypervisor does.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from dataclasses import dataclass, field

DIRTY = 0.01  # share of a sample spent waiting for a core, from which on it is dropped
SAMPLE_S = 5e-4  # shorter calls are timed several at once
FEWEST = 3  # clean samples that make a median


class Waiting:
    """How long the threads of this process have waited for a core: one counter each for the caller and the others."""

    def __init__(self):
        self._files: dict[str, int] = {}
        self._own = self._open(str(threading.get_native_id()))

    @staticmethod
    def _open(task: str) -> int | None:
        try:
            return os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY)
        except OSError:  # Why: the thread ended meanwhile, or the kernel does not count.
            return None

    def own_ns(self) -> int:
        """Nanoseconds that the calling thread has waited; 0 where the kernel does not say."""
        return 0 if self._own is None else int(os.pread(self._own, 64, 0).split()[1])

    def others_ns(self) -> int:
        """The same for all other threads together."""
        tasks = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
        for gone in self._files.keys() - tasks:
            os.close(self._files.pop(gone))
        for new in tasks - self._files.keys():
            handle = self._open(new)
            if handle is not None:
                self._files[new] = handle
        total = 0
        for handle in self._files.values():
            try:
                total += int(os.pread(handle, 64, 0).split()[1])
            except OSError:  # Why: it ended between the listing and here.
                continue
        return total

    def close(self) -> None:
        for handle in [*self._files.values(), *([self._own] if self._own is not None else [])]:
            os.close(handle)


def counts_delay() -> bool:
    """Whether schedstat exists here; without it every sample counts as clean, and the results say so."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/schedstat")


def wait_idle(longest: float = 0.3) -> None:
    """Sleep until no other thread of the machine is running, at most ``longest`` seconds."""
    end = time.perf_counter() + longest
    while time.perf_counter() < end:
        with open("/proc/loadavg") as load:
            if int(load.read().split()[3].split("/")[0]) <= 1:
                return
        time.sleep(0.005)


@dataclass
class Samples:
    """Seconds per call. ``clean`` were undisturbed; ``rest`` are the others as (seconds, share of it spent waiting)."""

    clean: list[float] = field(default_factory=list)
    rest: list[tuple[float, float]] = field(default_factory=list)

    def summary(self, threads: int) -> dict | None:
        """median, p10, p90 in seconds, how many samples; None when there is nothing to tell.

        With too few clean samples and one thread, the waiting is taken off the disturbed ones and ``kind`` says
        "corrected": caches were shared with whoever ran meanwhile, so such a number is an upper bound.
        """
        values, kind = self.clean, "clean"
        if len(values) < FEWEST:
            if threads > 1:
                return None
            # Why under half: what waited longer than it ran says little about how it would have run alone.
            values = self.clean + [seconds * (1 - share) for seconds, share in self.rest if share < 0.5]
            kind = "corrected"
        if not values:
            return None
        values = sorted(values)
        at = [values[min(len(values) - 1, int(q * len(values)))] for q in (0.1, 0.9)]
        return {
            "median_s": statistics.median(values),
            "p10_s": at[0],
            "p90_s": at[1],
            "samples": len(values),
            "dropped": len(self.rest) if kind == "clean" else 0,
            "kind": kind,
        }


def measure(call, copies: int, *, seconds: float, threads: int, patience: float = 3, most: int = 200) -> Samples:
    """Time ``call(i)``, i running through the ``copies`` of the weight, for about ``seconds``.

    A sample is one call, or as many as fill ``SAMPLE_S``. Goes on for up to ``patience`` times ``seconds`` while fewer
    than ``FEWEST`` samples are clean.
    """
    begin = time.perf_counter()
    call(0)
    call(1 % copies)
    once = max((time.perf_counter() - begin) / 2, 1e-7)
    batch = max(1, math.ceil(SAMPLE_S / once))
    samples, turn, waiting = Samples(), 2, Waiting()
    stop = time.perf_counter() + seconds
    while len(samples.clean) < most:
        now = time.perf_counter()
        if now > stop and (len(samples.clean) >= FEWEST or now > stop + (patience - 1) * seconds):
            break
        # Why own last and first: with a hundred threads, reading their counters takes longer than a product.
        others = waiting.others_ns()
        own = waiting.own_ns()
        start = time.perf_counter()
        for i in range(turn, turn + batch):
            call(i % copies)
        took = time.perf_counter() - start
        waited = (waiting.own_ns() - own + waiting.others_ns() - others) * 1e-9
        turn += batch
        if waited < DIRTY * took:
            samples.clean.append(took / batch)
            continue
        # Why min: with several threads the waits overlap and can add up to more than the wall time.
        samples.rest.append((took / batch, min(waited / took, 1.0)))
        if threads > 1:
            wait_idle()
    waiting.close()
    return samples


def merge(passes: list[dict | None]) -> dict | None:
    """One row from several passes: the better median, the widest spread, clean before corrected."""
    known = [p for p in passes if p]
    known = [p for p in known if p["kind"] == "clean"] or known
    if not known:
        return None
    best = min(known, key=lambda p: p["median_s"])
    return {
        **best,
        "p10_s": min(p["p10_s"] for p in known),
        "p90_s": max(p["p90_s"] for p in known),
        "samples": sum(p["samples"] for p in known),
        "dropped": sum(p["dropped"] for p in known),
        "passes": len(known),
    }
