"""How much slower lowbit's choice of a kernel is than the best one on a GPU: by the plan, as shipped, tuned.

    python benchmarks/bench_tune.py --types int4,uint4 --deadline 500
    python benchmarks/bench_tune.py --types all --ms 16,64,512 --ship lowbit/autotune/tables/nvidia-h200.json
    python benchmarks/bench_tune.py --dry

For each shape and type all kernels that the plan does not rule out are timed at each number of rows, taking turns;
then lowbit.tune has a second. --dry takes the times of results/nvidia-h200/tiles_*.json instead of those of a GPU.
benchmarks/README.md says what the result file holds.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import matmul_report as report  # noqa: E402
import torch  # noqa: E402
from gpu_record import Record  # noqa: E402

import lowbit  # noqa: E402
from lowbit.autotune import cache, plan, tuned  # noqa: E402
from lowbit.autotune.problem import Problem, span_of, spans_of  # noqa: E402
from lowbit.autotune.tuner import tune_spans, winner  # noqa: E402
from lowbit.dtypes import WEIGHT_TYPES, weight_type  # noqa: E402
from lowbit.scheme import WHOLE_ZEROS  # noqa: E402

#: Rows of x in the middle of ranges too.
MS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 200, 256, 320, 384, 512, 700, 1024, 2048)
#: Kernels that are predicted to take so many times as long as the best one are not timed.
FAR = 2.0
ROUNDS = 5
#: What another kernel than the plan's must gain, twice, to be shipped; more where a device may be at its limit of
#: power, from so many rows of x on: of 12 ranges there that a second H100 measured too, 6 gained less than 5%, 3 of
#: them by chance; of the other 6 one did.
GAIN, HOT_GAIN, HOT_ROWS = 1.02, 1.05, 96
SIDES = ("plan", "default", "tuned")


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--types", type=report.names, default=["int4"], help="weight types, or all (int4)")
    add("--acts", type=report.names, default=["float16"], help="types of x: float16, bfloat16 (float16)")
    add("--shapes", type=report.shapes, default=report.SHAPES["models"], help="N x K, or targets, or models (models)")
    add("--ms", type=report.numbers, default=list(MS), help="rows of x to judge at")
    add("--group", type=int, default=128, help="group size (128)")
    add("--heat-ms", type=float, default=60, help="ms of work before products of 96 rows and more (60)")
    add("--seconds", type=float, default=1.0, help="most seconds of lowbit.tune for each shape and type (1)")
    add("--deadline", type=float, default=math.inf, help="seconds after which nothing new is begun")
    add(
        "--ship",
        type=Path,
        help="add ranges where another kernel than the plan's is 2%% faster (5%% from 96 rows on) to this table",
    )
    add("--device", help="folder under benchmarks/results (from the device's name)")
    add("--out", help="result file (benchmarks/results/<device>/tune_<date>.json); '-' for none")
    add("--dry", action="store_true", help="without a GPU, by times of a sweep of tiles")
    args = parser.parse_args(argv)
    args.types = [t.name for t in WEIGHT_TYPES] if args.types == ["all"] else args.types
    return args


def packed(dtype: str, act: str, n: int, k: int, group: int) -> lowbit.PackedWeight:
    """A Gaussian weight, always the same; uint types with whole zeros, as of GPTQ and AWQ."""
    chance = torch.Generator(device="cuda").manual_seed(n * 31 + k)
    weight = (torch.randn(n, k, generator=chance, device="cuda") / k**0.5).to(getattr(torch, act))
    return lowbit.pack_weight(lowbit.quantize(weight, dtype, group_size=group, method="rtn"), "cuda")


def all_times(timer, names: list[str], m: int, heat_ms: float) -> dict[str, float]:
    """Microseconds of every kernel that holds the product: the median of trials in turns, warm."""
    trials = {name: trial for name in names if (trial := timer(name, m)) is not None}
    begin = time.perf_counter()
    while trials and m >= 96 and (time.perf_counter() - begin) * 1e3 < heat_ms:
        next(iter(trials.values()))()
    taken = [[trial() for trial in trials.values()] for _ in range(ROUNDS)]
    return {name: round(statistics.median(found), 3) for name, *found in zip(trials, *taken)}


def judged(found: list[plan.Candidate]) -> list[str]:
    """The kernels of a plan that are timed: all but those that would round what others don't, or are far off."""
    timed = [c.us for c in found if c.us is not None]
    near = [c for c in found if c.us is not None and c.us <= FAR * timed[0]]
    decode = [c for c in found if c.place == "later" and "_decode_" in c.name]
    return [c.name for c in [*(c for c in found if c.place == "untimed"), *near, *decode]]


def one(args, dtype: str, act: str, n: int, k: int, rows: list, tuning: list, ship: dict) -> None:
    """Everything about one shape and type, to the lists."""
    from lowbit.graph_timer import GraphTimer

    pw = packed(dtype, act, n, k, args.group)
    whole, device = pw.numbers[-1] == WHOLE_ZEROS, plan.device_of(0)
    problem = Problem.of(pw.scheme, act, n, k, whole)

    def ask(m: int, by=plan.candidates) -> list[plan.Candidate]:
        return by(problem.scheme, act, m, n, k, device, whole_zeros=whole)

    about = {"weight": dtype, "act": act, "shape": [n, k], "group": args.group, "zeros": problem.zeros}
    mine = [about | {"m": m, "plan": ask(m)[0].name, "default": ask(m, tuned.candidates)[0].name} for m in args.ms]
    begin = time.perf_counter()
    found = lowbit.tune(pw, act=act, seconds=args.seconds, again=True, save=False)[problem]
    seconds = time.perf_counter() - begin
    timer = GraphTimer(pw, act)
    for row in mine:
        row["tuned"] = ask(row["m"], tuned.candidates)[0].name
        names = dict.fromkeys([*judged(ask(row["m"])), *(row[side] for side in SIDES)])
        row["us"] = all_times(timer, list(names), row["m"], args.heat_ms)
    rows += mine
    timings = sum(map(len, found.values()))
    tuning.append(about | {"seconds": round(seconds, 3), "ranges": len(found), "timings": timings})
    for span, times in found.items():
        first, best = ask(span[1])[0].name, winner(times)
        gain = GAIN if span[1] < HOT_ROWS else HOT_GAIN
        if first not in times or times[first] <= gain * times[best]:
            continue
        # Why again: of many ranges some win by chance, and a device at its limit of power needs time to find its clock.
        again = all_times(timer, [best, first], span[1], args.heat_ms)
        if again[first] > gain * again[best]:
            ship.setdefault(problem, {})[span] = again


def dry(args, rows: list) -> None:
    """The same by times of a sweep on an H200 of tiles of gemm_sm90, whose noise is all the noise there is."""
    import measured_tiles

    for weight in measured_tiles.weights():
        found = tune_spans(
            spans_of(None), weight.plan, lambda name, m, w=weight: lambda: w.guess(name, m), seconds=args.seconds
        )
        for m in sorted({m for us in weight.us.values() for m in us if m >= 5}):
            first, span = weight.plan(m)[0].name, span_of(m)
            chosen = winner(found[span]) if span in found else first
            row = {"weight": weight.dtype, "act": "float16", "shape": [weight.n, weight.k], "m": m}
            rows.append(row | {"plan": first, "default": first, "tuned": chosen, "us": weight.measured(m)})


def losses(rows: list[dict], side: str, against: str | None = None) -> list[float]:
    """How much slower a side's kernels are than the best ones, or than another side's, where both were timed."""
    found = []
    for row in rows:
        us = row["us"]
        if len(us) > 1 and row[side] in us and (against is None or row[against] in us):
            found.append(us[row[side]] / (min(us.values()) if against is None else us[row[against]]) - 1)
    return found


def table(rows: list[dict], tuning: list[dict]) -> str:
    """A line for each type: mean and worst loss of each side against the best kernel, and of two against tuned ones."""

    def cell(found: list[float]) -> str:
        return f"{statistics.mean(found):.2%}, {max(found):.1%}" if found else "-"

    heads = ["mean, worst", "products", *(f"{side} / best" for side in SIDES), "plan / tuned", "default / tuned"]
    lines = [[*heads, "tuned within 2%", "s a shape (worst)"]]
    kinds = list(dict.fromkeys((row["weight"], row["act"]) for row in rows))
    for kind in [*kinds, None]:
        mine = [row for row in rows if kind in (None, (row["weight"], row["act"]))]
        lost = losses(mine, "tuned")
        if not lost:
            continue
        near = sum(one <= 0.02 for one in lost) / len(lost)
        took = [one["seconds"] for one in tuning if kind in (None, (one["weight"], one["act"]))]
        cells = [" ".join(kind) if kind else "all", str(len(lost)), *(cell(losses(mine, side)) for side in SIDES)]
        cells += [cell(losses(mine, "plan", "tuned")), cell(losses(mine, "default", "tuned")), f"{near:.1%}"]
        lines.append([*cells, f"{statistics.mean(took):.2f} ({max(took):.2f})" if took else "-"])
    head, *body = lines
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def write_table(path: Path, merged: dict, versions: dict, date: str) -> str:
    """Write the table that ships for this GPU."""
    name, device = torch.cuda.get_device_name(0), plan.device_of(0)
    about = {"device": name, "capability": device.capability, "blocks": device.blocks, "date": date, **versions}
    unfinished = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(cache.render(merged, **about), encoding="utf-8")
    unfinished.replace(path)
    return (
        f"{len(merged)} problems, {sum(map(len, merged.values()))} ranges in {path.name}, {path.stat().st_size} bytes"
    )


def add_to_table(path: Path, ship: dict, versions: dict, date: str) -> str:
    """The same of what the table held, but for the same ranges, and what is new."""
    held = cache.read(path, device=torch.cuda.get_device_name(0))
    return write_table(path, cache.merge(held, ship), versions, date)


def main(argv: list[str]) -> int:
    args, record = options(argv), Record(__file__, argv)
    rows, tuning, ship, skipped = [], [], {}, {}
    if args.dry:
        dry(args, rows)
        print(table(rows, tuning))
        return 0
    if not torch.cuda.is_available():
        print("bench_tune.py: error: needs a CUDA device; --dry judges by measured times", file=sys.stderr)
        return 2
    for name in args.types:
        weight_type(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWBIT_CACHE"] = folder  # what this machine has measured before is not to be judged
        for dtype, act, (n, k) in ((d, a, s) for s in args.shapes for d in args.types for a in args.acts):
            where = f"{dtype} {act} {n}x{k}"
            if record.seconds > args.deadline:
                skipped[where] = "the deadline had passed"
                continue
            try:
                one(args, dtype, act, n, k, rows, tuning, ship)
            except Exception as why:  # Why so wide: one that fails must not cost all the others.
                skipped[where] = f"{type(why).__name__}: {why}".splitlines()[0]
            torch.cuda.empty_cache()
            took = tuning[-1]["seconds"] if tuning else 0
            print(f"{where}: {skipped.get(where) or f'tuned in {took:.2f} s'}", file=sys.stderr, flush=True)
    method = {"rounds": ROUNDS, "heat_ms": args.heat_ms}
    record.keep(args, method=method, skipped=skipped, tuning=tuning, rows=rows)
    if args.ship and ship:
        about = record.about()
        print(add_to_table(args.ship, ship, about["versions"], about["date"]))
    for where, why in skipped.items():
        print(f"without {where}: {why}")
    if rows:
        print(table(rows, tuning))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
