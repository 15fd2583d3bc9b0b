"""lowbit on a GPU beside its peers, in one run: y[M, N] = x[M, K] W[N, K]^T with weights of few bits.

    python benchmarks/bench_matmul.py --targets
    python benchmarks/bench_matmul.py --shapes models --ms 1,2,4,8,13,16 --types int4 --peers cublas,marlin,machete
    python benchmarks/plot_matmul.py benchmarks/results/nvidia-h200/matmul_20261121_1200.json

Each answer is verified before it is timed, all sides in turns, in random order. benchmarks/README.md says how and what
the result file holds.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from typing import NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import gpu_timing  # noqa: E402
import matmul_report as report  # noqa: E402
import peers_gpu  # noqa: E402
import torch  # noqa: E402
from gpu_record import Record  # noqa: E402
from peers_gpu.side import error, exact_product  # noqa: E402

from lowbit.commands.selftest import TOLERANCE  # noqa: E402
from lowbit.dtypes import WEIGHT_TYPES  # noqa: E402
from lowbit.errors import LowbitError  # noqa: E402
from lowbit.scheme import SCALE_TYPES  # noqa: E402

ROUNDS, HOT_ROUNDS = 7, 2  # of turns that are kept; of products that have heat
HOT_ROWS = 96  # from here on power limits products


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--targets", action="store_true", help="the types, shapes and M of the table of targets, and that table")
    add("--types", type=report.names, default=["int4"], help="lowbit's weight types, or all (int4)")
    add("--acts", type=report.names, default=["float16"], help="types of x: float16, bfloat16 (float16)")
    add(
        "--shapes",
        type=report.shapes,
        default=[(8192, 8192)],
        help="N x K, or targets, or models, the shapes of layers",
    )
    add("--ms", type=report.numbers, default=[1, 8, 16], help="rows of x (1,8,16)")
    add("--group", type=int, default=128, help="group size (128)")
    add("--zeros", choices=("zero", "min"), help="zero kind of uint types (zero)")
    add("--scales", choices=SCALE_TYPES, help="type of lowbit's scales (that of x)")
    add(
        "--tiles",
        type=report.names,
        default=[None],
        help="kernels to force, such as n1,gemm_sm80_n32 (lowbit's choice)",
    )
    add("--peers", type=report.names, default=[], help=f"{', '.join(peers_gpu.PEERS)}, or all (none)")
    add("--deadline", type=float, default=math.inf, help="seconds after which nothing new is begun")
    add("--least-ms", type=float, default=15, help="ms of replays of each side in each round (15)")
    add(
        "--heat-ms",
        type=float,
        default=200,
        help="ms of replays of a side before each of its turns, for products of 96 rows and more (200)",
    )
    add("--device", help="folder under benchmarks/results (from the device's name)")
    add("--out", help="result file (benchmarks/results/<device>/matmul_<date>.json); '-' for none")
    add("--dry", action="store_true", help="on the CPU, where the times say nothing: to try the options")
    if "--targets" in argv:
        types, ms = [f"int{bits}" for bits in report.TARGET_BITS], sorted({m for _, m in report.TARGETS})
        parser.set_defaults(types=types, shapes=report.SHAPES["targets"], ms=ms)
    args = parser.parse_args(argv)
    args.types = [t.name for t in WEIGHT_TYPES] if args.types == ["all"] else args.types
    args.peers = list(peers_gpu.PEERS) if args.peers == ["all"] else args.peers
    for what, given, known in (("acts", args.acts, ("float16", "bfloat16")), ("peers", args.peers, peers_gpu.PEERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"--{what} must be of {', '.join(known)}, got {', '.join(unknown)}")
    if any(len(shape) != 2 or min(shape) < 1 for shape in args.shapes) or min(args.ms) < 1:
        parser.error("--shapes must be pairs of sizes such as 4096x4096, and --ms numbers from 1")
    return args


class Opened(NamedTuple):
    """A side with its copies of a weight; ``exact``: y of all rows of x in float64, where that is known."""

    side: peers_gpu.Side
    ready: peers_gpu.Ready
    x: torch.Tensor
    exact: torch.Tensor | None

    def largest_error(self, m: int, x: torch.Tensor) -> float | None:
        """The larger one of the products of the first m rows with the first and the last copy of the weight."""
        if self.exact is None:
            return None
        return max(error(self.ready.calls[i](x), self.exact[:m]) for i in (0, -1))


class Run:
    """What has been measured so far, and what was left out."""

    def __init__(self, args, begin: float):
        self.args, self.begin = args, begin
        self.device = "cpu" if args.dry else "cuda"
        self.rows: list[dict] = []
        self.skipped: dict[str, str] = {}

    def late(self) -> bool:
        return time.monotonic() - self.begin > self.args.deadline

    @contextlib.contextmanager
    def spared(self, where: str):
        """What fails is left out. Why so wide: one side that fails must not cost the run of all the others."""
        try:
            yield
        except Exception as why:
            self.skipped.setdefault(where, f"{type(why).__name__}: {why}".splitlines()[0])

    def shape(self, n: int, k: int, sides: list) -> None:
        if self.late():
            self.skipped |= {f"{side.name} {side.act} {n}x{k}": "the deadline had passed" for side in sides}
            return
        cache, start = 0 if self.args.dry else gpu_timing.cache_bytes(), time.monotonic()
        problem = peers_gpu.Problem.make(
            n, k, self.device, lambda nbytes: 2 if self.args.dry else gpu_timing.copies_for(nbytes, cache)
        )
        generator = torch.Generator(device=self.device).manual_seed(1)
        tokens = torch.randn(max(self.args.ms), k, generator=generator, device=self.device)
        opened = []
        for side in sides:
            with self.spared(f"{side.name} {side.act} {n}x{k}"):
                ready, x = side.open(problem), tokens.to(side.x_type)
                exact = None if ready.reference is None else exact_product(x, ready.reference)
                opened.append(Opened(side, ready, x, exact))
        for m in self.args.ms:
            if self.late():
                self.skipped[f"{n}x{k} M={m}"] = "the deadline had passed"
                continue
            self.products(problem, m, [one for one in opened if one.side.serves(m)])
        for side in sides:
            where = f"{side.name} {side.act} {n}x{k}"
            progress(f"{where}: {report.line(self.rows, side.name, side.act, (n, k)) or self.skipped.get(where, '')}")
        progress(f"{n}x{k}: {time.monotonic() - start:.1f} s")

    def products(self, problem, m: int, opened: list[Opened]) -> None:
        """Verifies the products of all sides with m rows of x, then times them in turns."""
        errors, ready_to_time = {}, {}
        with contextlib.nullcontext() if self.args.dry else on_a_stream():
            for one in opened:
                with self.spared(f"{one.side.name} {one.side.act} {problem.n}x{problem.k}"):
                    x = one.x[:m].contiguous()
                    one.ready.prepare(x)
                    found = one.largest_error(m, x)
                    # Why not timed if it is wrong: its time means nothing.
                    if not one.side.judged or found <= TOLERANCE[one.side.act]:
                        calls = [lambda call=call, x=x: call(x) for call in one.ready.calls]
                        dry = (gpu_timing.loop_of(calls), "host")
                        ready_to_time[one.side] = dry if self.args.dry else gpu_timing.all_at_once(calls)
                    errors[one.side] = found
            hot = m >= HOT_ROWS and self.args.heat_ms > 0 and not self.args.dry
            times = gpu_timing.in_turns(
                {side: once for side, (once, _) in ready_to_time.items()},
                self.args.least_ms,
                HOT_ROUNDS if hot else ROUNDS,
                self.args.heat_ms if hot else 0,
                gpu_timing.host_stopwatch if self.args.dry else gpu_timing.stopwatch,
            )
        for one in (one for one in opened if one.side in errors):
            timing, calls = None, len(one.ready.calls)
            if one.side in times:
                timing = gpu_timing.summary(times[one.side], calls, ready_to_time[one.side][1])
            self.rows.append(row_of(one, problem, m, errors[one.side], timing))


def on_a_stream():
    """A stream of its own, which graphs need, after what the one before has begun."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def row_of(one: Opened, problem, m: int, found: float | None, timing: gpu_timing.Timing | None) -> dict:
    """A row of the result file; without a timing where the answer is wrong."""
    side, moved = one.side, one.ready.nbytes + m * (problem.n + problem.k) * one.x.element_size()
    return {
        "side": side.name, "family": side.family, "weight": side.dtype, "bits": side.bits, "act": side.act,
        "tile": side.variant, "shape": [problem.n, problem.k], "m": m, "group": side.group,
        "zeros": getattr(side, "zeros", None), "copies": len(one.ready.calls), "bytes": moved, "err": found,
        "wrong": timing is None, "us": timing and round(timing.us, 3), "least_us": timing and round(timing.least, 3),
        "most_us": timing and round(timing.most, 3), "how": timing and timing.how,
        "tbs": timing and round(moved / timing.us * 1e-6, 3),
    }  # fmt: skip


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    args, record = options(argv), Record(__file__, argv)
    if not args.dry and not torch.cuda.is_available():
        print("bench_matmul.py: error: needs a CUDA device; --dry tries the options on the CPU", file=sys.stderr)
        return 2
    run = Run(args, record.begin)
    try:
        sides, run.skipped = peers_gpu.collect(
            args.types, args.acts, args.group, args.zeros, args.tiles, args.peers, args.scales
        )
    except LowbitError as why:
        print(f"bench_matmul.py: error: {why}", file=sys.stderr)
        return 2
    with torch.inference_mode():
        for n, k in args.shapes:
            run.shape(n, k, sides)
            if not args.dry:
                torch.cuda.empty_cache()
    print(report.everything(run.rows, run.skipped, args.targets))
    method = {name: getattr(args, name) for name in ("group", "zeros", "scales", "least_ms", "heat_ms")}
    method |= {"rounds": ROUNDS, "hot_rounds": HOT_ROUNDS, "hot_rows": HOT_ROWS}
    record.keep(args, method=method, skipped=run.skipped, rows=run.rows)
    return 1 if any(row["wrong"] for row in run.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
