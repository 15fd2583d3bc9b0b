"""Risk: the benchmark of a call's host time measures another call than it says, or loses what it measured."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

import lowbit

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_host  # noqa: E402
import first_call  # noqa: E402

DRY = ["--dry", "--shape", "32x64", "--calls", "2", "--trials", "3"]


def test_dry_run_measures_prints_and_records(tmp_path, capsys):
    out = tmp_path / "host.json"
    argv = [*DRY, "--no-first", "--peers", "all", "--group", "32", "--out", str(out)]
    assert bench_host.main(argv) == 0
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    cases = [row["case"] for row in record["rows"]]
    assert {"F.linear", "torch.add", "lowbit.matmul", "lowbit.Linear", "two of lowbit.fuse, no bias"} <= set(cases)
    for row in record["rows"]:
        assert 0 < row["least_us"] <= row["us"] <= row["most_us"] and f"| {row['case']} |" in printed
    assert {"marlin", "machete", "humming"} <= set(record["skipped"]) and str(tmp_path) not in out.read_text()


def test_cases_make_the_products_that_they_name():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64).half(), torch.randn(32, 64).half() / 8
    exact = x.float() @ lowbit.quantize(weight, "int4", group_size=32, method="rtn").dequantize(torch.float32).T
    with torch.no_grad():
        cases = bench_host.lowbit_cases(x, weight, "int4", 32)
        for name in ("lowbit.matmul", "lowbit.matmul, bias", "lowbit.matmul, out"):
            y = cases[name]()
            # The bias is that of a new layer of torch: 1/8 at most.
            torch.testing.assert_close(y.float(), exact, rtol=1e-3, atol=0.13 if "bias" in name else 2e-3, msg=name)
        cases["two of lowbit.fuse, no bias"]()
    assert cases["lowbit.matmul, out"]() is cases["lowbit.matmul, out"]()


def test_drain_is_apart_from_the_time_of_the_calls():
    waited = []

    def wait():
        waited.append(1)
        if len(waited) % 2 == 0:
            time.sleep(0.02)

    row = bench_host.measure({"nothing": lambda: None}, 4, 3, wait)["nothing"]
    assert row["us"] < row["drain_us"] >= 4900 and len(waited) == 6
    assert "(the GPU was slower)" in bench_host.table({"nothing": row})


def test_first_call_reports_every_step(capsys):
    assert first_call.main(["lowbit", "--shape", "256x256", "--device", "cpu"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert list(row["seconds"]) == ["torch", "names", "made", "first", "again", "shape", "rows"]
    assert first_call.main(["marlin", "--device", "cpu", "--type", "int3"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == "it has kernels for int4 and int8"
    text = bench_host.first_table([row, {"side": "cublas", "seconds": {"torch": 2, "first": 0.4}}])
    assert "| cublas | 2000.0 | - | - | 400.0 | - | - | - |" in text


def test_a_process_that_fails_says_why():
    args = bench_host.options(["--first-shape", "0x0"])
    found, skipped = bench_host.first_calls(args, "cpu")
    assert found == [] and list(skipped) == ["first call of lowbit"] and skipped["first call of lowbit"] != "no reason"


def test_options():
    args = bench_host.options(["--peers", "all", "--shape", "16x32"])
    assert args.shape == (16, 32) and "humming" in args.peers and args.mode == "no_grad"
    for wrong in (["--peers", "cutlass"], ["--shape", "16"], ["--mode", "train"]):
        with pytest.raises(SystemExit) as caught:
            bench_host.options(wrong)
        assert caught.value.code == 2
