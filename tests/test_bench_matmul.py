"""Risk: the benchmark of the GPU times a wrong answer, counts what it should not, or loses what it measured."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

import lowbit

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_matmul  # noqa: E402
import gpu_record  # noqa: E402
import gpu_timing  # noqa: E402
import matmul_report as report  # noqa: E402
import peers_gpu  # noqa: E402
from peers_gpu import side as sides  # noqa: E402
from peers_gpu.vllm_sides import words_along_k  # noqa: E402

DRY = ["--dry", "--shapes", "64x128", "--ms", "1,3", "--least-ms", "0.1"]


def fake(family="lowbit", bits=4, m=1, us=10.0, shape=(8192, 8192), **other):
    weight = None if bits == 16 else f"int{bits}"
    row = {
        "side": " ".join(filter(None, [family, weight, other.get("tile")])), "family": family, "weight": weight,
        "bits": bits, "act": "float16", "tile": None, "shape": list(shape), "m": m, "group": 128, "zeros": "none",
        "copies": 2, "bytes": 1000, "err": 2e-4, "wrong": False, "us": us, "least_us": us, "most_us": us,
        "how": "graph", "tbs": 1.5,
    }  # fmt: skip
    return row | other


# ---- a run ----------------------------------------------------------------------------------------------------------


def test_dry_run_verifies_times_prints_and_records(tmp_path, capsys):
    out = tmp_path / "new" / "result.json"
    argv = [*DRY, "--types", "int4,uint3", "--acts", "float16,bfloat16", "--peers", "all", "--out", str(out)]
    assert bench_matmul.main(argv) == 0
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    for key in ("format", "command", "date", "seconds", "versions", "device", "method", "skipped", "rows"):
        assert key in record
    assert record["device"] == {"name": "dry run"} and str(tmp_path) not in out.read_text()
    found = {(r["side"], r["act"], r["m"]) for r in record["rows"]}
    names = ("lowbit int4", "lowbit uint3", "cublas")
    assert found >= {(s, act, m) for s in names for act in ("float16", "bfloat16") for m in (1, 3)}
    for row in record["rows"]:
        assert row["us"] > 0 and row["err"] < 4e-3 and not row["wrong"] and row["how"] == "host"
        assert f"| {row['side']} |" in printed
    assert {"marlin uint3", "machete uint3"} <= set(record["skipped"])
    assert "without marlin uint3: it has kernels for int4 and int8" in printed


def test_wrong_answer_is_not_timed_and_fails_the_run(tmp_path, monkeypatch, capsys):
    right = lowbit.matmul
    monkeypatch.setattr(lowbit, "matmul", lambda x, pw: right(x, pw) * 1.01)
    assert bench_matmul.main([*DRY, "--out", str(tmp_path / "r.json")]) == 1
    (row, _) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["wrong"] and row["us"] is None and row["tbs"] is None and 9e-3 < row["err"] < 2e-2
    assert "WRONG (1.0e-02)" in capsys.readouterr().out


def test_deadline_leaves_out_and_says_so(capsys):
    assert bench_matmul.main([*DRY, "--deadline", "0", "--out", "-"]) == 0
    assert "without lowbit int4 float16 64x128: the deadline had passed" in capsys.readouterr().out


def test_a_side_that_fails_costs_no_other(monkeypatch, capsys):
    def fails(self, problem):
        raise RuntimeError("no such thing\nmore")

    monkeypatch.setattr(peers_gpu.cublas_side.CublasSide, "open", fails)
    assert bench_matmul.main([*DRY, "--peers", "cublas", "--out", "-"]) == 0
    printed = capsys.readouterr().out
    assert "| lowbit int4 |" in printed and "without cublas float16 64x128: RuntimeError: no such thing\n" in printed


def test_options():
    args = bench_matmul.options(["--targets"])
    assert args.types == [f"int{bits}" for bits in (1, 2, 3, 4, 6, 8)] and args.ms == [1, 8, 16]
    assert set(args.shapes) == {shape for shape, _ in report.TARGETS}
    assert bench_matmul.options(["--targets", "--types", "int4"]).types == ["int4"]
    assert len(bench_matmul.options(["--types", "all"]).types) == 26
    args = bench_matmul.options(["--shapes", "models,6144x4096,16x32"])
    assert len(args.shapes) == 13 and args.shapes[-1] == (16, 32)
    for wrong in (["--acts", "int8"], ["--peers", "cutlass"], ["--shapes", "16"], ["--ms", "0"], ["--zeros", "none"]):
        with pytest.raises(SystemExit) as caught:
            bench_matmul.options(wrong)
        assert caught.value.code == 2
    assert bench_matmul.main(["--dry", "--types", "int9"]) == 2


def test_command_holds_no_folder():
    given = ["--targets", "--out", "/home/somebody/r.json"]
    assert gpu_record.command(given, "bench_matmul.py") == "python benchmarks/bench_matmul.py --targets --out r.json"


def test_sides_take_turns_in_another_order_each_time_after_heat_of_their_own():
    done, clock = [], {"a": 2.0, "b": 0.5, "c": 1.0}
    sides = {name: lambda name=name: done.append(name) for name in clock}

    def watch(once):
        def timed(turns):
            before = len(done)
            for _ in range(turns):
                once()
            return sum(clock[name] for name in done[before:]) / turns

        return timed

    found = gpu_timing.in_turns(sides, 2.0, rounds=6, watch=watch)
    assert found == {name: [ms] * 6 for name, ms in clock.items()}
    # Twice to find their turns (1, 4, 2), a round that is not kept, six that are.
    rounds = [done[i : i + 7] for i in range(6, len(done), 7)]
    assert len(rounds) == 7 and all(sorted(one) == sorted("abbbbcc") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 2

    done.clear()
    gpu_timing.in_turns(sides, 2.0, rounds=2, heat_ms=8.0, watch=watch)
    hot = [[name, len(list(some))] for name, some in itertools.groupby(done[6 + 7 :])]
    # 8 ms of heat and 2 of what is kept, of each side at a time: 4 + 1, 16 + 4, 8 + 2 turns.
    assert sum(turns for _, turns in hot) == 2 * (5 + 20 + 10) and len(hot) in (5, 6)
    assert all(turns % {"a": 5, "b": 20, "c": 10}[name] == 0 for name, turns in hot)
    timing = gpu_timing.summary([4.0, 2.0, 3.0], 2, "graph")
    assert (timing.us, timing.least, timing.most, timing.how) == (1500, 1000, 2000, "graph")


# ---- sides ----------------------------------------------------------------------------------------------------------


def test_copies_miss_the_cache():
    assert gpu_timing.copies_for(2_360_000, 60 << 20) * 2_360_000 >= 190_000_000
    assert gpu_timing.copies_for(2_360_000, 126 << 20) * 2_360_000 >= 3 * (126 << 20)
    assert gpu_timing.copies_for(500_000_000, 60 << 20) == 2


def test_copies_are_weights_of_their_own():
    problem = peers_gpu.Problem.make(64, 128, "cpu", lambda nbytes: 5)
    side = peers_gpu.lowbit_side.LowbitSide("uint4", "float16", 32, "min")
    ready, x = side.open(problem), torch.randn(2, 128).half()
    weights = problem.kept["weights"]
    assert len(ready.calls) == 5 and weights[0].zero_kind == "min" and ready.nbytes == weights[0].nbytes
    for tensor in ("codes", "scales", "zeros"):
        assert len({getattr(pw, tensor).data_ptr() for pw in weights}) == 5
    answers = [call(x) for call in ready.calls]
    assert all(torch.equal(y, answers[0]) for y in answers)
    assert sides.error(answers[0], sides.exact_product(x, ready.reference)) < 5e-4
    weights[3].codes.data.zero_()
    assert not torch.equal(ready.calls[3](x), answers[0]) and torch.equal(ready.calls[4](x), answers[0])


def test_forced_kernel_of_this_build_only():
    side = peers_gpu.lowbit_side.LowbitSide("int4", "float16", 32, None, "n9")
    problem = peers_gpu.Problem.make(64, 128, "cpu", lambda nbytes: 2)
    with pytest.raises(peers_gpu.Unavailable, match="no kernel for int4, float16 and tile n9"):
        side.open(problem)
    assert side.serves(9) and not side.serves(10)


def test_peers_without_a_quantizer_mean_what_they_say():
    weight = torch.randn(16, 64).half()
    codes, scales, meant = sides.symmetric_codes(weight, 4, 32)
    assert codes.min() >= 0 and codes.max() <= 15 and scales.shape == (16, 2)
    assert torch.equal(meant, (codes - 8) * scales.float().repeat_interleave(32, 1))
    assert (meant - weight).abs().max() <= scales.max() / 2 * 1.01
    words = words_along_k(codes, 4)
    assert words.shape == (8, 16) and words.dtype == torch.int32
    assert torch.equal((words[3] >> 20) & 15, codes[:, 3 * 8 + 5])


# ---- tables and plots -----------------------------------------------------------------------------------------------


def test_table_has_a_line_a_side_and_the_worst_error():
    rows = [fake(m=1), fake(m=8, us=12.5, err=4e-4), fake("cublas", 16, m=8, us=36.7), fake(m=1, us=9, tile="n8")]
    rows.append(fake("marlin", m=1, us=16, how="loop: no"))
    text = report.table(rows, (8192, 8192), "float16")
    assert "| lowbit int4 | 10.0 (1.50) | 12.5 (1.50) | 4.0e-04 |" in text
    assert "| cublas | - | 36.7 (1.50) |" in text and "| lowbit int4 n8 | 9.0" in text and "16.0!" in text


def test_targets_stand_beside_what_was_measured():
    rows = [
        fake(us=8.9),
        fake(bits=8, us=17),
        fake(us=5, tile="n8"),
        fake("marlin", us=16),
        fake("cublas", 16, us=37),
    ]
    rows += [
        fake(us=1, act="bfloat16"),
        fake(us=1, group=64),
        fake("humming", 8, us=1),
        fake(us=3.5, shape=(4096, 4096)),
    ]
    lines = report.targets(rows).splitlines()
    assert (
        lines[2] == "| 8192x8192 | 1 | - / 4.5 | - / 5.5 | - / 7.2 | 8.9 / 9 | - / 13 | 17.0 / 16.8 * | 16.0 marlin |"
    )
    assert "3.5 / 3.3 *" in lines[5] and len(lines) == 2 + len(report.TARGETS)


def test_speedups_are_geometric_means_beside_the_best_peer():
    rows = [fake(us=10), fake(m=8, us=10), fake("marlin", us=20), fake("marlin", m=8, us=90)]
    rows += [fake("cublas", 16, us=40), fake("cublas", 16, m=8, us=45), fake("humming", 8, us=1)]
    (line,) = report.speedups(rows).splitlines()[2:]
    # Beside the best: 2 and 4.5; marlin: 2 and 9; cublas: 4 and 4.5.
    assert line == "| int4 float16 | 3.00 (2) | 2.00 | 8192x8192 M=1 | 4.24 (2) | 4.24 (2) | - |"
    assert report.speedups([fake()]) == ""


def test_plot_of_a_result_file(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    import plot_matmul

    rows = [fake(bits=b, m=m, us=b + m) for b in (1, 4) for m in (1, 8)] + [fake("cublas", 16), fake(us=None)]
    rows += [fake(tile="n1"), fake(shape=(64, 64))]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"date": "2026-11-21", "device": {"name": "a GPU"}, "rows": rows}))
    assert plot_matmul.main([str(path)]) == 0
    assert "<svg" in path.with_suffix(".svg").read_text()
    assert plot_matmul.main([str(path), "--shape", "8192x8192", "--out", str(tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    curves = plot_matmul.curves(plot_matmul.rows_of([{"rows": rows}], (8192, 8192), "float16"), "bits", "m")
    assert curves[("lowbit", 8)][0] == [1, 4] and ("cublas", 1) in curves
    # 2 x 8192 x 8192 x 8 operations in 12 us.
    assert curves[("lowbit", 8)][1][1]["tflops"] == pytest.approx(89.478, rel=1e-4)
