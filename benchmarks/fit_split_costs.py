"""Fits the costs of splits in csrc/cuda/split.h (gemm_sm90's n8 and n16) to results of sweep_splits.py, and says how
well they choose.

    python benchmarks/fit_split_costs.py benchmarks/results/nvidia-h200/sweep_splits_2026112[78]_n8_n16.json \
        --beside benchmarks/results/nvidia-h200/sweep_splits_20261129_two_each_n8_n16.json

Times of files behind --beside count by what the splits that others have too took there. Needs torch and a C++ compiler
(what a block walks is what csrc/cuda/split.h itself says). Prints the new constants, and what the split with the least
cost takes more than the fastest one, before and after.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import cost_fit
import torch
from tile_model import BLOCKS, PAIRS, native

HALF, WHOLE = 8, 16  # warps of a block
SHARP = 200.0  # of the softmax, as in cost_fit.py
KINDS = ("half", "whole", "two")  # of blocks; two: of half of a multiprocessor on each half
PLAIN = [0] * 6  # of a weight: nothing that costs more (struct WeightKind)
MEMORY = 4.3  # TB/s, as kBytesPerUs of csrc/cuda/split.h
MOST_K_OF_HALVES = 128 * 128  # as kMostStepsOfHalves of split.h
START = {
    "start": [[1.6, 1.6]] * 3, "waits": [[1.0, 1.0]] * 3, "x": [[0.02, 0.02]] * 3, "step": [[[0.06] * 8] * 2] * 3,
    "both": [0.6, 2.0, 1.0], "sums": [0.01] * 3, "pair": [0.2] * 3, "turn": [0.3] * 3, "parts": [2.5] * 3,
}  # fmt: skip

Product = tuple[int, int, int, int]  # n, k, tokens, bits
Split = tuple[int, ...]  # row tiles, parts, blocks, warps, two_each


def products_of(files: list[str], beside: list[str]) -> dict[Product, dict[Split, float]]:
    """Of products that several files have those of the last one count."""
    others = [{product: of for file in some for product, of in times_of(file).items()} for some in (files, beside)]
    return {product: times for product, times in cost_fit.beside(*others).items() if len(times) > 1}


def times_of(file: str) -> dict[Product, dict[Split, float]]:
    """Product -> microseconds by split, the least of those that differ in when weights are asked for."""
    found: dict[Product, dict[Split, float]] = defaultdict(dict)
    for dtype, n, k, tokens, split, us in json.loads(Path(file).read_text())["rows"]:
        if split and tokens in (8, 16):
            if split[4] == HALF and k > MOST_K_OF_HALVES:
                continue
            times, ways = found[n, k, tokens, int(dtype[3:])], (*split[:3], split[4], any(split[6:]))
            times[ways] = min(us, times.get(ways, us))
    return found


def model_of(each: list[tuple[Product, Split]]) -> cost_fit.Model:
    columns = []
    for (n, k, tokens, bits), (row_tiles, parts, blocks, warps, two_each) in each:
        tiles, steps, split = -(-n // 16), -(-k // 128), [row_tiles, parts, blocks, 1, warps, 0, two_each]
        work = native.split_work(tiles, steps, tokens, bits, split, [BLOCKS, PAIRS], PLAIN)
        doubled, megabytes = (parts * blocks).bit_length() - 1, tiles * steps * (256 * bits + 32) / 1e6
        sums = row_tiles * tokens // 8 * doubled
        kind = 2 if two_each else warps == WHOLE
        columns.append((kind, tokens > 8, bits - 1, *work, parts, blocks > 1, sums, megabytes))
    table = torch.tensor(columns, dtype=torch.float64).T
    kind, wide, bits = (column.long() for column in table[:3])
    steps, busy, turns, in_parts, parts, paired, sums, megabytes = table[3:]

    def model(c):
        products = steps * (busy + c["waits"][kind, wide]) * c["step"][kind, wide, bits]
        memory = megabytes / MEMORY
        most, least = torch.maximum(products, memory), torch.minimum(products, memory)
        both = c["both"][kind] * least / most
        ends = paired * c["pair"][kind] / (1 + most) + turns * c["turn"][kind] + in_parts * c["parts"][kind]
        start = c["start"][kind, wide] + c["x"][kind, wide] * steps * parts + c["sums"][kind] * sums
        return start + most + both + ends

    return model


def by_now() -> dict[str, torch.Tensor]:
    """The constants of split.h; where a kind of blocks has none, next to nothing."""
    kinds = cost_fit.all_kinds("csrc/cuda/split.h", "kHalfCosts", "kWholeCosts", "kTwoCosts")
    return {name: value.clamp(min=1e-6) for name, value in zip(START, kinds, strict=True)}


def text_of(value: torch.Tensor) -> str:
    if value.dim():
        return "{" + ", ".join(text_of(one) for one in value) + "}"
    return f"{value:#.3g}f"


def by_header(product: Product, split: Split) -> float:
    n, k, tokens, bits = product
    ways = [*split[:3], 1, split[3], 0, split[4]]
    return native.split_us(-(-n // 16), -(-k // 128), tokens, bits, ways, [BLOCKS, PAIRS], PLAIN)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="records of sweeps")
    parser.add_argument("--beside", nargs="*", default=[], help="others, see above")
    parser.add_argument("--two", action="store_true", help="kTwoCosts alone; the others stay")
    args = parser.parse_args(argv)
    times = products_of(args.files, args.beside)
    each = [(i, product, split) for i, (product, of) in enumerate(times.items()) for split in of]
    counts = [cost_fit.COUNTS.get(product[:2], 1) for product in times]
    us = [times[product][split] for _, product, split in each]
    measured = cost_fit.Measured([one[0] for one in each], us, counts)
    model = model_of([one[1:] for one in each])
    found = measured.fit(model, by_now(), 1200, SHARP, dict.fromkeys(START, 0)) if args.two else None
    found = found or measured.fit(model, START, sharp=SHARP)
    for kind, name in enumerate(KINDS):
        for what, value in found.items():
            print(name, what, text_of(value[kind]))
    now = torch.tensor([by_header(product, split) for _, product, split in each], dtype=torch.float64)
    for name, predicted in (("split.h", now), ("fitted", model(found))):
        off = (predicted / measured.us).log()
        print(f"{name}: {cost_fit.summary(measured.lost(predicted))}; off by {(off**2).mean().sqrt():.3f}")
    lost, products = measured.lost(model(found)), list(times)
    for i in lost.argsort(descending=True)[:12].tolist():
        fastest = min(times[products[i]], key=times[products[i]].get)
        print(f"  {lost[i]:.1%}", *products[i], fastest, times[products[i]][fastest])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
