"""Times builds of lowbit's CUDA library in turns: what a change to a kernel gains.

    python benchmarks/bench_builds.py before=../before/lowbit/lib after=lowbit/lib --types int4,int8 --ms 8,32,64
    python benchmarks/bench_builds.py a=a b=b --tiles gemm_sm90_n32,gemm_sm90_n64 --places 5

A build is a folder such as lowbit/lib, with both libraries and manifest.json; all are driven by this checkout's
Python. Each runs in processes of its own, once forward and once backward in every two rounds. Products are verified,
then timed with their weights in several places of memory. Why: two libraries whose kernels were the same took times 6%
apart, each the same time in every process, as if where weights lie decided (docs/notes/gemm-sm90.md, "Next").

The result has the keys of other benchmarks on a GPU, ``builds`` (the digest of each CUDA library) and ``rows``, [build,
round, weight, N, K, rows of x, tile or null, place, us]. What is printed is the mean over places of the least of all
rounds that every build has finished; products that a build lacks are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import gpu_timing  # noqa: E402
import matmul_report as report  # noqa: E402
import peers_gpu  # noqa: E402
import torch  # noqa: E402
from gpu_record import Record  # noqa: E402
from peers_gpu.lowbit_side import LowbitSide  # noqa: E402
from peers_gpu.side import Unavailable, error, exact_product  # noqa: E402

from lowbit import extension, kernel_list, libraries  # noqa: E402

PLACE_BYTES = 54 << 20  # that lie before weights of each further place; no power of two
TRIALS = 5

Product = tuple[str, int, int, int, "str | None"]  # weight, N, K, rows of x, tile


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("builds", nargs="*", help="NAME=FOLDER, the first one is what others are compared with")
    add("--types", type=report.names, default=["int4"], help="weight types (int4)")
    add("--shapes", type=report.shapes, default=[(8192, 8192)], help="N x K, comma-separated, or targets, or models")
    add("--ms", type=report.numbers, default=[1, 8, 16], help="rows of x (1,8,16)")
    add("--tiles", type=report.names, default=[None], help="kernels to force, where they hold the rows (the plan's)")
    add("--act", choices=("float16", "bfloat16"), default="float16", help="type of x (float16)")
    add("--group", type=int, default=128, help="group size (128)")
    add("--places", type=int, default=3, help="places of each weight (3)")
    add("--rounds", type=int, default=4, help="times that each build runs (4)")
    add("--least-ms", type=float, default=5, help=f"ms of replays in each of {TRIALS} trials (5)")
    add("--deadline", type=float, default=math.inf, help="seconds after which no build runs again")
    add("--device", help="folder under benchmarks/results (from the device's name)")
    add("--out", help="result file (benchmarks/results/<device>/builds_<date>.json); '-' for none")
    add("--dry", action="store_true", help="on the CPU, where the times say nothing: to try the options")
    add("--run", help=argparse.SUPPRESS)  # the folder of the one build that this process times
    args = parser.parse_args(argv)
    if args.run is None:
        found = folders(args.builds)
        if len(args.builds) < 2 or len(found) < len(args.builds) or "" in found:
            parser.error(
                f"expected two builds or more, each another NAME=FOLDER, got {' '.join(args.builds) or 'none'}"
            )
    if min(args.places, args.rounds) < 1:
        parser.error("--places and --rounds must be at least 1")
    return args


def folders(builds: list[str]) -> dict[str, str]:
    """The folder of each name; what is no NAME=FOLDER is left out."""
    pairs = [build.split("=", 1) for build in builds if not build.endswith("=") and "=" in build]
    return {name: str(Path(folder).resolve()) for name, folder in pairs}


# ---- one build, in a process of its own ------------------------------------------------------------------------------
def run(args: argparse.Namespace) -> list[list]:
    """[weight, N, K, rows of x, tile, place, us] of this build. Raises AssertionError for a wrong answer."""
    if not args.dry:
        folder = Path(args.run)
        assert not extension.is_loaded(), "the libraries of this checkout are loaded: they would be timed as the build"
        libraries.LIBRARY, libraries.CUDA_LIBRARY = (
            folder / libraries.LIBRARY.name,
            folder / libraries.CUDA_LIBRARY.name,
        )
        kernel_list.MANIFEST = folder / kernel_list.MANIFEST.name
    device, cache = ("cpu", 0) if args.dry else ("cuda", gpu_timing.cache_bytes())
    rows = []
    for n, k in args.shapes:
        for place in range(args.places):
            before = torch.empty(place * PLACE_BYTES, dtype=torch.uint8, device=device)
            problem = peers_gpu.Problem.make(
                n, k, device, lambda nbytes: 2 if args.dry else gpu_timing.copies_for(nbytes, cache)
            )
            for dtype in args.types:
                for tile in args.tiles:
                    rows += [[dtype, n, k, m, tile, place, us] for m, us in times(args, problem, dtype, tile)]
            del problem, before
            if not args.dry:
                torch.cuda.empty_cache()  # or the next weights would lie where these did
    return rows


def times(args: argparse.Namespace, problem: peers_gpu.Problem, dtype: str, tile: str | None):
    """(rows of x, us) of each number of rows that the tile, or any, serves; none where the build has no such kernel."""
    # Why here: it loads the libraries, which the build's own are to be.
    from lowbit.commands.selftest import TOLERANCE

    side = LowbitSide(dtype, args.act, args.group, tile=tile)
    try:
        ready = side.open(problem)
    except Unavailable:
        return
    for m in filter(side.serves, args.ms):
        x = torch.randn(m, problem.k, device=problem.weight.device).to(side.x_type)
        wrong = error(ready.calls[0](x), exact_product(x, ready.reference))
        if not wrong <= TOLERANCE[args.act]:
            raise AssertionError(f"{side.name} {problem.n} x {problem.k}, {m} rows: off by {wrong}")
        turns = [lambda call=call, x=x: call(x) for call in ready.calls]
        timing = (gpu_timing.host_us if args.dry else gpu_timing.graph_us)(turns, args.least_ms, TRIALS)
        if timing.how not in ("graph", "host"):
            raise AssertionError(f"{side.name}: no graph can be made of it: {timing.how}")
        yield m, round(timing.us, 3)


# ---- all of them, in turns -------------------------------------------------------------------------------------------
def in_turns(builds: dict[str, str], argv: list[str], rounds: int, late) -> tuple[list[list], dict[str, str]]:
    """Rows of every run of every build, and why for those that failed, which do not run again."""
    rows, failed = [], {}
    for turn in range(rounds):
        for name, folder in list(builds.items())[:: -1 if turn % 2 else 1]:
            if name in failed or late():
                continue
            one = [sys.executable, os.path.abspath(__file__), "--run", folder, *argv]
            done = subprocess.run(one, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                failed[name] = f"exit status {done.returncode}"
            else:
                rows += [[name, turn, *row] for row in json.loads(done.stdout.splitlines()[-1])]
    return rows, failed


def means(rows: list[list]) -> dict[Product, dict[str, tuple[float, float]]]:
    """By product and build: the mean over places of the least of all rounds, and how far places lie apart, of it. Of
    rounds those that all builds have finished: who ran more often would seem faster."""
    names = {row[0] for row in rows}
    rounds = set.intersection(*({row[1] for row in rows if row[0] == name} for name in names)) if rows else set()
    least: dict[Product, dict[str, dict[int, float]]] = {}
    for name, turn, *product, place, us in rows:
        if turn not in rounds:
            continue
        places = least.setdefault(tuple(product), {}).setdefault(name, {})
        places[place] = min(us, places.get(place, us))
    found = {}
    for product, builds in least.items():
        found[product] = {}
        for name, places in builds.items():
            mean = sum(places.values()) / len(places)
            found[product][name] = mean, (max(places.values()) - min(places.values())) / mean
    return found


def lines(rows: list[list], first: str):
    """A line a product, then what each other build takes more or less than ``first``, by tile and rows of x."""
    found, ratios = means(rows), {}
    for (dtype, n, k, m, tile), builds in found.items():
        if first not in builds or len(builds) < len({row[0] for row in rows}):
            continue
        us, apart = builds[first]
        texts = [f"{dtype} {n}x{k} {m} rows {tile or 'plan'}: {us:.2f} us, places {apart:.1%} apart"]
        for name, (other, _) in builds.items():
            if name != first:
                texts.append(f"{name} {other / us - 1:+.1%}")
                ratios.setdefault((name, tile or "plan", m), []).append(math.log(other / us))
        yield "; ".join(texts)
    for (name, tile, m), logs in sorted(ratios.items()):
        worst, best = (math.exp(f(logs)) - 1 for f in (max, min))
        yield f"{name} {tile} {m} rows: {math.exp(sum(logs) / len(logs)) - 1:+.2%} ({best:+.1%} to {worst:+.1%})"


def main(argv: list[str]) -> int:
    args = options(argv)
    if args.run is not None:
        with torch.inference_mode():
            print(json.dumps(run(args)))
        return 0
    if not args.dry and not torch.cuda.is_available():
        print("bench_builds.py: error: needs a CUDA device; --dry tries the options on the CPU", file=sys.stderr)
        return 2
    record, builds = Record(__file__, argv), folders(args.builds)
    given = [text for text in argv if text not in (*args.builds, "--")]
    rows, failed = in_turns(builds, given, args.rounds, lambda: record.seconds > args.deadline)
    found = list(lines(rows, next(iter(builds))))
    print("\n".join(found))
    for name, why in failed.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    if not found:
        print("nothing was timed by all builds", file=sys.stderr)
    how = {name: getattr(args, name) for name in ("act", "group", "places", "least_ms")}
    digests = {name: digest(folder) for name, folder in builds.items()}
    record.keep(args, method=how, builds=digests, failed=failed, rows=rows)
    return 1 if failed or not found else 0


def digest(folder: str) -> str | None:
    """Of a build's CUDA library; None where it has none."""
    library = Path(folder) / libraries.CUDA_LIBRARY.name
    return hashlib.sha256(library.read_bytes()).hexdigest() if library.is_file() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
