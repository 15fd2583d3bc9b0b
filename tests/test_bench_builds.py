"""Risk: the comparison of builds says that the slower one is faster, counts a place twice, or loses what was timed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_builds  # noqa: E402

PRODUCT = ["int4", 4096, 8192, 8, None]


def test_libraries_are_not_loaded_before_a_build_has_named_its_own():
    code = "import bench_builds, sys; sys.exit(bench_builds.extension.is_loaded())"
    assert subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS).returncode == 0


def test_places_are_averaged_and_of_rounds_the_least_counts():
    rows = [["a", 0, *PRODUCT, 0, 12.0], ["a", 0, *PRODUCT, 1, 9.0], ["a", 1, *PRODUCT, 0, 11.0]]
    assert bench_builds.means(rows) == {tuple(PRODUCT): {"a": (10.0, 0.2)}}


def test_of_a_build_that_ran_more_often_only_rounds_of_all_count():
    rows = [["a", 0, *PRODUCT, 0, 12.0], ["b", 0, *PRODUCT, 0, 12.0], ["a", 1, *PRODUCT, 0, 11.0]]
    assert bench_builds.means(rows)[tuple(PRODUCT)] == {"a": (12.0, 0.0), "b": (12.0, 0.0)}


def test_others_are_held_against_the_first_build():
    rows = [["old", 0, *PRODUCT, 0, 10.0], ["new", 0, *PRODUCT, 0, 9.0], ["old", 0, *PRODUCT[:3], 16, None, 0, 1.0]]
    assert list(bench_builds.lines(rows, "old")) == [
        "int4 4096x8192 8 rows plan: 10.00 us, places 0.0% apart; new -10.0%",
        "new plan 8 rows: -10.00% (-10.0% to -10.0%)",
    ]


def test_builds_take_turns_and_one_that_fails_costs_nothing_else(monkeypatch):
    ran = []

    def runs(command, **_):
        folder = command[3]
        ran.append(folder)
        assert command[2] == "--run" and command[4:] == ["--ms", "8"]
        if folder == "bad" or (folder == "b" and len(ran) > 4):
            return SimpleNamespace(returncode=1, stdout="")
        return SimpleNamespace(returncode=0, stdout="a warning\n" + json.dumps([[*PRODUCT, 0, 5.0]]))

    monkeypatch.setattr(bench_builds.subprocess, "run", runs)
    builds = {"one": "a", "two": "b", "three": "bad"}
    rows, failed = bench_builds.in_turns(builds, ["--ms", "8"], 3, lambda: False)
    assert ran == ["a", "b", "bad", "b", "a", "a", "b"]
    assert failed == {"three": "exit status 1", "two": "exit status 1"}
    assert [row[:2] for row in rows] == [["one", 0], ["two", 0], ["two", 1], ["one", 1], ["one", 2]]


def test_no_build_runs_again_after_the_deadline(monkeypatch):
    monkeypatch.setattr(bench_builds.subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    assert bench_builds.in_turns({"one": "a", "two": "b"}, [], 2, lambda: True) == ([], {})


def test_a_dry_run_times_every_product_in_every_place():
    given = ["--dry", "--run", "x", "--types", "int4,int8", "--shapes", "32x64", "--ms", "1,3", "--places", "2"]
    rows = bench_builds.run(bench_builds.options([*given, "--least-ms", "0.1"]))
    wanted = [[dtype, 32, 64, m, None, place] for place in (0, 1) for dtype in ("int4", "int8") for m in (1, 3)]
    assert [row[:-1] for row in rows] == wanted
    assert all(row[-1] > 0 for row in rows)


def test_a_dry_run_compares_builds_and_tells_what_nobody_timed(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "liblowbit_cuda.so").write_bytes(b"one")
    builds = [f"one={tmp_path / 'x'}", "two=elsewhere"]
    given = ["--dry", "--shapes", "32x64", "--ms", "1", "--places", "1", "--rounds", "1", "--least-ms", "0.1"]
    assert bench_builds.main([*given, *builds, "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row[0] for row in found["rows"]] == ["one", "two"] and found["failed"] == {}
    assert found["builds"] == {"one": bench_builds.digest(str(tmp_path / "x")), "two": None}
    assert "two plan 1 rows" in capsys.readouterr().out
    assert bench_builds.main([*builds, *given, "--deadline", "0", "--out", "-"]) == 1
    assert "nothing was timed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [[], ["a=x"], ["a=x", "y"], ["a=x", "=y"], ["a=x", "b="], ["a=x", "a=y"], ["a=x", "b=y", "--places", "0"]],
    ids=str,
)
def test_what_can_not_be_compared_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        bench_builds.options(given)
    assert "expected two builds" in capsys.readouterr().err or "--places" in given
