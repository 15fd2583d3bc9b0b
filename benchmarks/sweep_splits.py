"""Times the ways in which kernels for few rows of x may share K (``struct Split`` of csrc/args.h), beside the plan's:
n8 and n16 of family gemm_sm90, n1, n2 and n4 of decode. What the rules of csrc/cuda/split.h and
csrc/templates/decode/spread.cuh are made from; of more rows sweep_tiles.py does so.

    python benchmarks/sweep_splits.py --types int2,int4,int8 --tiles 8,16 --shapes 8192x8192,4096x4096

Each answer is verified before it is timed. The result has the keys of other benchmarks on a GPU; ``rows`` are [weight,
N, K, tile, split, us], split null for the plan's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from peers_gpu.side import error, exact_product  # noqa: E402

from lowbit import extension  # noqa: E402
from lowbit.autotune.plan import device_of  # noqa: E402
from lowbit.commands.selftest import TOLERANCE  # noqa: E402

Split = tuple[int, int, int, int, int, int]  # row_tiles, parts, blocks, early, warps, next_after


def splits_of_few_rows(row_tiles: int, blocks: int, pairs: int) -> list[Split]:
    """For n8 and n16: parts for a second kernel, whole tasks in two or three rounds, then tasks that fill a device of
    so many blocks and pairs of them, in blocks of 16 warps and of 8, with all warps that there are and with half of
    those that share K."""
    found = [(16, 1, 1, early, 16, 0) for early in (1, 2, 3)]
    for rounds in (2, 3):
        rows = -(-row_tiles // (rounds * blocks))
        if rows <= 16:
            found += [(rows, 1, 1, early, 16, 0) for early in (1, 2, 3)]
    for warps in (16, 8):
        ways = [(early, 0) for early in (1, 2, 3)] if warps == 16 else list(itertools.product((1, 2, 3), (1, 4, 6, 8)))
        for together, most in ((2, pairs), (1, blocks)):
            least = -(-row_tiles // most)
            least += least % together
            for rows in (least, least + together):
                if rows > warps:
                    continue
                parts = warps // rows
                chosen = ways if rows == least else [(2, 0 if warps == 16 else 6)]
                found += [(rows, parts, together, early, warps, after) for early, after in chosen]
                if parts > 2 and rows == least:
                    found.append((rows, parts // 2, together, 2, warps, 0 if warps == 16 else 6))
    return list(dict.fromkeys(found))


def splits_of_decode() -> list[Split]:
    """Row groups by warps of each, in half of a multiprocessor and in all of it, one to eight blocks."""
    few = {8: [(1, 0), (2, 0), (4, 0), (2, 5), (2, 7)], 16: [(1, 0), (2, 0)]}
    return [
        (warps // parts, parts, blocks, early, warps, after)
        for warps in (8, 16)
        for parts in (warps, warps // 2, warps // 4, warps // 8)
        for blocks in (1, 2, 4, 8)
        for early, after in ([(2, 8)] if warps == 8 and blocks > 2 else few[warps])
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="int4", help="weight types (int4)")
    parser.add_argument("--shapes", default="8192x8192", help="N x K, comma-separated (8192x8192)")
    parser.add_argument("--tiles", default="8,16", help="tokens of tiles, 16 at most, and rows of x (8,16)")
    parser.add_argument("--least-ms", type=float, default=2, help="ms of replays in each of 5 trials (2)")
    parser.add_argument("--deadline", type=float, default=600, help="seconds after which nothing new is begun")
    parser.add_argument("--device", help="folder under benchmarks/results (from the device's name)")
    parser.add_argument("--out", help="result file (benchmarks/results/<device>/sweep_splits_<date>.json)")
    args = parser.parse_args(argv)
    rows, record, cache = [], Record(__file__, argv), gpu_timing.cache_bytes()
    device = device_of(torch.cuda.current_device())
    with torch.inference_mode():
        for n, k in report.shapes(args.shapes):
            problem = peers_gpu.Problem.make(n, k, "cuda", lambda nbytes: gpu_timing.copies_for(nbytes, cache))
            for dtype in args.types.split(","):
                for tile in map(int, args.tiles.split(",")):
                    family = "gemm_sm90" if tile >= 8 else "decode"
                    ready = LowbitSide(dtype, "float16", 128, tile=f"{family}_n{tile}").open(problem)
                    x = torch.randn(tile, k, device="cuda").half()
                    exact = exact_product(x, ready.reference)
                    splits = splits_of_decode()
                    if tile >= 8:
                        splits = splits_of_few_rows(-(-n // 16), device.blocks, device.pairs)
                    for split in [None, *splits]:
                        if record.seconds > args.deadline:
                            continue
                        with extension.force_cuda_split(*split) if split else contextlib.nullcontext():
                            try:
                                wrong = error(ready.calls[0](x), exact)
                            except RuntimeError as why:
                                if "can't hold" in str(why):
                                    continue
                                raise
                            if not wrong <= TOLERANCE["float16"]:
                                raise AssertionError(f"{dtype} {n}x{k} n{tile} {split}: off by {wrong}")
                            turns = [lambda call=call, x=x: call(x) for call in ready.calls]
                            us = gpu_timing.graph_us(turns, args.least_ms, 5).us
                        rows.append([dtype, n, k, tile, split, round(us, 3)])
                    print(line(rows, dtype, n, k, tile), flush=True)
            torch.cuda.empty_cache()
    record.keep(args, rows=rows)
    return 0


def line(rows: list, *product) -> str:
    """What a product took by the plan, and the fastest splits."""
    found = sorted((us, split) for *of, split, us in rows if tuple(of) == product and split)
    plan = [us for *of, split, us in rows if tuple(of) == product and split is None]
    best = ", ".join(f"{' x '.join(map(str, split))} {us:.2f}" for us, split in found[:4])
    return f"{product[0]} {product[1]}x{product[2]} n{product[3]}: plan {plan}, {best}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
