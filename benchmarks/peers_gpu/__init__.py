"""The sides that bench_matmul.py times on a GPU, one file a library; the peers are optional."""

from __future__ import annotations

from . import cublas_side, humming_side, lowbit_side, vllm_sides
from .side import Problem, Ready, Side, Unavailable

__all__ = ["PEERS", "Problem", "Ready", "Side", "Unavailable", "collect"]

#: Name -> the side of one weight type at a group size; raises Unavailable where that can't be.
PEERS = {
    "cublas": cublas_side.CublasSide,
    "marlin": vllm_sides.MarlinSide,
    "machete": vllm_sides.MacheteSide,
    "humming": humming_side.HummingSide,
}


def collect(types, acts, group, zeros, tiles, peers, scales=None) -> tuple[list[Side], dict[str, str]]:
    """Every side in the order it is timed, and why for each peer that is left out.

    types: lowbit's weight types; acts: types of x; tiles: kernels to force, or [None] for lowbit's own choice; scales:
    the type of lowbit's scales, or None for that of x.
    Raises SchemeError for a weight type that does not exist, KeyError for such a peer.
    """
    sides, skipped = [], {}
    for act in acts:
        seen = set()
        for dtype in types:
            sides += [lowbit_side.LowbitSide(dtype, act, group, zeros, tile, scales) for tile in tiles]
            for name in peers:
                try:
                    side = PEERS[name](dtype, act, group)
                except Unavailable as why:
                    skipped[f"{name} {dtype}"] = str(why)
                    continue
                if side.name not in seen:  # Why: cuBLAS has one side for all weight types.
                    seen.add(side.name)
                    sides.append(side)
    return sides, skipped
