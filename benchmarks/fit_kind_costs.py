"""Fits what weights other than integers without zeros in groups of 128 cost by tiles of up to 16 tokens: numbers of
csrc/cuda/split.h (n8, n16) and csrc/templates/decode/spread.cuh, beside which the costs of integers stay.

    python benchmarks/fit_kind_costs.py narrow benchmarks/results/nvidia-h200/sweep_splits_20261128_kinds*.json \
        --instead benchmarks/results/nvidia-h200/sweep_splits_20261128_large_kinds.json \
        --beside benchmarks/results/nvidia-h200/sweep_splits_20261129_two_each_of_kinds.json \
        --again benchmarks/results/nvidia-h200/sweep_splits_20261129_int6_kinds.json
    python benchmarks/fit_kind_costs.py narrow --books \
        benchmarks/results/nvidia-h200/sweep_splits_20261201_codebooks.json
    python benchmarks/fit_kind_costs.py decode ... (the same files)
    python benchmarks/fit_kind_costs.py plan ... (what the tiles and splits that are chosen take more than the fastest)

The files are those of ``sweep_splits.py --rows``; of shapes that those behind --instead have, products of up to 4 rows
of the others do not count; times of those behind --beside count by what the splits that others have too took there,
and products that those behind --again have count by these alone. Needs torch and a C++ compiler. Prints the new
numbers, and what the split with the least cost takes more than the fastest one, before and after; decode's beside n8 as
its costs are.
"""

from __future__ import annotations

import argparse
import sys

import cost_fit
import torch
from fit_split_costs import text_of
from kind_sweeps import SM90, WHOLE, Product, Times, Weight, chosen_way, lost_by_plan, products_of
from tile_model import BLOCKS, PAIRS, native

TOKENS = (1, 2, 4)
UNIT = 0.05  # us: an amount of 0 begins as so much times the logarithm's 1
#: As the rows of kNarrowKinds, behind one for what has none; as those of kKindCosts.
NARROW_KINDS = ["plain", "zeros", "any zeros", "fine", "fine zeros", "fine any zeros", "float", "fine float"]
DECODE_KINDS = ["zeros", "fine", "fine zeros", "float3", "float4", "float4 32", "float4 16", "float8"]


def tell_plan(products: dict[Product, Times]) -> None:
    lost = lost_by_plan(products)
    print(f"{len(lost)} of {len(products)} products: {sum(lost.values()) / len(lost):.2%} lost")
    for product in sorted(lost, key=lost.get, reverse=True)[:12]:
        print(f"  {lost[product]:.1%}", *product, chosen_way(product, {tile for tile, _ in products[product]}))


def table_of(columns: list[tuple]) -> torch.Tensor:
    return torch.tensor(columns, dtype=torch.float64).T


def fit_narrow(products: dict[Product, Times], two: bool, books: bool) -> None:
    costs = cost_fit.all_kinds("csrc/cuda/split.h", "kHalfCosts", "kWholeCosts", "kTwoCosts")
    start, waits, x_cost, step, both, sums, pair, turn, parts_cost = costs
    each, columns = [], []
    for product, times in products.items():
        name, n, k, m = product
        weight, tile = Weight.of(name), 8 if m <= 8 else 16
        for way, split in times:
            if way != tile or m not in (4, 8, 16) or (split[4] < WHOLE and k > 128 * 128):
                continue
            tiles, steps, (of, row) = -(-n // 16), -(-k // 128), weight.narrow
            walked, busy, turns, in_parts = native.split_work(
                tiles, steps, tile, weight.bits, split, [BLOCKS, PAIRS], of
            )
            doubled = (split[1] * split[2] - 1).bit_length()  # three parts meet as four do
            megabytes = tiles * steps * native.step_bytes(weight.bits, of) / 1e6
            kind, own = cost_fit.kind_of(split), tile > 8
            fixed = start[kind, int(own)] + sums[kind] * doubled * split[0] * (tile // 8)
            fixed += turn[kind] * turns + parts_cost[kind] * in_parts
            now = native.split_us(tiles, steps, tile, weight.bits, split, [BLOCKS, PAIRS], of)
            each.append((product, way, split))
            columns.append((kind, own, row + 1, of[-1], weight.bits, weight.is_float, of[1], split[2] > 1,
                            walked, busy, walked * split[1], megabytes / 4.3, float(fixed), now))  # fmt: skip
    table = table_of(columns)
    kind, own, row, shorter, bits, is_float, book, paired = (column.long() for column in table[:8])
    walked, busy, x_steps, memory, fixed, now = table[8:]
    integer, any_zeros = step[kind, own, bits - 1], (row == 2) | (row == 5)

    def model(c: cost_fit.Constants) -> torch.Tensor:
        more = UNIT * (c["kinds"][row, kind, own] - 0.8) * c["shorter"][own] ** shorter
        own_step = integer * torch.where(is_float == 1, c["float"][(bits - 3).clamp(0), kind], 1.0)
        own_step = own_step + torch.where(row == 0, 0.0, more)
        own_step = own_step * torch.where(book == 1, c["codebook"][kind, own], 1.0)
        products = walked * (busy + waits[kind, own]) * own_step
        x = x_cost[kind, own] * x_steps * torch.where(any_zeros, c["any zeros' x"][own], 1.0)
        most, least = torch.maximum(products, memory), torch.minimum(products, memory)
        start = fixed + book * (c["codebook's start"][own] - 1)
        return start + x + most + both[kind] * least / most + paired * pair[kind] / (1 + most)

    begin = {"kinds": [[[1.0] * 2] * 3] * 8, "shorter": [1.1] * 2, "float": [[1.0] * 3] * 6, "any zeros' x": [1.0] * 2}
    begin |= {"codebook": [[1.25] * 2] * 3, "codebook's start": [1.3] * 2}
    axes = {"kinds": 1, "float": 1}
    if two or books:
        header = "csrc/cuda/split.h"
        begin["kinds"] = [begin["kinds"][0], *cost_fit.constants(header, r"kNarrowKinds\[7\]\[3\]\[2\]")]
        begin["kinds"] = (torch.tensor(begin["kinds"], dtype=torch.float64) / UNIT + 0.8).clamp(min=1e-6)
        begin["shorter"] = cost_fit.constants(header, r"kShorterWork\[2\]")
        begin["float"] = cost_fit.constants(header, r"kFloatWork\[6\]\[3\]")
        begin["any zeros' x"] = cost_fit.constants(header, r"kAnyZerosX\[2\]")
    only = {name for name in begin if name.startswith("codebook") == books}
    found = report(products, each, now, model, begin, 600, axes if two else None, only, 100.0 if books else 200.0)
    found["codebook's start"] -= 1
    for name, value in zip(NARROW_KINDS[1:], UNIT * (found["kinds"][1:] - 0.8), strict=True):
        print(text_of(value), name)
    for name in ("shorter", "float", "any zeros' x", "codebook", "codebook's start"):
        print(name, text_of(found[name]))


def fit_decode(products: dict[Product, Times], two: bool) -> None:
    costs = cost_fit.all_kinds("csrc/templates/decode/spread.cuh", "kCostsHalf", "kCostsWhole", "kCostsTwo")
    start, product_cost, memory_cost, idle, groups, both, x_cost, row_cost, sums, again, cluster, fades = costs
    each, columns = [], []
    for product, times in products.items():
        name, n, k, m = product
        weight = Weight.of(name)
        other, row = weight.decode
        if m > 4 or row < 0 or all(tile >= 8 for tile, _ in times):
            continue
        by_n8 = [us for (tile, _), us in times.items() if tile == 8]
        if by_n8:
            each.append((product, 8, None))
            columns.append((0, 0, 0, 0, 0, m, 8, 1.0, weight.tile_us(SM90, 8, m, n, k), *[1] * 6))
            products[product][8, None] = 1.01 * min(by_n8)  # its split is not the fastest one always
        for tile, split in times:
            found = None
            if split and tile < 8:
                found = native.decode_work(weight.bits, tile, m, n, k, split, other)
            if found is None:
                continue
            us, *work = found
            each.append((product, tile, split))
            megabytes = -(-n // 16) * -(-k // 128) * (256 * weight.bits + 32) / 1e6
            columns.append((cost_fit.kind_of(split), TOKENS.index(tile), row, weight.bits - 1,
                            split[2].bit_length() - 1, m, tile, megabytes, us, *work))  # fmt: skip
    table = table_of(columns)
    kind, own, row, bits, shift = (column.long() for column in table[:5])
    m, tile, megabytes, now, work, idles, doubled, steps, passes, most_tiles = table[5:]

    def model(c: cost_fit.Constants) -> torch.Tensor:
        products = work * (product_cost[kind, own, bits] + UNIT * (c["product"][row, kind, own] - 1))
        memory = megabytes * 1e6 / memory_cost[kind] * (1 + idle[kind] * idles) * (1 + groups[kind] * doubled)
        most, least = torch.maximum(products, memory), torch.minimum(products, memory)
        x = (x_cost[kind] * tile + row_cost[kind] * m) * c["x"][row] * steps
        ends = sums[kind] * most_tiles + again[kind] * passes + cluster[kind, shift] / (1 + fades[kind] * most)
        us = start[kind, own] + c["start"][row] - 1 + most + both[kind] * least * least / most + x + ends
        return torch.where(tile == 8, now, us)

    begin = {"product": [[[1.0] * 3] * 3] * 8, "x": [1.0] * 8, "start": [1.0] * 8}
    if two:
        rows = cost_fit.constants("csrc/templates/decode/spread.cuh", r"kKindCosts\[\]")
        begin["product"] = torch.tensor([row[0] for row in rows], dtype=torch.float64) / UNIT + 1
        begin["x"], begin["start"] = [row[1] for row in rows], [row[2] + 1 for row in rows]
    found = report(products, each, now, model, begin, 800, {"product": 1} if two else None)
    for i, name in enumerate(DECODE_KINDS):
        print(text_of(UNIT * (found["product"][i] - 1)), text_of(found["x"][i]), text_of(found["start"][i] - 1), name)


def report(
    products: dict, each: list, now: torch.Tensor, model, begin: dict, steps: int, axes: dict | None,
    only: set[str] | None = None, sharp: float = 200.0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Fits, products of some shapes as if there were several of them; says how well both choose."""
    numbers = {product: i for i, product in enumerate(dict.fromkeys(one[0] for one in each))}
    us = [products[product][tile, split] for product, tile, split in each]
    counts = [cost_fit.COUNTS.get(product[1:3], 1) for product in numbers]
    measured = cost_fit.Measured([numbers[one[0]] for one in each], us, counts)
    found = measured.fit(model, begin, steps, sharp, axes, only)
    for name, predicted in (("headers", now), ("fitted", model(found))):
        print(f"{name}: {cost_fit.summary(measured.lost(predicted))}")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("narrow", "decode", "plan"))
    parser.add_argument("files", nargs="+", help="records of sweeps")
    parser.add_argument("--two", action="store_true", help="of two blocks on each multiprocessor; the others stay")
    parser.add_argument("--books", action="store_true", help="narrow: numbers of codebooks; the others stay")
    for name in ("--instead", "--beside", "--again"):
        parser.add_argument(name, nargs="*", default=[], help="others, see above")
    args = parser.parse_args(argv)
    products = products_of(args.files, args.instead, args.beside, args.again)
    if args.which == "plan":
        tell_plan(products)
    elif args.which == "narrow":
        fit_narrow(products, args.two, args.books)
    else:
        fit_decode(products, args.two)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
