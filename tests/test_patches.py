"""Risk: a task is left out or done twice, or workers read from memory again what the last cache could keep."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native.build import load

#: Bytes of the cache that counts: what an H200 reads is about what one reads that forgets what was used longest ago.
CACHE = 30e6


@pytest.fixture(scope="module")
def native():
    return load("deal_math")


@given(row_blocks=st.integers(1, 40), token_tiles=st.integers(1, 40), patch=st.integers(1, 50))
def test_every_row_block_and_tile_of_tokens_is_a_task(native, row_blocks, token_tiles, patch):
    spots = [tuple(native.spot_of(task, row_blocks, token_tiles, patch)) for task in range(row_blocks * token_tiles)]
    assert sorted(spots) == [(row, tile) for row in range(row_blocks) for tile in range(token_tiles)]


@pytest.mark.parametrize(("token_tiles", "patch"), [(15, 8), (64, 16)])
def test_what_runs_at_the_same_time_reads_little(native, token_tiles, patch):
    """66 workers, 64 row blocks: those of one patch or of two, and as few tiles of tokens as fill them."""
    assert native.patch_of(token_tiles) == patch
    for turn in range(64 * token_tiles // 66):
        spots = [native.spot_of(turn * 66 + worker, 64, token_tiles, patch) for worker in range(66)]
        tiles = -(-66 // patch) + 1
        assert len({row for row, _ in spots}) <= 2 * patch and len({tile for _, tile in spots}) <= tiles


def memory_mb(native, product, patch: int) -> float:
    """What all workers read from memory, a stage each in turn, through a cache."""
    row_blocks, token_tiles, stages, most, weights, x = product
    walks: dict[int, list] = {}
    for worker, task, begin, end, _ in native.parts(row_blocks * token_tiles, stages, most, True):
        row, tile = native.spot_of(task, row_blocks, token_tiles, patch)
        walks.setdefault(worker, []).extend((row, tile, stage) for stage in range(begin, end))
    kept: OrderedDict = OrderedDict()
    used = found = 0
    for turn in range(max(map(len, walks.values()))):
        for walk in walks.values():
            if turn >= len(walk):
                continue
            row, tile, stage = walk[turn]
            for what, size in ((("w", row, stage), weights), (("x", tile, stage), x)):
                if what in kept:
                    kept.move_to_end(what)
                    continue
                kept[what], used, found = size, used + size, found + size
                while used > CACHE:
                    used -= kept.popitem(last=False)[1]
    return found / 1e6


def product(n: int, k: int, m: int, bits: int, tokens: int) -> tuple:
    """Row blocks, tiles of tokens, stages, workers, and bytes of a stage, by tiles of so many tokens on an H200."""
    rows, tiles = 256 if tokens == 256 else 128, -(-m // tokens)
    return -(-n // rows), tiles, k // 128, 66 if tokens == 256 else 132, rows * 16 * bits, -(-m // tiles) * 256


@pytest.mark.parametrize(
    ("n", "k", "m", "bits", "tokens", "most"),
    [
        (3584, 14336, 256, 8, 128, 0.55),  # every weight was read twice
        (3584, 14336, 384, 8, 192, 0.6),
        (5120, 27648, 384, 4, 192, 0.6),
        (3584, 14336, 2048, 4, 256, 0.6),  # x was
        (5120, 27648, 1536, 4, 192, 0.6),
        (5120, 17408, 2048, 8, 256, 0.8),
        (28672, 4096, 2048, 8, 256, 1),  # as much as before: the usual patch
        (8192, 8192, 4096, 8, 256, 1),
        (4608, 3584, 384, 4, 128, 1),  # all of it stays in the cache
    ],
)
def test_what_is_read_twice_stays_in_the_cache(native, n, k, m, bits, tokens, most):
    asked = product(n, k, m, bits, tokens)
    usual, best = min(native.patch_of(asked[1]), asked[0]), native.best_patch(*asked)
    assert (best == usual) == (most == 1)
    assert memory_mb(native, asked, best) <= most * memory_mb(native, asked, usual)


@given(
    row_blocks=st.integers(1, 2000), token_tiles=st.integers(1, 600), stages=st.integers(1, 300),
    most=st.integers(1, 140), weights=st.floats(1e3, 1e5), x=st.floats(1e3, 1e5),
)  # fmt: skip
def test_a_patch_has_row_blocks_that_there_are(native, row_blocks, token_tiles, stages, most, weights, x):
    assert 1 <= native.best_patch(row_blocks, token_tiles, stages, most, weights, x) <= row_blocks


@pytest.mark.parametrize(
    ("row_blocks", "token_tiles", "stages", "clusters", "meet"),
    [(10, 3, 113, 66, 2), (14, 2, 223, 39, 3), (14, 2, 87, 30, 4), (36, 1, 28, 39, 3)],
)
def test_blocks_of_a_cluster_that_share_a_task_take_the_usual_patch(
    native, row_blocks, token_tiles, stages, clusters, meet
):
    """All tasks are at the same stage; shares that were cut across tasks would have other ones here."""
    best = native.best_patch_of_clusters(row_blocks, token_tiles, stages, clusters, meet, 32768, 65536)
    assert best == min(native.patch_of(token_tiles), row_blocks)
