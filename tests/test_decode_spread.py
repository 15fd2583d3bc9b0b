"""Risk: a cost or a rule of family decode changes, and products get splits that were measured to be slower, or blocks
that reach beyond a weight."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from native.emulated import built_of_kernels

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "nvidia-h200"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return built_of_kernels(tmp_path_factory.mktemp("spread"), "decode_spread_on_host.cpp")


def answers_of(program: Path, asked: str) -> list[str]:
    return subprocess.run([str(program)], input=asked, capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_block_that_is_launched_has_something_to_do(program):
    sizes = (1, 16, 17, 48, 100, 528, 1000, 1024, 1536, 2100, 2112, 4096)
    asked = [(bits, rows, n, k) for bits in (1, 4, 8) for rows in (1, 2, 4) for n in sizes for k in (128, 1000, 6144)]
    answers = answers_of(program, "".join("{} {} {} {}\n".format(*product) for product in asked))
    wrong = [product for product, answer in zip(asked, answers, strict=True) if len(answer.split()) != 6]
    assert not wrong, wrong


def full(n: int, split: tuple[int, ...]) -> bool:
    """Whether a launch had as many blocks as multiprocessors. Why it matters: by halves it has since (spread.cuh), with
    clusters of up to two blocks, and older times of others are too long."""
    row_groups, _, blocks, _, warps, _ = split
    return warps == 16 or blocks > 2 or -(-n // 16) * blocks >= 132 * row_groups


@pytest.mark.parametrize(
    ("sweep", "known", "average", "worst"),
    [
        ("sweep_splits_20261123_decode.json", 95, 0.009, 0.065),
        ("sweep_splits_20261123_decode_apart.json", 58, 0.0125, 0.065),
        ("sweep_splits_20261126_few_bits.json", 26, 0.009, 0.04),
        ("sweep_splits_20261126_many_bits.json", 40, 0.018, 0.1),
        ("sweep_splits_20261126_clusters.json", 130, 0.011, 0.085),
        ("sweep_splits_20261127_small_layers.json", 110, 0.018, 0.105),
    ],
)
def test_splits_that_are_chosen_are_close_to_the_fastest_that_were_measured(program, sweep, known, average, worst):
    """known: of how many products the split that is chosen was among those that were timed."""
    times = {}
    for dtype, n, k, rows, split, us in json.loads((RESULTS / sweep).read_text())["rows"]:
        if split and (sweep > "sweep_splits_20261127" or full(n, split)):
            times.setdefault((int(dtype[3:]), rows, n, k), {})[tuple(split)] = us
    asked = "".join(" ".join(map(str, product)) + "\n" for product in times)
    answers = answers_of(program, asked)
    chosen = {product: tuple(map(int, line.split())) for product, line in zip(times, answers, strict=True)}
    measured = [product for product in times if chosen[product] in times[product]]
    lost = {product: times[product][chosen[product]] / min(times[product].values()) - 1 for product in measured}
    assert len(lost) >= known
    assert sum(lost.values()) / len(lost) < average, sorted(lost.items(), key=lambda item: -item[1])[:5]
    assert max(lost.values()) < worst, max(lost, key=lost.get)
