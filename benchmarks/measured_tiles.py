"""Results of sweep_tiles.py as a GPU that can be asked again: for judging a choice of kernels where there is no GPU."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from lowbit.autotune.plan import Candidate
from native.build import load

RESULTS = Path(__file__).parent / "results/nvidia-h200"
#: Every tile by blocks of whole multiprocessors; the same products by other blocks.
WHOLE = ("20261127", "20261127_small_layers", "20261127_all_bits")
ROWS = ("_rows", "_rows_all_bits", "_rows_of_few", "_rows_of_few_all_bits", "_all_blocks")
OTHERS = ("halves_20261127", *(f"20261127{which}" for which in ROWS))
FILES = tuple(RESULTS / f"tiles_{which}.json" for which in WHOLE + OTHERS)
#: Of sweep_splits.py: n8 and n16 since, with as many rows, by any split (the plan's is 0.6% behind the fastest).
SPLITS = RESULTS / "sweep_splits_20261128_n8_n16.json"
SM90, CLUSTERS = 2, [132, 66]
INTS = [f"int{bits}" for bits in range(1, 9)]
SMALLEST = 8  # tokens of a tile of family gemm_sm90; splits of decode have sweeps of their own


class Weight:
    """One weight of a sweep, intN in groups of 128 and x in float16: what each tile took, by rows of x."""

    def __init__(self, dtype: str, n: int, k: int):
        self.dtype, self.n, self.k = dtype, n, k
        self.us: dict[int, dict[int, float]] = defaultdict(dict)  # tile -> rows of x -> us
        self._native = load("deal_math")

    def __str__(self) -> str:
        return f"{self.dtype} {self.n}x{self.k}"

    def measured(self, m: int) -> dict[str, float]:
        """What the tiles took that were timed with m rows."""
        return {f"n{tile}": us[m] for tile, us in self.us.items() if m in us}

    def predicted(self, tile: int, m: int) -> float:
        # Why as if scales were uneven: the sweeps are older than kernels for even ones.
        question = [m, self.n, self.k], int(self.dtype[3:]), False, False, 128, 4, 90, CLUSTERS
        return self._native.tile_us(SM90, tile, *question)

    def plan(self, m: int) -> list[Candidate]:
        """The candidates of csrc/cuda/plan.h among the tiles of the sweep."""
        found = [(self.predicted(tile, m), f"n{tile}") for tile in self.us]
        return [Candidate(name, us) for us, name in sorted(found) if us < self._native.kLast]

    def guess(self, name: str, m: int) -> float:
        """Microseconds with any number of rows: as measured where the tile is repeated as often, else by how the
        prediction changes."""
        tile = int(name[1:])
        us, times = self.us[tile], -(-m // tile)
        alike = [rows for rows in us if -(-rows // tile) == times]
        near = min(alike or us, key=lambda rows: abs(rows - m))
        return us[near] if alike else us[near] * self.predicted(tile, m) / self.predicted(tile, near)


def weights(files=FILES, splits=SPLITS) -> list[Weight]:
    made: dict[tuple, Weight] = {}

    def improve(dtype: str, n: int, k: int, m: int, tile: int, us: float) -> None:
        """By another kind of blocks; fewer rows of as many tiles take no longer."""
        times = made[dtype, n, k].us.get(tile, {}) if (dtype, n, k) in made else {}
        for rows in times:
            if rows <= m and -(-rows // tile) == -(-m // tile):
                times[rows] = min(us, times[rows])

    for file in files:
        for dtype, n, k, m, tile, *blocks, us in json.loads(Path(file).read_text())["rows"]:
            if tile < SMALLEST or dtype not in INTS:
                continue
            if not blocks:
                made.setdefault((dtype, n, k), Weight(dtype, n, k)).us[tile].setdefault(m, us)
            improve(dtype, n, k, m, tile, us)
    for dtype, n, k, tile, split, us in json.loads(Path(splits).read_text())["rows"]:
        if split:
            improve(dtype, n, k, tile, tile, us)
    return list(made.values())
