"""What csrc/cuda/tile_costs.h takes a product by a tile of more than 16 tokens to cost, as whole_us there."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from native.build import load  # noqa: E402

native = load("deal_math")

PLAN = ROOT / "csrc/cuda/tile_costs.h"
BYTES_PER_US = 4.3e6
BLOCKS, PAIRS, CLUSTERS = 132, 66, [0, 132, 66, 39, 30]  # as tile_costs.h has it of an H200
NAMES = ("start", "meet", "more", "parts", "turn")  # of a line's constants, before those by bits
BY_BITS = ("step", "hot")
_LINE = re.compile(r"\{(\d+), (?:128|256), [01], " + r"([\d.]+)f, " * len(NAMES) + r"\{([\d., f]*)\}\}")
_HOT = re.compile(r"\{(\d+), \{([\d., f]*)\}\}")


_BLOCKS = re.compile(r"\{(\d+), (\d+), \d+, (\d+), \{([\d., f]*)\}, ([\d.]+f), \{([\d., f]*)\}\}")
_KIND = re.compile(r"\{([\d., f]*)\},? *// (float|fine|fine float|zeros)$", re.MULTILINE)

#: What work depends on beside bits: long groups without zeros that are no part of a value's number, of integers and of
#: floats; short groups of both; such zeros.
KINDS = ["int", "float", "fine", "fine float", "zeros"]
#: What kinds have numbers for: tiles of so many tokens at least, and of blocks that have one task each.
COLUMNS = ["32", "48", "64", "96", "144", "256", "32 halves", "64 halves", "32 rows", "64 rows"]


class Product(NamedTuple):
    n: int
    k: int
    m: int
    bits: int
    kind: str = "int"
    even: bool = False  # whether there are no zeros, and scales are even, by kernels for such


Way = tuple[int, int, int]  # tile; row tiles of a block that has one task, or 0; blocks of those whose sums meet


def numbers(text: str) -> list[float]:
    return [float(one.strip().rstrip("f")) for one in text.split(",")]


def column_of(way: Way) -> str:
    tile, row_tiles, _ = way
    if row_tiles:
        return f"{32 if tile == 32 else 64} {'rows' if row_tiles == 4 else 'halves'}"
    return str(max(least for least in map(int, COLUMNS[:6]) if least <= tile))


class Work(NamedTuple):
    """Steps of the busiest worker, and of all on average, of as many columns as the tile has; whether sums of blocks
    meet, and of how many beyond two; whether tasks are in parts; whole tasks of a worker beyond the first; microseconds
    of memory."""

    longest: float
    average: float
    met: float
    more: float
    parts: float
    turns: float
    memory: float


def costs() -> dict[int, dict]:
    """Tokens of a tile -> its constants, as they stand in tile_costs.h: NAMES, and lists of BY_BITS."""
    text = PLAN.read_text()
    found, hot = {}, {tokens: numbers(values) for tokens, values in _HOT.findall(text)}
    for tokens, *own, steps in _LINE.findall(text):
        values = [*map(float, own), numbers(steps), hot[tokens]]
        found[int(tokens)] = dict(zip((*NAMES, *BY_BITS), values, strict=True))
    return found


def block_costs() -> dict[tuple[int, int], tuple[int, list[float], list[float], list[float]]]:
    """The same of blocks that have one task each: tile and row tiles -> most steps, start by 1, 2 and 4 blocks whose
    sums meet, what idle multiprocessors save, step by bits."""
    return {
        (int(tokens), int(row_tiles)): (int(most), *map(numbers, lists))
        for tokens, row_tiles, most, *lists in _BLOCKS.findall(PLAN.read_text())
    }


def kind_costs() -> list[list[float]]:
    """What a step takes of kinds of weights, all but the first, by COLUMNS."""
    found = {name: numbers(values) for values, name in _KIND.findall(PLAN.read_text())}
    return [found[kind] for kind in KINDS[1:]]


def rounded_work(tile: int, product: Product) -> float:
    """What a step takes of that of exact values where the tile rounds them, beside fp16."""
    return native.rounded_work(product.bits, tile, product.even) if product.kind == "int" else 1.0


def idle_of(product: Product, way: Way) -> float:
    """The share of multiprocessors that have no block of those."""
    tile, row_tiles, blocks = way
    return 1 - -(-product.n // (16 * row_tiles)) * -(-product.m // tile) * blocks / BLOCKS


def steps_of_block(k: int, blocks: int) -> int:
    steps = -(-k // 128)
    return -(-steps // blocks)


def memory_us(n: int, k: int, bits: int) -> float:
    return n * k * (bits + 0.125) / 8 / BYTES_PER_US


@cache
def dealt_to(tile: int, n: int, k: int, m: int) -> list[int]:
    """How whole blocks share a product: numbers_of a MeetingDeal."""
    steps, blocks, tiles = -(-k // 128), -(-n // 128), -(-m // tile)
    tasks, pairs = blocks * tiles, (blocks + 1) // 2 * tiles
    if tile == 256:
        return native.best_deal_of_pairs(pairs, tasks, steps, CLUSTERS, native.kMostMeet)
    return native.best_deal(tasks, steps, CLUSTERS, native.kMostMeet, native.kMeetSaves)


def met_by(tile: int, product: Product) -> int:
    """Whole blocks whose sums meet."""
    return dealt_to(tile, *product[:3])[8]


@cache
def work_of(tile: int, product: Product) -> Work:
    n, k, m, bits, *_ = product
    steps, blocks, tiles, paired = -(-k // 128), -(-n // 128), -(-m // tile), tile == 256
    tasks, pairs, dealt = blocks * tiles, (blocks + 1) // 2 * tiles, dealt_to(tile, n, k, m)
    in_parts, longest, meet = dealt[4], dealt[5], dealt[8]
    average = (pairs / PAIRS if paired and meet == 1 else tasks / BLOCKS) * steps
    columns = 1 - native.kByColumns * (1 - native.columns_of_each(tile, m) / tile)
    return Work(
        longest * columns, average * columns, float(meet > 1), max(meet - 2.0, 0.0), float(in_parts),
        -(-tasks // BLOCKS) - 1.0, memory_us(n, k, bits),
    )  # fmt: skip


def predict(cost, step, hot, work: Work, larger=max):
    """Microseconds; of many products at once by tensors, and torch's ``maximum`` for ``larger``. cost: NAMES; step,
    hot: what the work of one step takes where some multiprocessors idle, and where all of them work."""
    steps = larger(work.longest * step, work.average * hot)
    ends = work.met * cost["meet"] + work.more * cost["more"] + work.parts * cost["parts"] + work.turns * cost["turn"]
    return cost["start"] + larger(steps, work.memory) + ends
