"""Risk: a cost or a rule of family decode changes, and products get splits that were measured to be slower."""

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


@pytest.mark.parametrize(
    ("sweep", "known", "average", "worst"),
    [
        ("sweep_splits_20261123_decode.json", 95, 0.007, 0.05),
        ("sweep_splits_20261123_decode_apart.json", 59, 0.01, 0.05),
        ("sweep_splits_20261126_few_bits.json", 32, 0.011, 0.075),
        ("sweep_splits_20261126_many_bits.json", 48, 0.018, 0.075),
        ("sweep_splits_20261126_clusters.json", 187, 0.015, 0.21),
    ],
)
def test_splits_that_are_chosen_are_close_to_the_fastest_that_were_measured(program, sweep, known, average, worst):
    """known: of how many products the split that is chosen was among those that were timed."""
    times = {}
    for dtype, n, k, rows, split, us in json.loads((RESULTS / sweep).read_text())["rows"]:
        if split:
            times.setdefault((int(dtype[3:]), rows, n, k), {})[tuple(split)] = us
    asked = "".join(" ".join(map(str, product)) + "\n" for product in times)
    answers = subprocess.run(
        [str(program)], input=asked, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    chosen = {product: tuple(map(int, line.split())) for product, line in zip(times, answers, strict=True)}
    measured = [product for product in times if chosen[product] in times[product]]
    lost = {product: times[product][chosen[product]] / min(times[product].values()) - 1 for product in measured}
    assert len(lost) >= known
    assert sum(lost.values()) / len(lost) < average, sorted(lost.items(), key=lambda item: -item[1])[:5]
    assert max(lost.values()) < worst, max(lost, key=lost.get)
