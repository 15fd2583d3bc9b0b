"""Risk: the benchmark of tuning judges a choice by the wrong time, or ships ranges that gain nothing."""

import json
import sys
from pathlib import Path

import pytest
from test_plan import H200, needs_library
from test_tune import Timer, gpu, packed  # noqa: F401  (a fixture)
from test_tuned_cache import H

from lowbit import graph_timer
from lowbit.autotune import cache, plan
from lowbit.autotune.problem import Problem

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import bench_tune
import recheck_table

ROW = {"weight": "int4", "act": "float16", "shape": [64, 64], "m": 1, "us": {"a": 10.0, "b": 11.0, "c": 12.5}}


@pytest.fixture
def as_on_an_h200(monkeypatch):
    """Weights are packed, and kernels timed, as tests of lowbit.tune have it."""
    monkeypatch.setattr(graph_timer, "GraphTimer", Timer)
    monkeypatch.setattr(bench_tune, "packed", lambda dtype, act, n, k, group: packed(dtype, (n, k)))
    monkeypatch.setattr(bench_tune.plan, "device_of", lambda index: H200)


def test_losses_are_those_against_the_best_and_against_each_other():
    rows = [ROW | {"plan": "b", "default": "b", "tuned": "a"}, ROW | {"plan": "c", "default": "a", "tuned": "b"}]
    rows.append({**ROW, "us": {"a": 1.0}, "plan": "a", "default": "a", "tuned": "a"})  # nothing to choose
    rows.append(ROW | {"plan": "not timed", "default": "a", "tuned": "a"})
    assert bench_tune.losses(rows, "plan") == pytest.approx([0.1, 0.25])
    assert bench_tune.losses(rows, "tuned") == pytest.approx([0, 0.1, 0])
    assert bench_tune.losses(rows, "plan", "tuned") == pytest.approx([0.1, 12.5 / 11 - 1])
    tuning = [{"weight": "int4", "act": "float16", "seconds": s} for s in (0.5, 0.7)]
    lines = bench_tune.table(rows, tuning).splitlines()
    assert lines[2] == lines[3].replace("all", "int4 float16") and "| 66.7% | 0.60 (0.70) |" in lines[3]
    assert "| 17.50%, 25.0% | 3.33%, 10.0% | 3.33%, 10.0% |" in lines[3]


def test_without_a_gpu_the_sweep_is_judged(capsys):
    assert bench_tune.main(["--dry"]) == 0
    kinds = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert kinds[-1] == "| all" and len(kinds) == 9
    assert bench_tune.main(["--shapes", "64x64"]) == 2


@needs_library
@pytest.mark.usefixtures("gpu", "as_on_an_h200")
def test_a_run_records_times_and_ships_what_gains(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_tune.torch.cuda, "get_device_name", lambda index: H.device)
    args = bench_tune.options(["--shapes", "1024x512", "--ms", "1,40,64", "--heat-ms", "0"])
    rows, tuning, ship = [], [], {}
    bench_tune.one(args, "int4", "float16", 1024, 512, rows, tuning, ship)
    scheme = packed("int4", (1024, 512)).scheme
    first = [plan.candidates(scheme, "float16", m, 1024, 512, H200)[0].name for m in (1, 40, 64)]
    assert [(row["m"], row["plan"]) for row in rows] == list(zip((1, 40, 64), first, strict=True))
    assert first[1:] == ["w4a16_gemm_sm90_n32"] * 2
    assert [row["tuned"] for row in rows[1:]] == ["w4a16_gemm_sm90_n64"] * 2 and rows[1]["default"] == rows[1]["plan"]
    assert rows[1]["us"]["w4a16_gemm_sm90_n64"] == 1 and len(rows[1]["us"]) == 4
    assert tuning[0]["ranges"] > 20 and tuning[0]["seconds"] < 60
    ((problem, spans),) = ship.items()
    assert spans[33, 48]["w4a16_gemm_sm90_n64"] == 1 and all(len(times) == 2 for times in spans.values())
    path = tmp_path / "new" / "nvidia-h200.json"
    said = bench_tune.add_to_table(path, {problem: {(33, 48): spans[33, 48]}}, {"torch": "2"}, "today")
    assert said.startswith("1 problems, 1 ranges")
    bench_tune.add_to_table(path, {problem: {(49, 64): spans[49, 64]}}, {"torch": "2"}, "today")
    assert cache.read(path, device=H.device) == {problem: {span: spans[span] for span in ((33, 48), (49, 64))}}
    assert json.loads(path.read_text())["blocks"] == 132


def test_ranges_that_gain_nothing_any_more_leave_a_table():
    """By the plan of now: 3% are enough with few rows, not at the limit of power, and the same kernel gains nothing."""
    problem = Problem("int4", "float16", 64, 64, 128, "none")
    was = {(1, 8): {"a": 1.0, "b": 2.0}, (97, 128): {"a": 1.0, "b": 2.0}, (129, 144): {"a": 1.0, "b": 9.0}}
    was[145, 160] = {"b": 1.0, "c": 2.0}  # which the build of now has not, or which refuses
    us = {8: {"a": 1.0, "c": 1.03}, 128: {"a": 1.0, "c": 1.03}, 144: {"a": 5.0}, 160: {"c": 1.0}}
    asked = []

    def times(names, m):
        asked.append((names, m))
        return us[m]

    kept, rows = recheck_table.judge(problem, was, lambda m: "a" if m == 144 else "c", times)
    assert kept == {(1, 8): us[8]}
    assert asked == [(["a", "c"], 8), (["a", "c"], 128), (["a"], 144), (["b", "c"], 160)]
    assert rows[1] == ["int4", "float16", 64, 64, 128, "none", 97, 128, "a", 1.0, "c", 1.03, False]
    assert [row[-1] for row in rows] == [True, False, False, False]


@needs_library
@pytest.mark.usefixtures("gpu", "as_on_an_h200")
def test_what_wins_by_chance_alone_is_not_shipped(monkeypatch):
    """The tuner finds n64 faster than the plan's n32; timed again, all kernels are equal."""
    monkeypatch.setattr(bench_tune, "all_times", lambda timer, names, m, heat_ms: dict.fromkeys(names, 2.0))
    tuning, ship = [], {}
    bench_tune.one(bench_tune.options(["--ms", "40"]), "int4", "float16", 1024, 512, [], tuning, ship)
    assert tuning[0]["ranges"] > 20 and not ship


@needs_library
@pytest.mark.usefixtures("gpu", "as_on_an_h200")
def test_what_a_warm_device_decides_must_gain_more_to_be_shipped(monkeypatch):
    """n64 is 3% faster when timed again: enough for few rows, not where the limit of power may have decided it."""

    def three_percent(timer, names, m, heat_ms):
        return {name: 2.06 if i else 2.0 for i, name in enumerate(names)}

    monkeypatch.setattr(bench_tune, "all_times", three_percent)
    tuning, ship = [], {}
    bench_tune.one(bench_tune.options(["--ms", "40"]), "int4", "float16", 1024, 512, [], tuning, ship)
    ((_, spans),) = ship.items()
    assert tuning[0]["ranges"] > len(spans) > 0 and max(last for _, last in spans) < 96
