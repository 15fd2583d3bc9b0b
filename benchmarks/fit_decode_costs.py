"""Fits the costs of splits in csrc/templates/decode/spread.cuh to times of splits, and says how well they choose, tiles
and n8 of family gemm_sm90 too.

    python benchmarks/fit_decode_costs.py benchmarks/results/nvidia-h200/sweep_splits_20261128_decode*.json \
        --instead benchmarks/results/nvidia-h200/sweep_splits_20261128_passes*.json \
        --beside benchmarks/results/nvidia-h200/sweep_splits_20261129_two_each.json \
        --again benchmarks/results/nvidia-h200/sweep_splits_20261129_int6.json

Needs torch and a C++ compiler (what a split costs, and when its blocks ask for weights, is what spread.cuh says). Rows
of the files: weight, N, K, rows of x, tokens of the tile, [split, us] each; or those of sweep_splits.py, with --rows
and without. Of shapes that files behind --instead have, those before it do not count; times of files behind --beside
count by what the splits that others have too took there; products that files behind --again have count by these alone.
Prints the new constants, found from those that spread.cuh has, and what the least cost takes more than the fastest,
before and after.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import cost_fit
import torch
from fit_split_costs import text_of
from tile_model import BLOCKS, PAIRS, native

SM90 = 2  # the family
TOKENS = (1, 2, 4)
#: Of the softmax, as in cost_fit.py: of all kinds by 40, 80 and 200 the least cost loses 1.06, 0.92 and 0.77%, of two
#: blocks each by 100, 200 and 400 1.10, 1.03 and 1.02.
SHARP = 400.0
HEADER = "csrc/templates/decode/spread.cuh"
NAMES = ("start", "product", "memory", "idle", "groups", "both", "x", "row", "sums", "pass", "cluster", "fades")

Product = tuple[int, int, int, int]  # bits, n, k, rows of x
Split = tuple[int, ...]  # row_tiles, parts, blocks, early, warps, next_after, two_each
Times = dict[tuple[int, Split | None], float]  # tile and split -> us


def rows_of(file: str) -> list[tuple[str, int, int, int, int, list]]:
    """Weight, n, k, rows of x, tokens of the tile, [split, us] each."""
    found = []
    for dtype, n, k, m, *last in json.loads(Path(file).read_text())["rows"]:
        if isinstance(last[-1], list):
            tile, times = last
        else:
            tile, times = last[0] if len(last) == 3 else m, [last[-2:]]
        found.append((dtype, n, k, m, tile, times))
    return found


def products_of(
    files: list[str], instead: list[str] = (), beside: list[str] = (), again: list[str] = ()
) -> dict[Product, Times]:
    """What each split took by the stages and eighths that ``when`` gives it, or near; of n8 what its own took."""
    newer = [row for file in instead for row in rows_of(file)]
    shapes = {row[1:3] for row in newer}
    older = [row for file in files for row in rows_of(file) if row[1:3] not in shapes]
    found = cost_fit.beside(times_of(older + newer), times_of([row for file in beside for row in rows_of(file)]))
    return found | times_of([row for file in again for row in rows_of(file)])


def times_of(rows: list[tuple]) -> dict[Product, Times]:
    found: dict[Product, Times] = defaultdict(dict)
    timed: dict[tuple[Product, int, Split], dict[tuple[int, int], float]] = defaultdict(dict)
    for dtype, n, k, m, tile, times in rows:
        product = int(dtype[3:]), n, k, m
        for split, us in times:
            if split and tile in TOKENS:
                row_tiles, parts, blocks, early, warps, after, *two_each = split
                ways = timed[product, tile, (row_tiles, parts, blocks, 1, warps, 0, any(two_each))]
                ways[early, after] = (ways.get((early, after), us) * us) ** 0.5
            elif not split and tile == 8:
                found[product][tile, None] = us
    for (product, tile, split), ways in timed.items():
        bits, n, k, m = product
        early, after = native.decode_when(bits, tile, m, n, k, split)
        near = min(ways, key=lambda way: (abs(way[0] - early), abs(way[1] - after)))
        found[product][tile, split] = ways[near]
    return found


def n8_us(product: Product) -> float:
    bits, n, k, m = product
    return native.tile_us(SM90, 8, [m, n, k], bits, False, False, 128, 0, 90, [BLOCKS, PAIRS])


class Candidates:
    """All splits of all products, which count as COUNTS says, and n8 by its own costs."""

    def __init__(self, products: dict[Product, Times]):
        self.each = [(product, tile, split) for product, times in products.items() for tile, split in times]
        numbers = {product: i for i, product in enumerate(products)}
        us = [products[product][tile, split] for product, tile, split in self.each]
        counts = [cost_fit.COUNTS.get(product[1:3], 1) for product in products]
        self.measured = cost_fit.Measured([numbers[one[0]] for one in self.each], us, counts)
        columns = []
        for (bits, n, k, m), tile, split in self.each:
            if split is None:
                columns.append((1, 0, 0, 0, 0, n8_us((bits, n, k, m)), m, tile, *[1] * 7))
                continue
            us, *work = native.decode_work(bits, tile, m, n, k, split)
            megabytes = -(-n // 16) * -(-k // 128) * (256 * bits + 32) / 1e6
            shift = split[2].bit_length() - 1
            kind = cost_fit.kind_of(split)
            columns.append((0, kind, TOKENS.index(tile), bits - 1, shift, us, m, tile, megabytes, *work))
        table = torch.tensor(columns, dtype=torch.float64).T
        self.is_n8, self.kind, self.own, self.bits, self.shift = (column.long() for column in table[:5])
        self.now, self.m, self.tile, self.megabytes = table[5:9]
        self.work, self.idle, self.doubled, self.steps, self.passes, self.most_tiles = table[9:]

    def model(self, c: cost_fit.Constants) -> torch.Tensor:
        """``cost`` of spread.cuh."""
        kind = self.kind
        products = self.work * c["product"][kind, self.own, self.bits]
        memory = self.megabytes / c["memory"][kind] * (1 + c["idle"][kind] * self.idle)
        memory = memory * (1 + c["groups"][kind] * self.doubled)
        most, least = torch.maximum(products, memory), torch.minimum(products, memory)
        x = (c["x"][kind] * self.tile + c["row"][kind] * self.m) * self.steps
        ends = c["sums"][kind] * self.most_tiles + c["pass"][kind] * self.passes
        met = c["cluster"][kind, self.shift] / (1 + c["fades"][kind] * most)
        us = c["start"][kind, self.own] + most + c["both"][kind] * least * least / most + x + ends + met
        return torch.where(self.is_n8 == 1, self.now, us)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="records of sweeps")
    for name in ("--instead", "--beside", "--again"):
        parser.add_argument(name, nargs="*", default=[], help="others, see above")
    parser.add_argument("--two", action="store_true", help="kCostsTwo alone; the others stay")
    args = parser.parse_args(argv)
    products = products_of(args.files, args.instead, args.beside, args.again)
    candidates = Candidates(products)
    begin = dict(zip(NAMES, cost_fit.all_kinds(HEADER, "kCostsHalf", "kCostsWhole", "kCostsTwo"), strict=True))
    begin["memory"] = begin["memory"] / 1e6
    found = candidates.measured.fit(candidates.model, begin, 1200, SHARP, dict.fromkeys(begin, 0) if args.two else None)
    for kind, name in enumerate(("half", "whole", "two")):
        for what, value in found.items():
            print(name, what, text_of(value[kind]))
    fitted = candidates.model(found)
    for name, predicted in (("spread.cuh", candidates.now), ("fitted", fitted)):
        off = (predicted / candidates.measured.us).log()
        print(f"{name}: {cost_fit.summary(candidates.measured.lost(predicted))}; off by {(off**2).mean().sqrt():.3f}")
    lost: dict[Product, tuple[float, object, object]] = {}
    for i, (product, *_) in enumerate(candidates.each):
        lost[product] = min(lost.get(product, (1e9,)), (fitted[i].item(), i))
    slower = {product: candidates.measured.slower[i].item() for product, (_, i) in lost.items()}
    for product in sorted(slower, key=slower.get, reverse=True)[:12]:
        fastest = min(products[product], key=products[product].get)
        print(f"  {slower[product]:.1%}", *product, *candidates.each[lost[product][1]][1:], "fastest", *fastest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
