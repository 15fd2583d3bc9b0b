"""Times every tile of families decode (up to 4 tokens) and gemm_sm90 that may be worth it for some shapes and numbers
of rows of x: what fit_tile_costs.py makes the constants of csrc/cuda/tile_costs.h from.

    python benchmarks/sweep_tiles.py --types int4

The result has the keys of other benchmarks on a GPU; ``rows`` are [weight, N, K, M, tile, us].
"""

from __future__ import annotations

import argparse
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import gpu_timing  # noqa: E402
import matmul_report as report  # noqa: E402
import peers_gpu  # noqa: E402
import torch  # noqa: E402
from gpu_record import Record  # noqa: E402
from peers_gpu.lowbit_side import LowbitSide  # noqa: E402
from peers_gpu.side import Unavailable  # noqa: E402

TILES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 144, 160, 192, 208, 256)
ROWS = (1, 2, 4, 5, 8, 9, 13, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 200, 256, 384, 512, 1000, 2048, 8192)


def worth_timing(tile: int, m: int) -> bool:
    """Whether a tile is near the fastest one for m rows of x."""
    ranges = {1: (1, 1), 2: (1, 2), 4: (1, 4)}
    ranges |= {8: (1, 8), 16: (5, 16), 32: (1, 64), 48: (25, 96), 64: (9, 256), 96: (41, 384), 128: (48, 1000)}
    ranges |= {144: (97, 2048), 160: (97, 2048), 192: (129, 2048), 208: (161, 2048), 256: (161, 1 << 30)}
    least, most = ranges[tile]
    return least <= m <= most


def holds(call, x) -> bool:
    """Whether a kernel of family decode, which keeps x in shared memory, takes as many rows of x."""
    try:
        call(x)
    except RuntimeError as why:
        if "can't hold" in str(why):
            return False
        raise
    return True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="int4", help="weight types (int4)")
    parser.add_argument("--shapes", help="N x K, comma-separated (the shapes of layers, and of the targets)")
    parser.add_argument("--rows", help="rows of x, comma-separated")
    parser.add_argument("--tiles", help="tokens of tiles, comma-separated (all)")
    parser.add_argument("--least-ms", type=float, default=3, help="ms of replays in each of 5 trials (3)")
    parser.add_argument("--heat-ms", type=float, default=60, help="ms of work before products of 96 rows and more (60)")
    parser.add_argument("--deadline", type=float, default=600, help="seconds after which nothing new is begun")
    parser.add_argument("--device", help="folder under benchmarks/results (from the device's name)")
    parser.add_argument("--out", help="result file (benchmarks/results/<device>/sweep_tiles_<date>.json)")
    args = parser.parse_args(argv)
    shapes = report.SHAPES["models"] + report.SHAPES["targets"]
    if args.shapes:
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    ms = tuple(map(int, args.rows.split(","))) if args.rows else ROWS
    tiles = tuple(map(int, args.tiles.split(","))) if args.tiles else TILES
    rows, record, cache = [], Record(__file__, argv), gpu_timing.cache_bytes()
    with torch.inference_mode():
        for n, k in shapes:
            problem = peers_gpu.Problem.make(n, k, "cuda", lambda nbytes: gpu_timing.copies_for(nbytes, cache))
            tokens = torch.randn(max(ms), k, device="cuda").half()
            for dtype in args.types.split(","):
                for tile in tiles:
                    if record.seconds > args.deadline:
                        continue
                    try:
                        calls = LowbitSide(dtype, "float16", 128, tile=f"n{tile}").open(problem).calls
                        calls[0](tokens[:1])
                    except (Unavailable, RuntimeError) as why:
                        print(f"{dtype} {n}x{k} n{tile}: {why}".splitlines()[0], file=sys.stderr)
                        continue
                    for m in (m for m in ms if worth_timing(tile, m)):
                        if tile <= 4 and not holds(calls[0], tokens[:m]):
                            continue
                        x, some = tokens[:m], calls if m < 1000 else calls[:4]  # the weight is no longer what counts
                        heat = args.heat_ms if m >= 96 else 0
                        turns = [lambda call=call, x=x: call(x) for call in some]
                        us = gpu_timing.graph_us(turns, args.least_ms, 5, heat).us
                        rows.append([dtype, n, k, m, tile, round(us, 3)])
            torch.cuda.empty_cache()
            print(f"{n}x{k}: {len(rows)} products, {record.seconds:.0f} s", file=sys.stderr, flush=True)
    record.keep(args, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
