"""Fits the constants of csrc/cuda/plan.h to results of sweep_tiles.py, and says how good the choice of a tile is then.

    python benchmarks/fit_tile_costs.py benchmarks/results/nvidia-h200/tiles_20261122.json

Needs numpy and scipy, and a C++ compiler (the workers' shares are those of csrc/templates/deal.cuh itself).
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import tile_model
from measured_tiles import rows_of
from scipy.optimize import least_squares
from tile_model import Work, native

NARROW = 16  # tokens of the largest tile whose warps may share K: a set of constants for blocks of 8 and of 16 warps


def work_of(tile: int, bits: int, m: int, n: int, k: int) -> Work:
    if tile > NARROW:
        return tile_model.work_of(tile, n, k, m, bits)
    _, work, in_parts = native.narrow_work(-(-n // 16), -(-k // 128), tile, bits, [132, 66], False)
    return Work(work, 0.0, float(in_parts), tile_model.memory_us(n, k, bits))


def predict(x, bits, work: Work):
    """Of many products; x: start, parts, hot, then the step by bits."""
    return tile_model.predict(x[0], x[1], x[2], x[2 + bits], work, np.maximum)


def kind_of(tile: int, bits: int, n: int, k: int) -> tuple[int, int]:
    """A tile and the warps of its blocks, which matter where they may share K."""
    return tile, native.narrow_work(-(-n // 16), -(-k // 128), tile, bits, [132, 66], False)[0] if tile <= NARROW else 0


def fit(kind: tuple[int, int], rows: list) -> np.ndarray:
    tile, warps = kind
    bits = np.array([int(row[0][3:]) for row in rows])
    each = [work_of(tile, int(t[3:]), m, n, k) for t, n, k, m, _, _ in rows]
    work = Work(*map(np.array, zip(*each, strict=True)))
    us = np.array([row[-1] for row in rows])
    bounds = [0.8, 0.5, 0.0] + [0.05] * 8, [8, 12, 0.5] + [3] * 8
    best = None
    for hot in (0.02, 0.1, 0.2):  # from where it starts decides where a fit of maxima ends
        found = least_squares(
            lambda x: predict(x, bits, work) / us - 1,
            [2, 2, hot] + [0.5] * 8, bounds=bounds, loss="soft_l1", f_scale=0.05,
        )  # fmt: skip
        best = found if best is None or found.cost < best.cost else best
    found = best.x
    off = predict(found, bits, work) / us - 1
    steps = ", ".join(f"{step:.2f}f" for step in found[3:])
    start, parts, hot = found[:3]
    fitted = f"start {start:.1f}, parts {parts:.1f}, hot {hot:.2f}, step {{{steps}}}"
    blocks = f" of {warps} warps" if warps else ""
    print(f"n{tile}{blocks}: {fitted}; {len(us)} products, off by {off.std():.3f}")
    return found


def main(files: list[str]) -> int:
    rows = rows_of(files)
    by_kind, measured = defaultdict(list), defaultdict(dict)
    for row in rows:
        dtype, n, k, _, tile, us = row
        by_kind[kind_of(tile, int(dtype[3:]), n, k)].append(row)
        measured[tuple(row[:4])][tile] = us
    costs = {kind: fit(kind, by_kind[kind]) for kind in sorted(by_kind)}
    lost = []
    for (dtype, n, k, m), times in measured.items():
        if len(times) > 1:
            bits = int(dtype[3:])
            guess = {t: predict(costs[kind_of(t, bits, n, k)], bits, work_of(t, bits, m, n, k)) for t in times}
            lost.append((times[min(guess, key=guess.get)] / min(times.values()) - 1, dtype, n, k, m))
    share = sum(one[0] < 0.05 for one in lost) / len(lost)
    print(
        f"{len(lost)} products, {share:.1%} within 5% of the fastest tile, {np.mean([one[0] for one in lost]):.2%} lost"
    )
    for one in sorted(lost, reverse=True)[:8]:
        print("  ", f"{one[0]:.1%}", *one[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
