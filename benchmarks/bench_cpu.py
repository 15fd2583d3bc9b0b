"""lowbit on the CPU beside its peers, in one run: y[M, N] = x[M, K] W[N, K]^T, everything from float x to float y.

    python benchmarks/bench_cpu.py --quick
    python benchmarks/bench_cpu.py --ggml libpeer.so --only 'lowbit int4*' --only 'peer*' --m 1,128

benchmarks/README.md says how it is measured and what the result file holds.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import torch  # noqa: E402
from peers_cpu import collect, machine, report, timing  # noqa: E402
from peers_cpu.lowbit_side import ACTS, DEFAULT_TYPES, isa  # noqa: E402
from peers_cpu.side import Problem, Side, Unavailable, nrmse  # noqa: E402

SETTLE_S = 0.02  # pause between sides: thread pools of the last one go to sleep


def options(argv: list[str]) -> argparse.Namespace:
    def names(text):
        return [part for part in text.split(",") if part]

    def numbers(text):
        return [int(part) for part in names(text)]

    def shapes(text):
        return [tuple(int(size) for size in part.split("x", 1)) for part in names(text)]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", type=shapes, default=[(4096, 4096)], help="N x K, separated by commas (4096x4096)")
    add("--m", type=numbers, default=[1, 8, 32, 128, 512], help="rows of x (1,8,32,128,512)")
    add("--threads", type=numbers, default=[1, 2], help="thread counts (1,2)")
    add("--types", type=names, default=DEFAULT_TYPES, help="lowbit's weight types, or all (int1..int8)")
    add("--acts", type=names, default=list(ACTS), help=f"lowbit's activations ({','.join(ACTS)})")
    add("--group", type=int, default=128, help="lowbit's group size (128)")
    add("--ggml", action="append", default=[], metavar="PATH.so", help="a peer behind the C functions of the README")
    add("--only", action="append", default=[], metavar="GLOB", help="only sides whose name fits, e.g. 'lowbit int4*'")
    add("--skip", action="append", default=[], metavar="GLOB", help="no side whose name fits")
    add("--rotate-mb", type=int, default=200, help="MB of copies of each weight, used in turn (200)")
    add("--memory-mb", type=int, default=12000, help="sides are prepared in batches of this size (12000)")
    add("--passes", type=int, default=2, help="rounds over all sides, every other one backwards (2)")
    add("--seconds", type=float, default=0.3, help="time for each side, M and pass (0.3)")
    add("--patience", type=float, default=3, help="up to this many times longer on a busy machine (3)")
    add("--quick", action="store_true", help="M = 1 and 128, one thread, one short pass, fewer types and sides")
    add("--device", help="folder under benchmarks/results (from the CPU's name)")
    add("--out", help="result file (benchmarks/results/<device>/cpu_<date>.json); '-' for none")
    if "--quick" in argv:
        parser.set_defaults(m=[1, 128], threads=[1], passes=1, seconds=0.15, types=["int2", "int4", "int8"])
    args = parser.parse_args(argv)
    if any(len(shape) != 2 or min(shape) < 1 for shape in args.shapes):
        parser.error("--shapes must be pairs of sizes such as 4096x4096")
    unknown = [act for act in args.acts if act not in ACTS]
    if unknown:
        parser.error(f"--acts must be of {', '.join(ACTS)}, got {', '.join(unknown)}")
    return args


def batches(sides: list[Side], problem: Problem, args) -> list[list[Side]]:
    """Sides in order, in groups whose copies fit into the memory that may be used."""
    groups, used = [[]], 0
    for side in sides:
        need = side.bytes(problem) * side.copies(problem, args.rotate_mb)
        if groups[-1] and used + need > args.memory_mb * 1e6:
            groups, used = [*groups, []], 0
        groups[-1].append(side)
        used += need
    return groups


class Run:
    """One shape: what has been measured so far, by side, threads and M."""

    def __init__(self, problem: Problem, args, skipped: dict[str, str]):
        self.problem, self.args, self.skipped = problem, args, skipped
        self.times: dict[tuple, list] = {}
        self.errors: dict[tuple, float | None] = {}
        self.warm: set[tuple] = set()  # what has been called since its copies were made
        self.reads: dict[str, list[float]] = {str(t): [] for t in args.threads}
        self.reader = machine.Reader(args.rotate_mb)

    def open(self, sides: list[Side], threads: int) -> list[Side]:
        opened = []
        for side in sides:
            try:
                side.open(self.problem, side.copies(self.problem, self.args.rotate_mb), threads)
                opened.append(side)
            except Unavailable as why:
                self.skipped[side.name] = str(why)
        return opened

    def visit(self, side: Side, x: torch.Tensor, threads: int) -> None:
        """Check (the first time) and time one side with one x."""
        key = (side.name, threads, len(x))
        copies = side.copies(self.problem, self.args.rotate_mb)
        torch.set_num_threads(threads)
        x = x.to(side.act)
        try:
            call = side.bind(x)
            if key not in self.errors:
                result = side.read(call(0))
                weight = side.dequantized(self.problem.rows)
                self.errors[key] = None if weight is None else nrmse(result, x, weight, self.problem.rows)
            if side.warms_each_copy and key not in self.warm:
                self.warm.add(key)
                for i in range(copies):
                    call(i)
        except Exception as why:  # Why so wide: one side that fails must not cost the run of all the others.
            self.skipped[f"{side.name}, M={len(x)}, {threads} threads"] = f"{type(why).__name__}: {why}".splitlines()[0]
            return
        time.sleep(SETTLE_S)
        limits = {"seconds": self.args.seconds, "patience": self.args.patience}
        measured = timing.measure(call, copies, threads=threads, **limits)
        self.times.setdefault(key, []).append(measured.summary(threads))

    def measure(self, sides: list[Side]) -> None:
        groups = batches(sides, self.problem, self.args)
        inputs = [torch.randn(m, self.problem.k, generator=torch.Generator().manual_seed(m)) for m in self.args.m]
        for threads in self.args.threads:
            for turn in range(self.args.passes):
                for group in groups:
                    opened = self.open(group, threads)
                    for x in inputs:
                        progress(f"{threads} thread(s), pass {turn + 1}/{self.args.passes}, M={len(x)}")
                        rate = self.reader.gbs(threads)
                        self.reads[str(threads)] += [rate] if rate else []
                        for side in opened[:: -1 if turn % 2 else 1]:
                            self.visit(side, x, threads)
                    if len(groups) > 1:
                        self.warm.clear()
                        for side in opened:
                            side.close()
        for side in sides:
            side.close()

    def rows(self, sides: list[Side]) -> list[dict]:
        found = []
        for threads in self.args.threads:
            for side in sides:
                for m in self.args.m:
                    key = (side.name, threads, m)
                    if key not in self.times:
                        continue
                    row = timing.merge(self.times[key])
                    if row:
                        row["gbs"] = round(side.bytes(self.problem) / row["median_s"] / 1e9, 2)
                        row["gflops"] = round(2e-9 * m * self.problem.n * self.problem.k / row["median_s"], 1)
                    found.append({
                        "side": side.name, "bits": side.bits, "act": str(side.act).removeprefix("torch."),
                        "shape": [self.problem.n, self.problem.k], "m": m, "threads": threads,
                        "copies": side.copies(self.problem, self.args.rotate_mb),
                        "nrmse": self.errors[key], "timing": row,
                    })  # fmt: skip
        return found


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def command() -> str:
    """What was typed, with file names in place of paths: a result file tells nothing of folders."""
    given = [os.path.basename(a) if "/" in a else a for a in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/bench_cpu.py", *given])


def main(argv: list[str]) -> int:
    args = options(argv)
    begin = datetime.datetime.now(datetime.timezone.utc)
    device = machine.describe(args.threads)
    progress(f"{device['cpu']}, {device['clock_ghz']} GHz, DRAM read {device['dram_read_gbs']} GB/s by threads")
    try:
        sides, skipped = collect(args)
    except ValueError as why:
        print(f"bench_cpu.py: error: {why}", file=sys.stderr)
        return 2
    for name, why in skipped.items():
        progress(f"without {name}: {why}")
    if not sides:
        print("no side is left to time", file=sys.stderr)
        return 2
    rows, reads = [], {}
    with torch.inference_mode():
        for n, k in args.shapes:
            run = Run(Problem.make(n, k), args, skipped)
            run.measure(sides)
            rows += run.rows(sides)
            rates = reads[f"{n}x{k}"] = {t: report.spread(seen) for t, seen in run.reads.items()}
            for threads in args.threads:
                print(f"\n{report.table(rows, (n, k), threads, args.m)}")
                print(f"reading {args.rotate_mb} MB meanwhile, GB/s: {rates[str(threads)]}", flush=True)
    for name, why in skipped.items():
        print(f"without {name}: {why}")
    if args.out != "-":
        name = f"cpu_{begin:%Y%m%d_%H%M}.json"
        path = args.out or os.path.join(HERE, "results", args.device or machine.slug(device["cpu"]), name)
        record = {
            "format": 1, "command": command(), "date": begin.isoformat(timespec="seconds"),
            "versions": report.versions(sorted({s.version for s in sides if s.version})),
            "lowbit_isa": isa(), "machine": device, "read_gbs": reads,
            "filter": "schedstat" if timing.counts_delay() else "none",
            "method": {n: getattr(args, n) for n in ("rotate_mb", "passes", "seconds", "group")},
            "skipped": skipped, "rows": rows,
        }  # fmt: skip
        report.write(path, record)
        print(f"written: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
