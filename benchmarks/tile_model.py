"""What csrc/cuda/plan.h takes a product by a tile of gemm_sm90 with more than 16 tokens to cost, for programs that find
its constants: us = start + max(work, memory) + parts, as gemm_us there.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from native.build import load  # noqa: E402

native = load("deal_math")

BYTES_PER_US = 4.3e6
BLOCKS, PAIRS, CLUSTERS = 132, 66, [0, 132, 66, 39, 30]  # as plan.h has it of an H200
#: What sums that meet cost, in parts of what a second kernel does: with 256 tokens, with fewer.
MEET_OF_256, MEET = 0.4, 0.3


class Work(NamedTuple):
    """Steps of the busiest worker, and of all on average, of as many columns as the tile has; how often ``parts`` is
    paid; microseconds of memory."""

    longest: float
    average: float
    ends: float
    memory: float


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
    ends = 1.0 if in_parts else (MEET_OF_256 if paired else MEET) if meet > 1 else 0.0
    columns = 1 - native.kByColumns * (1 - native.columns_of_each(tile, m) / tile)
    return Work(longest * columns, average * columns, ends, memory_us(n, k, bits))


def predict(start, parts, hot, step, work: Work, larger=max):
    """Microseconds; of many products at once by arrays, and numpy's ``maximum`` for ``larger``."""
    steps = larger(work.longest, work.average * (1 + hot)) * step
    return start + larger(steps, work.memory) + work.ends * parts
