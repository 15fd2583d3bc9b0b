"""Times the ways in which kernels for few rows of x may share K (``struct Split`` of csrc/args.h), beside the plan's:
n8 and n16 of family gemm_sm90, n1, n2 and n4 of decode. What the rules of csrc/cuda/split.h and
csrc/templates/decode/spread.cuh are made from; of more rows sweep_tiles.py does so.

    python benchmarks/sweep_splits.py --types int2,int4,int8 --tiles 8,16 --shapes 8192x8192,4096x4096
    python benchmarks/sweep_splits.py --types uint4:64:min,float4_e2m1:32,codebook4:64 --rows 1,2,4,8,16 --once

Each answer is verified before it is timed. The result has the keys of other benchmarks on a GPU; ``rows`` are [weight,
N, K, tile, split, us], split null for the plan's. With ``--rows`` each number of rows is timed by all tiles that hold
it, and ``rows`` are [weight, N, K, rows of x, tile, split, us], tile 0 for the plan's, which is timed before and after
the others.
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
from peers_gpu.side import Unavailable, error, exact_product, timed_type  # noqa: E402

from lowbit import extension  # noqa: E402
from lowbit.autotune.plan import device_of  # noqa: E402
from lowbit.commands.selftest import TOLERANCE  # noqa: E402

TILES = (1, 2, 4, 8, 16)
Split = tuple[int, ...]  # row_tiles, parts, blocks, early, warps, next_after, and whether two blocks each


def splits_of_few_rows(row_tiles: int, blocks: int, pairs: int) -> list[Split]:
    """For n8 and n16: parts for a second kernel, whole tasks in two or three rounds, then tasks that fill a device of
    so many blocks and pairs of them, in blocks of 16 warps, of 8, and two of 8 on each multiprocessor, with all warps
    that there are and with half of those that share K."""
    found = [(16, 1, 1, early, 16, 0, False) for early in (1, 2, 3)]
    for rounds in (2, 3):
        rows = -(-row_tiles // (rounds * blocks))
        if rows <= 16:
            found += [(rows, 1, 1, early, 16, 0, False) for early in (1, 2, 3)]
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
                found += [(rows, parts, together, early, warps, after, False) for early, after in chosen]
                if parts > 2 and rows == least:
                    found.append((rows, parts // 2, together, 2, warps, 0 if warps == 16 else 6, False))
    for together, most in ((1, 2 * blocks), (2, 2 * pairs)):
        least = -(-row_tiles // most)
        least += least % together
        ways = itertools.product((least, least + together), (1, 2), (1, 2, 8))
        found += [(rows, max(8 // rows // by, 1), together, early, 8, 0, True) for rows, by, early in ways if rows <= 8]
    return list(dict.fromkeys(found))


def splits_of_decode() -> list[Split]:
    """Row groups by warps of each, in one half of a multiprocessor, in both, and in all of it, one to eight blocks."""
    few = {8: [(1, 0), (2, 0), (4, 0), (2, 5), (2, 7)], 16: [(1, 0), (2, 0)]}
    found = [
        (warps // parts, parts, blocks, early, warps, after, False)
        for warps in (8, 16)
        for parts in (warps, warps // 2, warps // 4, warps // 8)
        for blocks in (1, 2, 4, 8)
        for early, after in ([(2, 8)] if warps == 8 and blocks > 2 else few[warps])
    ]
    both = itertools.product((8, 4, 2), (1, 2, 4), (8, 3, 2, 1))
    return found + [(8 // parts, parts, blocks, early, 8, 0, True) for parts, blocks, early in both]


def once(splits: list[Split], tile: int, bits: int, n: int, k: int) -> list[Split]:
    """Of splits that differ in when weights are asked for alone, one, with the stages and eighths that ``half_of`` of
    csrc/cuda/split.h gives, and of decode about those of ``when`` of csrc/templates/decode/spread.cuh, which also knows
    whether a warp's ring holds all of its stages. Why not by these themselves: that takes a compiler."""
    nbytes = -(-n // 16) * -(-k // 128) * (256 * bits + 32) / 132  # of a multiprocessor
    found = []
    for row_tiles, parts, blocks, _, warps, _, two_each in splits:
        if two_each and tile < 4 and bits == 3:
            early, after = 1, 0
        elif two_each and tile < 4 and bits == 6:
            early, after = 2 if nbytes <= 120e3 else 3 if nbytes <= 200e3 else 4, 0
        elif two_each and tile < 8:
            few = bits in (3, 5) or nbytes <= (350e3 if tile == 4 else 180e3)
            early, after = 8 if not few else 3 if tile == 1 else 2, 0
        elif two_each:
            few = (5 if nbytes > 300e3 else 6) if tile > 8 else 4 if nbytes > 260e3 else 5
            early, after = 8 if bits > few or (bits, tile) == (4, 8) else 2, 0
        elif tile >= 8:
            early = 1 if bits <= 2 else 2 if bits <= 4 else 3
            half = (2 if nbytes <= 66e3 else 3, 3 if nbytes <= 66e3 else 5 if nbytes <= 120e3 else 6)
            half = (3, 7) if nbytes > 265e3 else half
            early, after = half if warps == 8 else (early, 0)
        elif warps == 16:
            early, after = 2 if bits in (5, 6) or (bits, tile) == (3, 4) else 1, 0
        elif blocks > 2:
            early, after = 2, 8
        elif nbytes <= 61e3:
            early, after = 4, 0
        elif bits == 3 and tile < 4:
            early, after = 1, 0
        elif tile == 4 or nbytes > 270e3:
            early, after = 2 if nbytes <= 97e3 else 1, 0
        else:
            early, after = 2, 0 if nbytes <= 90e3 else 5 if nbytes <= 145e3 else 7
        found.append((row_tiles, parts, blocks, early, warps, after, two_each))
    return list(dict.fromkeys(found))


class Sweep:
    """What has been timed; what of it is left out once ``deadline`` seconds are over."""

    def __init__(self, args: argparse.Namespace, record: Record):
        self.args, self.record, self.rows = args, record, []
        self.device, self.cache = device_of(torch.cuda.current_device()), gpu_timing.cache_bytes()

    def shape(self, n: int, k: int) -> None:
        problem = peers_gpu.Problem.make(n, k, "cuda", lambda nbytes: gpu_timing.copies_for(nbytes, self.cache))
        for name in self.args.types.split(","):
            dtype, group, zeros = (*name.split(":"), "", "")[:3]
            self.problem, self.of = problem, (dtype, "float16", int(group or 128), zeros or None)
            if self.args.rows:
                for m in map(int, self.args.rows.split(",")):
                    self.product(name, n, k, m, (0, *(tile for tile in TILES if tile >= m), 0))
            else:
                for tile in map(int, self.args.tiles.split(",")):
                    self.product(name, n, k, tile, (tile,))
        torch.cuda.empty_cache()

    def product(self, name: str, n: int, k: int, m: int, tiles: tuple[int, ...]) -> None:
        """By each tile, 0 for the plan's, its own split and others."""
        x, exact = torch.randn(m, k, device="cuda").half(), None
        for tile in tiles:
            kernel = f"{'gemm_sm90' if tile >= 8 else 'decode'}_n{tile}" if tile else None
            try:
                ready = LowbitSide(*self.of, tile=kernel).open(self.problem)
            except Unavailable:
                continue
            exact = exact_product(x, ready.reference) if exact is None else exact
            splits = []
            if tile:
                row_tiles, bits = -(-n // 16), timed_type(self.of[0]).bits
                splits = splits_of_decode()
                if tile >= 8:
                    splits = splits_of_few_rows(row_tiles, self.device.blocks, self.device.pairs)
                if self.args.once:
                    splits = once(splits, tile, bits, n, k)
            for split in [None, *splits]:
                us = self.time(ready, x, exact, split)
                if us is None:
                    continue
                self.rows.append([name, n, k, *([m] if self.args.rows else []), tile, split, round(us, 3)])
            print(line(self.rows, name, n, k, *([m] if self.args.rows else []), tile), flush=True)

    def time(self, ready, x: torch.Tensor, exact: torch.Tensor, split: Split | None) -> float | None:
        """Microseconds; None where a kernel can't do it, or it is late. Raises AssertionError for a wrong answer."""
        if self.record.seconds > self.args.deadline:
            return None
        with extension.force_cuda_split(*split) if split else contextlib.nullcontext():
            try:
                wrong = error(ready.calls[0](x), exact)
            except RuntimeError as why:
                if "can't hold" in str(why):
                    return None
                raise
            if not wrong <= TOLERANCE["float16"]:
                raise AssertionError(f"{self.of} {tuple(x.shape)} {split}: off by {wrong}")
            turns = [lambda call=call: call(x) for call in ready.calls]
            return gpu_timing.graph_us(turns, self.args.least_ms, 5).us


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="int4", help="weight types, each with :group and :zeros if wanted (int4)")
    parser.add_argument("--shapes", default="8192x8192", help="N x K, comma-separated (8192x8192)")
    parser.add_argument("--tiles", default="8,16", help="tokens of tiles, 16 at most, and rows of x (8,16)")
    parser.add_argument("--rows", help="rows of x, each by all tiles up to n16 that hold it, in place of --tiles")
    parser.add_argument("--once", action="store_true", help="splits with the stages that the plan asks for early alone")
    parser.add_argument("--least-ms", type=float, default=2, help="ms of replays in each of 5 trials (2)")
    parser.add_argument("--deadline", type=float, default=600, help="seconds after which nothing new is begun")
    parser.add_argument("--device", help="folder under benchmarks/results (from the device's name)")
    parser.add_argument("--out", help="result file (benchmarks/results/<device>/sweep_splits_<date>.json)")
    args = parser.parse_args(argv)
    sweep = Sweep(args, Record(__file__, argv))
    with torch.inference_mode():
        for n, k in report.shapes(args.shapes):
            sweep.shape(n, k)
    sweep.record.keep(args, rows=sweep.rows)
    return 0


def line(rows: list, *product) -> str:
    """What a product took by the plan, and the fastest splits."""
    found = sorted((us, split) for *of, split, us in rows if tuple(of) == product and split)
    plan = [us for *of, split, us in rows if tuple(of) == product and split is None]
    best = ", ".join(f"{' x '.join(map(str, split))} {us:.2f}" for us, split in found[:4])
    name, n, k, *m, tile = product
    return f"{name} {n}x{k} {f'{m[0]} rows ' if m else ''}n{tile}: plan {plan}, {best}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
