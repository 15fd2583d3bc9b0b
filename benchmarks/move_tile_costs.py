"""Moves the constants of tiles from 96 tokens on in csrc/cuda/plan.h to what chooses best, by times of several tiles.

    python benchmarks/move_tile_costs.py benchmarks/results/nvidia-h200/tiles_20261125.json \
        benchmarks/results/nvidia-h200/tune_20261125_int.json lowbit/autotune/tables/nvidia-h200.json

Takes results of sweep_tiles.py and of bench_tune.py, and tables that ship (which have only what the plan chose wrongly,
so they count little). fit_tile_costs.py finds constants that predict times; a choice also depends on which of two tiles
is predicted too fast. Prints the new lines, and what is lost to the fastest tile before and after, for each file.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import tile_model

PLAN = tile_model.ROOT / "csrc/cuda/plan.h"
LINE = re.compile(r"\{(\d+), (128|256), ([01]), ([\d.]+)f, ([\d.]+)f, ([\d.]+)f, \{(.*?)\}\}")
LEAST = 96  # tokens of the tiles that are moved
TABLE = 0.15  # what a product of a table counts
LEVEL = 0.03  # what a prediction that is off counts beside a choice that is
GAIN = 0.03  # a step that brings less is not taken
STEPS = (0.95, 0.97, 0.985, 1.015, 1.03, 1.05)

Product = tuple[int, int, int, int]  # n, k, m, bits


def costs() -> dict[int, dict]:
    """Tokens of a tile -> its constants, as they stand."""
    found = {}
    for tokens, _, _, start, parts, hot, steps in LINE.findall(PLAN.read_text()):
        each = [float(step.strip().rstrip("f")) for step in steps.split(",")]
        found[int(tokens)] = {"start": float(start), "parts": float(parts), "hot": float(hot), "step": each}
    return found


def predict(cost: dict, tile: int, product: Product) -> float:
    n, k, m, bits = product
    work = tile_model.work_of(tile, n, k, m, bits)
    return tile_model.predict(cost["start"], cost["parts"], cost["hot"], cost["step"][bits - 1], work)


def tile_of(kernel: str) -> int:
    return int(kernel.rpartition("_n")[2]) if "gemm_sm90" in kernel else 0


def products_of(path: str) -> list[tuple[Product, dict[int, float], float]]:
    """Product, microseconds by tile, and what it counts, of a file."""
    found, by_tile = json.loads(Path(path).read_text()), defaultdict(dict)
    weight = 1.0
    for row in found["rows"]:
        if isinstance(row, dict):  # of bench_tune.py
            named, (n, k), times = row["weight"], row["shape"], {row["m"]: row["us"]}
        elif isinstance(row[-1], list):  # of a table: ranges of rows
            named, n, k, times, weight = row[0], row[2], row[3], {last: us for _, last, us in row[-1]}, TABLE
        else:
            named, n, k, times = row[0], row[1], row[2], {row[3]: {f"gemm_sm90_n{row[4]}": row[5]}}
        if re.fullmatch(r"int\d", named):
            for m, us in times.items():
                by_tile[n, k, m, int(named[3:])] |= {tile_of(kernel): time for kernel, time in us.items()}
    kept = {product: {tile: us for tile, us in times.items() if tile >= 32} for product, times in by_tile.items()}
    return [(product, times, weight) for product, times in kept.items() if len(times) > 1]


def lost(constants: dict, product: Product, times: dict[int, float]) -> float:
    chosen = min(times, key=lambda tile: predict(constants[tile], tile, product))
    return times[chosen] / min(times.values()) - 1


def loss(constants: dict, products: list) -> float:
    total = 0.0
    for product, times, weight in products:
        total += weight * lost(constants, product, times)
        if weight == 1:
            off = (math.log(predict(constants[tile], tile, product) / us) for tile, us in times.items())
            total += LEVEL * sum(map(abs, off))
    return total


def moved(cost: dict, what: str, by: float) -> dict:
    """Constants of one tile with one of them, or its steps of few or many bits, changed."""
    made = copy.deepcopy(cost)
    if what == "hot":
        made["hot"] = max(0.0, made["hot"] + by - 1)
    elif what == "parts":
        made["parts"] *= 1 + (by - 1) * 5
    else:
        first, last = {"step": (1, 8), "few": (1, 4), "many": (5, 8)}[what]
        made["step"] = [us * (by if first <= bits <= last else 1) for bits, us in enumerate(made["step"], 1)]
    return made


def descend(constants: dict, products: list) -> dict:
    best, better = loss(constants, products), True
    while better:
        better = False
        for tile in (tokens for tokens in constants if tokens >= LEAST):
            for what, by in ((what, by) for what in ("step", "parts", "hot", "few", "many") for by in STEPS):
                tried = constants | {tile: moved(constants[tile], what, by)}
                found = loss(tried, products)
                if found < best - GAIN:
                    constants, best, better = tried, found, True
    return constants


def main(files: list[str]) -> int:
    by_file = {path: products_of(path) for path in files}
    before = costs()
    after = descend(before, [product for found in by_file.values() for product in found])
    for tile, cost in after.items():
        steps = ", ".join(f"{step:.2f}f" for step in cost["step"])
        print(f"n{tile}: {cost['start']:.1f}f, {cost['parts']:.1f}f, {cost['hot']:.2f}f, {{{steps}}}")
    for path, found in by_file.items():
        shares = ([lost(constants, *product[:2]) for product in found] for constants in (before, after))
        print(Path(path).name, len(found), *(f"{mean(share):.2%}, {max(share):.1%}" for share in shares))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
