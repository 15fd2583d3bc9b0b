"""Fits the constants of csrc/cuda/plan.h to results of sweep_tiles.py, and says how good the choice of a tile is then.

    python benchmarks/fit_tile_costs.py benchmarks/results/nvidia-h200/tiles_20261122.json

Needs numpy and scipy, and a C++ compiler (the workers' shares are those of csrc/templates/deal.cuh itself).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from measured_tiles import rows_of  # noqa: E402

from native.build import load  # noqa: E402

BYTES_PER_US = 4.3e6
BLOCKS = {256: 66}  # pairs of blocks; of other tiles 132 blocks
NARROW = 16  # tokens of the largest tile whose warps may share K: a set of constants for blocks of 8 and of 16 warps


def work_of(native, tile: int, bits: int, m: int, n: int, k: int) -> tuple[int, float, bool, float]:
    """Steps of the busiest worker and of all on average, whether tasks are in parts, and microseconds of memory."""
    memory = n * k * (bits + 0.125) / 8 / BYTES_PER_US
    if tile <= NARROW:
        _, work, in_parts = native.narrow_work(-(-n // 16), -(-k // 128), tile, bits, [132, 66])
        return work, 0.0, in_parts, memory
    rows, most = 256 if tile == 256 else 128, BLOCKS.get(tile, 132)
    tasks, steps = -(-n // rows) * -(-m // tile), -(-k // 128)
    clusters = [0, most, 66, 39, 30]  # as plan.h has it of pairs
    dealt = native.best_deal(tasks, steps, clusters, native.most_meet_of(tile), native.kMeetSaves)
    in_parts, longest = dealt[4], dealt[5]
    return longest, tasks * steps / most, bool(in_parts), memory


def predict(x, bits, longest, average, in_parts, memory):
    """us = start + work + parts; x: start, parts, hot, then the step by bits."""
    work = np.maximum(np.maximum(longest, average * (1 + x[2])) * x[2 + bits], memory)
    return x[0] + work + in_parts * x[1]


def kind_of(native, tile: int, bits: int, n: int, k: int) -> tuple[int, int]:
    """A tile and the warps of its blocks, which matter where they may share K."""
    return tile, native.narrow_work(-(-n // 16), -(-k // 128), tile, bits, [132, 66])[0] if tile <= NARROW else 0


def fit(native, kind: tuple[int, int], rows: list) -> np.ndarray:
    tile, warps = kind
    numbers = [(int(t[3:]), *work_of(native, tile, int(t[3:]), m, n, k)) for t, n, k, m, _, _ in rows]
    bits, longest, average, in_parts, memory = map(np.array, zip(*numbers, strict=True))
    us = np.array([row[-1] for row in rows])
    bounds = [0.8, 0.5, 0.0] + [0.05] * 8, [8, 12, 0.5] + [3] * 8
    best = None
    for hot in (0.02, 0.1, 0.2):  # from where it starts decides where a fit of maxima ends
        found = least_squares(
            lambda x: predict(x, bits, longest, average, in_parts, memory) / us - 1,
            [2, 2, hot] + [0.5] * 8, bounds=bounds, loss="soft_l1", f_scale=0.05,
        )  # fmt: skip
        best = found if best is None or found.cost < best.cost else best
    found = best.x
    off = predict(found, bits, longest, average, in_parts, memory) / us - 1
    steps = ", ".join(f"{step:.2f}f" for step in found[3:])
    start, parts, hot = found[:3]
    fitted = f"start {start:.1f}, parts {parts:.1f}, hot {hot:.2f}, step {{{steps}}}"
    blocks = f" of {warps} warps" if warps else ""
    print(f"n{tile}{blocks}: {fitted}; {len(us)} products, off by {off.std():.3f}")
    return found


def main(files: list[str]) -> int:
    rows = rows_of(files)
    native, by_kind, measured = load("deal_math"), defaultdict(list), defaultdict(dict)
    for row in rows:
        dtype, n, k, _, tile, us = row
        by_kind[kind_of(native, tile, int(dtype[3:]), n, k)].append(row)
        measured[tuple(row[:4])][tile] = us
    costs = {kind: fit(native, kind, by_kind[kind]) for kind in sorted(by_kind)}
    lost = []
    for (dtype, n, k, m), times in measured.items():
        if len(times) > 1:
            bits = int(dtype[3:])
            guess = {
                t: predict(costs[kind_of(native, t, bits, n, k)], bits, *work_of(native, t, bits, m, n, k))
                for t in times
            }
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
