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
NAMES = ("start", "meet", "more", "parts", "turn", "hot")  # of a line's constants, before the steps
_LINE = re.compile(r"\{(\d+), (?:128|256), [01], " + r"([\d.]+)f, " * len(NAMES) + r"\{([\d., f]*)\}\}")


_HALF = re.compile(r"\{(\d+), \d+, \{([\d., f]*)\}, \{([\d., f]*)\}\}")


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
    """Tokens of a tile -> its constants, as they stand in tile_costs.h: NAMES, and ``step`` by bits."""
    found = {}
    for tokens, *numbers, steps in _LINE.findall(PLAN.read_text()):
        each = [float(step.strip().rstrip("f")) for step in steps.split(",")]
        found[int(tokens)] = dict(zip(NAMES, map(float, numbers), strict=True)) | {"step": each}
    return found


def half_costs() -> dict[int, list[list[float]]]:
    """The same of blocks of half of a multiprocessor: start by 1, 2 and 4 blocks whose sums meet, step by bits."""
    return {
        int(tokens): [[float(one.strip().rstrip("f")) for one in numbers.split(",")] for numbers in lists]
        for tokens, *lists in _HALF.findall(PLAN.read_text())
    }


def memory_us(n: int, k: int, bits: int) -> float:
    return n * k * (bits + 0.125) / 8 / BYTES_PER_US


@cache
def work_of(tile: int, n: int, k: int, m: int, bits: int) -> Work:
    steps, blocks, tiles = -(-k // 128), -(-n // 128), -(-m // tile)
    tasks, pairs, paired = blocks * tiles, (blocks + 1) // 2 * tiles, tile == 256
    if paired:
        dealt = native.best_deal_of_pairs(pairs, tasks, steps, CLUSTERS, native.kMostMeet)
    else:
        dealt = native.best_deal(tasks, steps, CLUSTERS, native.kMostMeet, native.kMeetSaves)
    in_parts, longest, meet = dealt[4], dealt[5], dealt[8]
    average = (pairs / PAIRS if paired and meet == 1 else tasks / BLOCKS) * steps
    columns = 1 - native.kByColumns * (1 - native.columns_of_each(tile, m) / tile)
    return Work(
        longest * columns, average * columns, float(meet > 1), max(meet - 2.0, 0.0), float(in_parts),
        -(-tasks // BLOCKS) - 1.0, memory_us(n, k, bits),
    )  # fmt: skip


def predict(cost, step, work: Work, larger=max):
    """Microseconds; of many products at once by tensors, and torch's ``maximum`` for ``larger``. cost: NAMES."""
    steps = larger(work.longest, work.average * (1 + cost["hot"])) * step
    ends = work.met * cost["meet"] + work.more * cost["more"] + work.parts * cost["parts"] + work.turns * cost["turn"]
    return cost["start"] + larger(steps, work.memory) + ends
