"""Which weights and how many tokens each kernel is tried with: pseudo-random, always the same, all covered.

A weight type has 36 ways to be grouped (6 group sizes x 3 zero kinds x 2 types of scales). Each is tried with some of
the shapes, dealt out anew for every type, so many that each kernel of the type gets four or more, others for every
type: over all types each tile meets every way and every shape. tests/test_gpu_plan.py counts it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from lowbit.dtypes import weight_id, weight_type
from lowbit.scheme import GROUP_SIZES, WHOLE_ROW, ZERO_KINDS

from .kernels import tokens

#: N x K: one row, ragged rows, less than a tile of k, K that no group divides, odd K, many tiles of either. 4 rows of x
#: fit into shared memory where blocks share them; those of LONG may not.
SHAPES = (
    (1, 16),
    (1, 6152),
    (17, 16),
    (17, 1000),
    (64, 256),
    (200, 6152),
    (33, 203),
    (130, 4096),
    (2064, 2048),
    (4112, 1088),
    (264, 7168),
    (20000, 256),
)
LONG = (48, 28672)
WAYS = tuple(product((*GROUP_SIZES, WHOLE_ROW), ZERO_KINDS, ("float16", "bfloat16")))


@dataclass(frozen=True)
class Case:
    """One weight to try, and the numbers of rows of x."""

    weight: str
    shape: tuple[int, int]
    group_size: int
    zero_kind: str
    scale_type: str
    ms: tuple[int, ...]


def cases(rows: list[dict]) -> dict[str, list[Case]]:
    """What to try with each kernel, by name, for rows of the manifest; ``ms`` ends with the tokens of its tile."""
    found: dict[str, list[Case]] = {}
    by_weight: dict[str, list[str]] = {}
    for row in rows:
        by_weight.setdefault(row["weight"], []).append(row["name"])
    for weight, names in by_weight.items():
        turn, ways = weight_id(weight_type(weight)), WAYS * -(-4 * len(names) // len(WAYS))
        # Why these words: with them chance leaves out no shape for any tile.
        shapes = random.Random(f"shapes of {weight}").sample((SHAPES * len(ways))[: len(ways)], len(ways))
        for i, way in enumerate(ways):
            # Why 8, and one more each time round: so that every kernel meets every way with some weight.
            name = names[(i + 8 * turn + i // len(names)) % len(names)]
            most, before = tokens(name), len(found.get(name, ()))
            ms = {1 + (7 * turn + 37 * before) % most, most} | ({1} if before % 2 else set())
            found.setdefault(name, []).append(Case(weight, shapes[i], *way, tuple(sorted(ms))))
    return found
