"""Fits the constants of tiles in csrc/cuda/plan.h to results of sweep_tiles.py, and says how well they choose.

    python benchmarks/fit_tile_costs.py benchmarks/results/nvidia-h200/tiles_20261127*.json

Needs torch and a C++ compiler (the workers' shares are those of csrc/templates/deal.cuh itself). Prints the new lines,
and what the tile with the least cost takes more than the fastest one, before and after.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import cost_fit
import tile_model
import torch

FEWEST = 17  # rows of x that these tiles are for

Product = tuple[int, int, int, int]  # n, k, m, bits


def products_of(files: list[str]) -> dict[Product, dict[int, float]]:
    """Product -> microseconds by tile; of several times the least."""
    found: dict[Product, dict[int, float]] = defaultdict(dict)
    for file in files:
        for dtype, n, k, m, tile, us in json.loads(Path(file).read_text())["rows"]:
            if dtype.startswith("int") and tile > 16 and m >= FEWEST:
                times = found[n, k, m, int(dtype[3:])]
                times[tile] = min(us, times.get(tile, us))
    return {product: times for product, times in found.items() if len(times) > 1}


def model_of(products: list[Product], each: list[tuple[int, int, float]], tiles: list[int]) -> cost_fit.Model:
    """Predicts ``each``: number of the product, tile, microseconds."""
    bits = torch.tensor([products[product][3] - 1 for product, _, _ in each])
    which = torch.tensor([tiles.index(tile) for _, tile, _ in each])
    work = [tile_model.work_of(tile, *products[product]) for product, tile, _ in each]
    work = tile_model.Work(*torch.tensor(work, dtype=torch.float64).T)

    def model(constants):
        cost = {name: constants[name][which] for name in tile_model.NAMES}
        return tile_model.predict(cost, constants["step"][which, bits], work, torch.maximum)

    return model


def main(files: list[str]) -> int:
    times = products_of(files)
    products, before = list(times), tile_model.costs()
    tiles = list(before)
    each = [(i, tile, us) for i, of in enumerate(times.values()) for tile, us in of.items()]
    measured = cost_fit.Measured([one[0] for one in each], [one[2] for one in each])
    model = model_of(products, each, tiles)
    start = {name: [before[tile][name] for tile in tiles] for name in (*tile_model.NAMES, "step")}
    found = measured.fit(model, {name: torch.tensor(value).clamp(min=0.01).tolist() for name, value in start.items()})
    rounded = {name: (value * 100).round() / 100 for name, value in found.items()}
    for i, tile in enumerate(tiles):
        numbers = ", ".join(f"{rounded[name][i]:.2f}f" for name in tile_model.NAMES)
        print(f"n{tile}: {numbers}, {{{', '.join(f'{step:.2f}f' for step in rounded['step'][i])}}}")
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
