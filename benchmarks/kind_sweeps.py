"""Sweeps of splits of any weight (``sweep_splits.py --rows``): what the tile and split that lowbit chooses up to 16
rows of x lose to the fastest ones. For fit_kind_costs.py and tests/test_narrow_choices.py; needs a C++ compiler."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import cost_fit
from peers_gpu.side import timed_type
from tile_model import BLOCKS, PAIRS, native

DECODE, SM90, WHOLE = 0, 2, 16  # families; warps of a block

Split = tuple[int, ...]


class Weight(NamedTuple):
    name: str
    bits: int
    is_float: bool
    group: int
    zeros: int  # 0 none, 2 a minimum, 3 whole, 5 none and values of a codebook

    @classmethod
    def of(cls, text: str) -> Weight:
        dtype, group, zeros = (*text.split(":"), "", "")[:3]
        kind = timed_type(dtype)
        has = {"uint": 2 if zeros == "min" else 3, "codebook": 5}.get(kind.kind, 0)
        return cls(text, kind.bits, kind.kind == "float", int(group or 128), has)

    @property
    def fine(self) -> bool:
        return self.group < 128

    @property
    def _numbers(self) -> tuple[int, bool, int, int]:
        return self.bits, self.is_float, self.group, self.zeros

    @property
    def narrow(self) -> tuple[list[int], int]:
        """What of it n8 and n16 depend on, and its row of kNarrowKinds, -1 where it has none."""
        return native.narrow_kind(*self._numbers)

    @property
    def decode(self) -> tuple[list[int], int]:
        """What of it decode's tiles depend on, and its row of kKindCosts, -1 where it has none."""
        return native.decode_kind(*self._numbers)

    def tile_us(self, family: int, tile: int, m: int, n: int, k: int) -> float:
        numbers = self.bits, self.is_float, False, self.group, self.zeros
        return native.tile_us(family, tile, [m, n, k], *numbers, 90, [BLOCKS, PAIRS])


Product = tuple[str, int, int, int]  # weight, n, k, rows of x
Times = dict[tuple[int, Split], float]  # tile and split -> us


def products_of(
    files: list[str], instead: list[str] = (), beside: list[str] = (), again: list[str] = ()
) -> dict[Product, Times]:
    """Of shapes that files of ``instead`` have, products of up to 4 rows of the others do not count; those of
    ``beside`` by what the splits that others have too took there; products that ``again`` has by these alone."""

    def rows_of(files: list[str]) -> list[list]:
        return [row for file in files for row in json.loads(Path(file).read_text())["rows"]]

    newer = rows_of(instead)
    shapes = {tuple(row[1:3]) for row in newer}
    older = [row for row in rows_of(files) if row[3] > 4 or tuple(row[1:3]) not in shapes]
    return cost_fit.beside(times_of(older + newer), times_of(rows_of(beside))) | times_of(rows_of(again))


def times_of(rows: list[list]) -> dict[Product, Times]:
    found: dict[Product, Times] = defaultdict(dict)
    for weight, n, k, m, tile, split, us in rows:
        name = weight if ":" in weight else f"{weight}:128"  # records say either
        if split:
            row_tiles, parts, blocks, _, warps, _, *two_each = split
            way = tile, (row_tiles, parts, blocks, 1, warps, 0, any(two_each))
            found[name, n, k, m][way] = min(us, found[name, n, k, m].get(way, us))
    return found


def chosen_way(product: Product, tiles: set[int]) -> tuple[int, Split]:
    """The tile of these, and its split, that costs least."""
    name, n, k, m = product
    weight = Weight.of(name)
    tile = min(tiles, key=lambda tile: weight.tile_us(DECODE if tile < 8 else SM90, tile, m, n, k))
    if tile < 8:
        split = native.decode_split(weight.bits, tile, m, n, k, weight.decode[0])[0]
    else:
        for warps in (8, WHOLE):  # as csrc/templates/gemm_sm90.cuh tries them
            room = [native.has_room(parts, tile, weight.bits, warps, weight.fine) for parts in range(1, warps + 1)]
            fits = sum(has << parts for parts, has in enumerate(room, 1))
            sizes = -(-n // 16), -(-k // 128), tile, weight.bits, warps
            split = native.split_of(*sizes, [BLOCKS, PAIRS], fits, weight.narrow[0])
            if split[0]:
                break
    row_tiles, parts, blocks, _, warps, _, two_each = split
    return tile, (row_tiles, parts, blocks, 1, warps, 0, bool(two_each))


def lost_by_plan(products: dict[Product, Times]) -> dict[Product, float]:
    """Of products of which the chosen way was timed: how much slower it was than the fastest one."""
    chosen = {product: chosen_way(product, {tile for tile, _ in times}) for product, times in products.items()}
    return {
        product: times[chosen[product]] / min(times.values()) - 1
        for product, times in products.items()
        if chosen[product] in times
    }
