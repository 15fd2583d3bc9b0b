"""Risk: the benchmark of packing and expanding stops working, or counts other bytes than are moved."""

import json
import sys
from pathlib import Path

from .kernels import needs_kernels

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path[:0] = [BENCHMARKS] if BENCHMARKS not in sys.path else []

import bench_memory  # noqa: E402

pytestmark = needs_kernels


def test_every_move_is_timed_with_its_bytes(tmp_path):
    out = tmp_path / "memory.json"
    assert bench_memory.main(["--types", "int4,float8_e4m3", "--shape", "1024x2048", "--out", str(out)]) == 0
    rows = {(row["weight"], row["what"]): row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {(t, what) for t in ("int4", "float8_e4m3") for what in ("pack", "unpack", "expand")}
    assert all(row["how"] == "graph" and row["us"] > 0 for row in rows.values())
    codes, scales = 1024 * 2048 // 2, 1024 * 2048 // 128 * 2
    assert rows["int4", "pack"]["bytes"] == rows["int4", "unpack"]["bytes"] == 2 * codes
    assert rows["int4", "expand"]["bytes"] == codes + scales + 1024 * 2048 * 2
