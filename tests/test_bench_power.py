"""Risk: the benchmark of power reads another clock or another moment than it says."""

import sys
from datetime import datetime
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_power  # noqa: E402


def test_lines_of_the_watcher_become_samples(tmp_path):
    log = tmp_path / "log"
    log.write_text("2026/11/24 22:40:01.250, 1785, 741.20, 0x0000000000000004, 55\n")
    assert bench_power.samples(str(log)) == [
        (datetime(2026, 11, 24, 22, 40, 1, 250000), 1785.0, 741.2, "0x0000000000000004", 55.0)
    ]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    log = tmp_path / "log"
    log.write_text("2026/11/24 22:40:01.250, 1785, 741.20, 0x4, 55\n2026/11/24 22:40:01.270, 17")
    assert len(bench_power.samples(str(log))) == 1
