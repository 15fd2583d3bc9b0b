"""Times every tile of families decode (up to 4 tokens) and gemm_sm90 that may be worth it for some shapes and numbers
of rows of x, and of those of more than 16 tokens every kind of blocks: what fit_tile_costs.py makes the constants of
csrc/cuda/tile_costs.h from.

    python benchmarks/sweep_tiles.py --types int4,uint4/64,float8_e4m3

Each answer is verified before it is timed; the ways of a product are timed in turns, in random order. The result has
the keys of other benchmarks on a GPU; ``rows`` are [weight, N, K, M, tile, split, us]: weight with its group after a
slash unless that is 128, tile 0 for what the plan chooses, split null for what it has for the tile.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable

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

from lowbit import extension  # noqa: E402
from lowbit.commands.selftest import TOLERANCE  # noqa: E402

TILES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 144, 160, 192, 208, 256)
ROWS = (1, 2, 4, 5, 8, 9, 13, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 200, 256, 384, 512, 1000, 2048, 8192)
FEW = 16  # rows of x, for which split.h chooses how a tile's blocks share K (sweep_splits.py)

Split = tuple[int, int, int, int, int, int]  # row_tiles, parts, blocks, early, warps, next_after
Way = tuple[int, "Split | None"]  # tile, and how its blocks share a product


def worth_timing(tile: int, m: int, n: int) -> bool:
    """Whether a tile is near the fastest one for m rows of x; of few rows of W several smaller ones are."""
    ranges = {0: (1, 1 << 30), 1: (1, 1), 2: (1, 2), 4: (1, 4)}
    ranges |= {8: (1, 8), 16: (5, 16), 32: (1, 96), 48: (25, 128), 64: (9, 256), 96: (41, 384), 128: (48, 1000)}
    ranges |= {144: (97, 2048), 160: (97, 2048), 192: (129, 2048), 208: (161, 2048), 256: (161, 1 << 30)}
    least, most = ranges[tile]
    return least <= m <= most * (4 if 16 < tile < 128 and n <= 2048 else 1)


#: Of whole multiprocessors, one to four of which share a task left over, or a second kernel adds up sums; of half of
#: one; of 64 rows, by two warpgroups that share K.
BLOCKS = {"whole": [(8, 1, blocks, 1, 16, 0) for blocks in (1, 2, 3, 4)],
          "halves": [(8, 1, blocks, 2, 8, 4) for blocks in (1, 2, 4)],
          "rows": [(4, 2, blocks, 1, 16, 0) for blocks in (1, 2)]}  # fmt: skip


def splits_of(tile: int, kinds: list[str]) -> list[Split | None]:
    """Those of a tile among some kinds of BLOCKS."""
    if not 16 < tile <= 128:
        return [None]
    of_tile = {"whole"} | ({"halves"} if tile in (32, 64) else set()) | ({"rows"} if tile <= 96 else set())
    return [split for kind in kinds if kind in of_tile for split in BLOCKS[kind]]


class Product:
    """One weight, kept by its problem, and rows of x. Its ways, each verified: name -> a graph of all copies."""

    def __init__(self, spec: str, problem: peers_gpu.Problem, m: int, act: str):
        self.dtype, _, group = spec.partition("/")
        self.problem, self.act, self.group = problem, act, int(group or 128)
        plain = LowbitSide(self.dtype, act, self.group).open(problem)
        self.x = torch.randn(m, problem.weight.shape[1], device="cuda").to(getattr(torch, act))
        self.exact, self.copies = exact_product(self.x, plain.reference), len(plain.calls)
        self.stream, self.ways = torch.cuda.Stream(), {}

    def add(self, way: Way) -> None:
        """Verify and prepare one way, unless no kernel can do it."""
        tile, split = way
        try:
            side = LowbitSide(self.dtype, self.act, self.group, tile=f"n{tile}" if tile else None)
            calls = side.open(self.problem).calls
            with extension.force_cuda_split(*split) if split else contextlib.nullcontext():
                wrong = error(calls[0](self.x), self.exact)
                if not wrong <= 2 * TOLERANCE[self.act]:
                    raise AssertionError(f"{self.dtype} {tuple(self.x.shape)} {way}: off by {wrong}")
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    turns: list[Callable] = [lambda call=call: call(self.x) for call in calls]
                    self.ways[way] = gpu_timing.all_at_once(turns)[0]
        except Unavailable:
            return
        except RuntimeError as why:
            if "can't hold" not in str(why):
                raise

    def times(self, least_ms: float, heat_ms: float, far: float) -> dict[Way, float]:
        """Microseconds of each way, but of those that take ``far`` times as long as the fastest one in a first turn."""
        with torch.cuda.stream(self.stream):
            if far < math.inf:
                cold = {way: ms[0] for way, ms in gpu_timing.in_turns(self.ways, least_ms, 1).items()}
                limit = far * min(cold.values())
                self.ways = {way: run for way, run in self.ways.items() if not way[0] or cold[way] < limit}
            found = gpu_timing.in_turns(self.ways, least_ms, 4, heat_ms)
        return {way: gpu_timing.summary(ms, self.copies, "graph").us for way, ms in found.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="int4", help="weight types, with a group after a slash unless 128 (int4)")
    parser.add_argument("--act", default="float16", help="type of x (float16)")
    parser.add_argument("--shapes", help="N x K, comma-separated (the shapes of layers, and of the targets)")
    parser.add_argument("--rows", help="rows of x, comma-separated")
    parser.add_argument("--tiles", help="tokens of tiles, comma-separated (all)")
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="kinds of blocks (%(default)s)")
    parser.add_argument("--least-ms", type=float, default=2, help="ms of replays in each of 4 turns (2)")
    parser.add_argument("--heat-ms", type=float, default=20, help="ms before each turn from 96 rows on (20)")
    parser.add_argument("--far", type=float, default=math.inf, help="times as long as the fastest: not timed (inf)")
    parser.add_argument("--deadline", type=float, default=600, help="seconds after which nothing new is begun")
    parser.add_argument("--device", help="folder under benchmarks/results (from the device's name)")
    parser.add_argument("--out", help="result file (benchmarks/results/<device>/sweep_tiles_<date>.json)")
    args = parser.parse_args(argv)
    shapes = report.shapes(args.shapes) if args.shapes else report.SHAPES["models"] + report.SHAPES["targets"]
    ms = tuple(map(int, args.rows.split(","))) if args.rows else ROWS
    tiles = (0, *map(int, args.tiles.split(","))) if args.tiles else (0, *TILES)
    kinds = args.blocks.split(",")
    rows, record, cache = [], Record(__file__, argv), gpu_timing.cache_bytes()
    behind: dict[str, list[float]] = defaultdict(list)
    with torch.inference_mode():
        for n, k in shapes:
            problem = peers_gpu.Problem.make(n, k, "cuda", lambda nbytes: gpu_timing.copies_for(nbytes, cache))
            for spec, m in itertools.product(args.types.split(","), ms):
                if record.seconds > args.deadline:
                    continue
                product = Product(spec, problem, m, args.act)
                for tile in (tile for tile in tiles if worth_timing(tile, m, n)):
                    for split in splits_of(tile, kinds) if m > FEW and tile else [None]:
                        product.add((tile, split))
                found = product.times(args.least_ms, args.heat_ms if m >= 96 else 0, args.far)
                rows += [[spec, n, k, m, tile, split, round(us, 3)] for (tile, split), us in found.items()]
                behind[spec].append(found[0, None] / min(found.values()) - 1)
            torch.cuda.empty_cache()
            print(f"{n}x{k}: {len(rows)} times, {record.seconds:.0f} s", file=sys.stderr, flush=True)
    for spec, lost in behind.items():
        print(f"{spec}: the plan's choice is {sum(lost) / len(lost):.1%} behind the fastest, {max(lost):.0%} at worst")
    record.keep(args, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
