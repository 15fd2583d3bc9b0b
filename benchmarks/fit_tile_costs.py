"""Fits the constants of tiles in csrc/cuda/tile_costs.h to results of sweep_tiles.py, and says how well they choose.

    python benchmarks/fit_tile_costs.py benchmarks/results/nvidia-h200/tiles_*20261127*.json

Rows of a file are [type, N, K, M, tile, us], or, of blocks that have half of a multiprocessor, [..., tile, blocks whose
sums meet, us]. Needs torch and a C++ compiler (the workers' shares are those of csrc/templates/deal.cuh itself). Prints
the new lines, and what the tile with the least cost takes more than the fastest one, before and after.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import cost_fit
import tile_model
import torch

FEWEST = 17  # rows of x that these tiles are for
HALVES = [32, 64]  # tiles that come in half of a multiprocessor too
MEET = [1, 2, 4]  # blocks
MOST_STEPS = {32: 32, 64: 24}  # times 128 k of a block of those, as most_steps of struct HalfCost

Product = tuple[int, int, int, int]  # n, k, m, bits
Way = tuple[int, int]  # tile, and blocks of half of a multiprocessor whose sums meet, or 0 for whole ones


def products_of(files: list[str]) -> dict[Product, dict[Way, float]]:
    """Product -> microseconds by tile; of several times the least."""
    found: dict[Product, dict[Way, float]] = defaultdict(dict)
    for file in files:
        for dtype, n, k, m, tile, *blocks, us in json.loads(Path(file).read_text())["rows"]:
            short = not blocks or steps_of_half(k, blocks[0]) <= MOST_STEPS[tile]
            if dtype.startswith("int") and tile > 16 and m >= FEWEST and short:
                times, way = found[n, k, m, int(dtype[3:])], (tile, blocks[0] if blocks else 0)
                times[way] = min(us, times.get(way, us))
    return {product: times for product, times in found.items() if len(times) > 1}


def steps_of_half(k: int, blocks: int) -> int:
    return math.ceil(math.ceil(k / 128) / blocks)


def whole_model(each: list[tuple[Product, Way]], tiles: list[int]) -> cost_fit.Model:
    bits = torch.tensor([product[3] - 1 for product, _ in each])
    which = torch.tensor([tiles.index(tile) for _, (tile, _) in each])
    work = [tile_model.work_of(tile, *product) for product, (tile, _) in each]
    work = tile_model.Work(*torch.tensor(work, dtype=torch.float64).T)

    def model(constants):
        cost = {name: constants[name][which] for name in tile_model.NAMES}
        return tile_model.predict(cost, constants["step"][which, bits], work, torch.maximum)

    return model


def halves_model(each: list[tuple[Product, Way]]) -> cost_fit.Model:
    which = torch.tensor([HALVES.index(tile) for _, (tile, _) in each])
    meet = torch.tensor([MEET.index(blocks) for _, (_, blocks) in each])
    bits = torch.tensor([product[3] - 1 for product, _ in each])
    steps = torch.tensor([float(steps_of_half(k, blocks)) for (_, k, _, _), (_, blocks) in each])
    memory = torch.tensor([tile_model.memory_us(n, k, bits) for (n, k, _, bits), _ in each], dtype=torch.float64)

    def model(constants):
        work = torch.maximum(steps * constants["half_step"][which, bits], memory)
        return constants["half_start"][which, meet] + work

    return model


def model_of(each: list[tuple[Product, Way]], tiles: list[int]) -> cost_fit.Model:
    """Predicts the microseconds of each product by a tile."""
    half = torch.tensor([blocks > 0 for _, (_, blocks) in each])
    whole = whole_model([one for one in each if one[1][1] == 0], tiles)
    halves = halves_model([one for one in each if one[1][1]]) if half.any() else None

    def model(constants):
        found = torch.empty(len(each), dtype=torch.float64)
        found[~half] = whole(constants)
        if halves:
            found[half] = halves(constants)
        return found

    return model


def numbers(values) -> str:
    return "{" + ", ".join(f"{value:.2f}f" for value in values) + "}"


def main(files: list[str]) -> int:
    times, before = products_of(files), tile_model.costs()
    tiles, products = list(before), list(times)
    each = [(product, way) for product, of in times.items() for way in of]
    number = {product: i for i, product in enumerate(products)}
    measured = cost_fit.Measured([number[product] for product, _ in each], [times[p][way] for p, way in each])
    model = model_of(each, tiles)
    start = {name: [[max(one, 0.01) for one in before[tile][name]] if name == "step" else max(before[tile][name], 0.01)
                    for tile in tiles] for name in (*tile_model.NAMES, "step")}  # fmt: skip
    halves = tile_model.half_costs()
    start |= {name: [halves[tile][i] for tile in HALVES] for i, name in enumerate(("half_start", "half_step"))}
    found = measured.fit(model, start)
    rounded = {name: (value * 100).round() / 100 for name, value in found.items()}
    for i, tile in enumerate(tiles):
        own = ", ".join(f"{rounded[name][i]:.2f}f" for name in tile_model.NAMES)
        print(f"n{tile}: {own}, {numbers(rounded['step'][i])}")
    for i, tile in enumerate(HALVES):
        print(f"half of n{tile}: {numbers(rounded['half_start'][i])}, {numbers(rounded['half_step'][i])}")
    as_it_was = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}
    for name, constants in (("before", as_it_was), ("after", rounded)):
        predicted = model(constants)
        off = (predicted / measured.us).log()
        print(f"{name}: {cost_fit.summary(measured.lost(predicted))}; off by {(off**2).mean().sqrt():.3f}")
    lost = measured.lost(model(rounded))
    for i in lost.argsort(descending=True)[:12].tolist():
        print(f"  {lost[i]:.1%}", *products[i], times[products[i]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
