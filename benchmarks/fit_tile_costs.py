"""Fits the constants of tiles in csrc/cuda/tile_costs.h to results of sweep_tiles.py, and says how well they choose.

    python benchmarks/fit_tile_costs.py benchmarks/results/nvidia-h200/tiles_*.json
    python benchmarks/fit_tile_costs.py --only hot benchmarks/results/nvidia-h200/tiles_*.json

Rows of a file are those of sweep_tiles.py, or of recheck_table.py; or, older, [type, N, K, M, tile, us], or, of blocks
that have half of a multiprocessor, [..., tile, blocks whose sums meet, us]. Needs torch and a C++ compiler (the
workers' shares are those of csrc/templates/deal.cuh itself). Prints the new lines, and what the way with the least
cost takes more than the fastest one, before and after. With --only all constants but those stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import cost_fit
import tile_model
import torch
from tile_model import Product, Way

FEWEST = 17  # rows of x that these tiles are for
MEET = [1, 2, 4]  # blocks of those that have one task each, or their part of it
BLOCK_NAMES = ["block_start", "block_idle", "block_step"]  # constants of these
EVEN_SINCE = "2026-11-30"  # files from this day on are of kernels for even scales, where these are even and x is fp16
RECHECKED = 13  # numbers of a row of recheck_table.py
EVEN_COUNTS = 4  # how often their products count: most weights have such scales


def kind_of(dtype: str, group: int) -> str:
    """What work depends on beside bits, a name of tile_model.KINDS."""
    if group >= 128:
        return "float" if dtype.startswith("float") else "int"
    return "zeros" if dtype.startswith("uint") else "fine float" if dtype.startswith("float") else "fine"


def way_of(product: Product, tile: int, how) -> Way | None:
    """Tile, row tiles of a block that has one task (0: of others), and blocks whose sums meet. None of a time that says
    nothing of either: what the plan had for a tile, or whole blocks dealt out as they are not."""
    if isinstance(how, int):
        return (tile, 8, how)
    row_tiles, parts, blocks, _, warps, _ = how or (8, 1, 0, 1, 16, 0)
    if warps == 8 or parts > 1:
        return (tile, row_tiles, blocks)
    if how is None:
        return (tile, 0, 0) if tile > 128 else None
    return (tile, 0, 0) if blocks == tile_model.met_by(tile, product) else None


def rechecked(rows: list[list]) -> dict[Product, dict[Way, float]]:
    """Those of recheck_table.py, of whole blocks and integers beside fp16, where no other blocks can have been it."""
    found: dict[Product, dict[Way, float]] = defaultdict(dict)
    for weight, act, n, k, group, zeros, _, m, *kernels, _ in rows:
        for name, us in zip(kernels[::2], kernels[1::2], strict=True):
            if us is None:
                continue
            tile = int(name.rsplit("_n", 1)[1])
            others = tile <= 96 and -(-n // 64) * -(-m // tile) <= tile_model.BLOCKS
            if (act, group, zeros) == ("float16", 128, "none") and tile > 16 and not others:
                found[Product(n, k, m, int(weight[3]), even=True)][tile, 0, 0] = us
    return found


def products_of(files: list[str]) -> dict[Product, dict[Way, float]]:
    """Product -> microseconds by way; of several times the least, and what a sweep has not rechecked."""
    found: dict[Product, dict[Way, float]] = defaultdict(dict)
    beside: dict[Product, dict[Way, float]] = {}
    for file in files:
        record = json.loads(Path(file).read_text())
        new = record.get("date", "") >= EVEN_SINCE
        if len(record["rows"][0]) == RECHECKED:
            beside |= rechecked(record["rows"])
            continue
        for spec, n, k, m, tile, *how, us in record["rows"]:
            dtype, _, group = spec.partition("/")
            if tile <= 16 or m < FEWEST:
                continue
            kind = kind_of(dtype, int(group or 128))
            even = new and kind == "int" and dtype.startswith("int")  # uint types have zeros
            product = Product(n, k, m, int(re.search(r"\d", dtype)[0]), kind, even)
            way = way_of(product, tile, how[0]) if how else (tile, 0, 0)
            if way is None or (way[1] and tile_model.steps_of_block(k, way[2]) > tile_model.block_costs()[way[:2]][0]):
                continue
            found[product][way] = min(us, found[product].get(way, us))
    return {product: times for product, times in (beside | found).items() if len(times) > 1}


def indices(values, among: list) -> torch.Tensor:
    return torch.tensor([among.index(value) for value in values], dtype=torch.long)


def whole_model(each: list[tuple[Product, Way]], tiles: list[int]) -> cost_fit.Model:
    bits = torch.tensor([product.bits - 1 for product, _ in each], dtype=torch.long)
    which = indices([way[0] for _, way in each], tiles)
    work = [tile_model.work_of(way[0], product) for product, way in each]
    work = tile_model.Work(*torch.tensor(work, dtype=torch.float64).T)

    def model(constants, kinds, rounded):
        cost = {name: constants[name][which] for name in tile_model.NAMES}
        step, hot = (constants[name][which, bits] * kinds for name in tile_model.BY_BITS)
        return tile_model.predict(cost, step * rounded, hot, work, torch.maximum)

    return model


def blocks_model(each: list[tuple[Product, Way]], blocks: list[tuple[int, int]]) -> cost_fit.Model:
    which, meet = indices([way[:2] for _, way in each], blocks), indices([way[2] for _, way in each], MEET)
    bits = torch.tensor([product.bits - 1 for product, _ in each], dtype=torch.long)
    steps = torch.tensor([float(tile_model.steps_of_block(product.k, way[2])) for product, way in each])
    memory = torch.tensor([tile_model.memory_us(*product[:2], product.bits) for product, _ in each]).double()
    idle = torch.tensor([tile_model.idle_of(product, way) for product, way in each])

    def model(constants, kinds):
        step = constants["block_step"][which, bits] * kinds * (1 - constants["block_idle"][which, 0] * idle)
        work = torch.maximum(steps * step, memory)
        return constants["block_start"][which, meet] + work

    return model


def model_of(each: list[tuple[Product, Way]], tiles: list[int], blocks: list[tuple[int, int]]) -> cost_fit.Model:
    """Predicts the microseconds of each product by a way."""
    alone = torch.tensor([way[1] > 0 for _, way in each])
    whole = whole_model([one for one in each if not one[1][1]], tiles)
    others = blocks_model([one for one in each if one[1][1]], blocks) if alone.any() else None
    kind = indices([product.kind for product, _ in each], tile_model.KINDS)
    column = indices([tile_model.column_of(way) for _, way in each], tile_model.COLUMNS)
    rounded = torch.tensor([tile_model.rounded_work(way[0], product) for product, way in each], dtype=torch.float64)

    def model(constants):
        # Of integers without zeros in long groups, the first kind, it is 1.
        kinds = torch.cat([torch.ones_like(constants["kind"][:1]), constants["kind"]])[kind, column]
        found = torch.empty(len(each), dtype=torch.float64)
        found[~alone] = whole(constants, kinds[~alone], rounded[~alone])
        if others:
            found[alone] = others(constants, (kinds * rounded)[alone])
        return found

    return model


def numbers(values) -> str:
    return "{" + ", ".join(f"{value:.2f}f" for value in values) + "}"


def exact() -> dict[str, list]:
    """The constants of tile_costs.h."""
    costs, blocks = tile_model.costs().values(), tile_model.block_costs().values()
    names = (*tile_model.NAMES, *tile_model.BY_BITS)
    found: dict[str, list] = {name: [cost[name] for cost in costs] for name in names}
    found |= {name: [cost[i] for cost in blocks] for i, name in enumerate(BLOCK_NAMES, 1)}
    return found | {"kind": tile_model.kind_costs()}


def positive(constant, least: float = 0.01):
    """The same where none is less than `least`, for logarithms."""
    return [positive(one, least) for one in constant] if isinstance(constant, list) else max(constant, least)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="results of sweep_tiles.py")
    parser.add_argument("--only", help="constants to fit, comma-separated: step, hot, start... (all)")
    args = parser.parse_args(argv)
    times, tiles, blocks = products_of(args.files), list(tile_model.costs()), list(tile_model.block_costs())
    products = list(times)
    each = [(product, way) for product, of in times.items() for way in of]
    number = {product: i for i, product in enumerate(products)}
    counts = [EVEN_COUNTS if product.even else 1 for product in products]
    measured = cost_fit.Measured([number[product] for product, _ in each], [times[p][way] for p, way in each], counts)
    model, start = model_of(each, tiles, blocks), {name: positive(values) for name, values in exact().items()}
    only = set(args.only.split(",")) if args.only else set(start)
    if unknown := only - set(start):
        parser.error(f"--only: expected some of {', '.join(start)}, got {', '.join(sorted(unknown))}")
    rounded = {name: (value * 100).round() / 100 for name, value in measured.fit(model, start, only=only).items()}
    for i, tile in enumerate(tiles):
        own = ", ".join(f"{rounded[name][i]:.2f}f" for name in tile_model.NAMES)
        print(f"n{tile}: {own}, {', '.join(numbers(rounded[name][i]) for name in tile_model.BY_BITS)}")
    for i, (tile, row_tiles) in enumerate(blocks):
        print(f"n{tile} x {row_tiles}: " + ", ".join(numbers(rounded[name][i]) for name in BLOCK_NAMES))
    for kind, values in zip(tile_model.KINDS[1:], rounded["kind"], strict=True):
        print(f"{kind}: {numbers(values)}")
    as_it_was = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}
    for name, constants in (("before", as_it_was), ("after", rounded)):
        predicted = model(constants)
        lost, off = measured.lost(predicted), (predicted / measured.us).log()
        print(f"{name}: {cost_fit.summary(lost)}; off by {(off**2).mean().sqrt():.3f}")
        for kind in tile_model.KINDS:
            for even in (False, True):
                own = lost[torch.tensor([(product.kind, product.even) == (kind, even) for product in products])]
                if len(own):
                    print(f"  {kind}{', even scales' if even else ''}: {cost_fit.summary(own)}")
    for i in lost.argsort(descending=True)[:12].tolist():
        print(f"  {lost[i]:.1%}", *products[i], times[products[i]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
