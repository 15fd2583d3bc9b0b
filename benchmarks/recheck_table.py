"""Times what a table that ships has for this GPU beside what the plan would do, and keeps the ranges that still gain.

    python benchmarks/recheck_table.py lowbit/autotune/tables/nvidia-h200.json

After kernels, or the plan's costs, have changed. A range is judged at its most rows of x: by what bench_tune.py asks
of what it ships its kernel must be 2% faster than the plan's, 5% from 96 rows on; each of the two is warm by itself,
as in a sweep of tiles. The table is written anew, with the times of now. The result file has ``rows`` [weight, act, N,
K, group, zeros, least rows, most rows, kernel, us, the plan's, us, kept]; where both are the same kernel there is one
time.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import torch  # noqa: E402
from bench_tune import GAIN, HOT_GAIN, HOT_ROWS, packed, write_table  # noqa: E402
from gpu_record import Record  # noqa: E402

from lowbit.autotune import cache, plan  # noqa: E402
from lowbit.autotune.problem import Problem  # noqa: E402
from lowbit.autotune.tuner import winner  # noqa: E402

TURNS, TRIALS = 3, 3


def own_times(timer, names: list[str], m: int, heat_ms: float) -> dict[str, float]:
    """Microseconds of kernels that hold the product: the median of trials in turns, from 96 rows on after some ms of
    the kernel itself, as a device at its limit of power slows down by what each draws."""
    trials = {name: trial for name in names if (trial := timer(name, m)) is not None}
    taken: dict[str, list[float]] = {name: [] for name in trials}
    for _ in range(TURNS):
        for name, trial in trials.items():
            begin = time.perf_counter()
            while m >= HOT_ROWS and (time.perf_counter() - begin) * 1e3 < heat_ms:
                trial()
            taken[name] += [trial() for _ in range(TRIALS)]
    return {name: round(statistics.median(found), 3) for name, found in taken.items()}


def judge(problem: Problem, ranges: dict, first, times) -> tuple[dict, list[list]]:
    """The ranges that still gain, with their new times; and a row of the result file for each. first: the plan's kernel
    for so many rows of x; times: microseconds by kernel of some kernels, at so many rows."""
    kept, rows = {}, []
    for (least, most), was in ranges.items():
        name, planned = winner(was), first(most)
        us = times(list(dict.fromkeys([name, planned])), most)
        gain = GAIN if most < HOT_ROWS else HOT_GAIN
        keep = name in us and planned in us and us[planned] > gain * us[name]
        if keep:
            kept[least, most] = us
        rows.append([*dataclasses.astuple(problem), least, most, name, us.get(name), planned, us.get(planned), keep])
    return kept, rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="a table of this GPU; written anew")
    parser.add_argument("--heat-ms", type=float, default=60, help="ms of a kernel before its turns of 96 rows on (60)")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which ranges stay as they are")
    parser.add_argument("--device", help="folder under benchmarks/results (from the device's name)")
    parser.add_argument("--out", help="result file (benchmarks/results/<device>/recheck_table_<date>.json)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    from lowbit.graph_timer import GraphTimer

    name = torch.cuda.get_device_name(0)
    held = cache.read(args.table, device=name)
    if not held:
        parser.error(f"expected a table of {name} that has ranges, got {args.table}")
    record, device = Record(__file__, argv), plan.device_of(0)
    kept, rows = {}, []
    for problem, ranges in held.items():
        if record.seconds > args.deadline:
            kept[problem] = ranges
            continue
        pw = packed(problem.weight, problem.act, problem.n, problem.k, problem.group_size)
        timer = GraphTimer(pw, problem.act)

        def first(m: int, problem=problem) -> str:
            whole = problem.zeros == "whole"
            found = plan.candidates(problem.scheme, problem.act, m, problem.n, problem.k, device, whole_zeros=whole)
            return found[0].name

        def times(names: list[str], m: int, timer=timer) -> dict[str, float]:
            return own_times(timer, names, m, args.heat_ms)

        still, more = judge(problem, ranges, first, times)
        kept |= {problem: still} if still else {}
        rows += more
        print(f"{problem}: {len(still)} of {len(ranges)}", file=sys.stderr, flush=True)
        del timer, times, pw
        torch.cuda.empty_cache()
    record.keep(args, rows=rows)
    about = record.about()
    print(write_table(args.table, kept, about["versions"], about["date"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
