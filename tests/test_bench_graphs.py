"""Risk: the benchmark of the memory of graphs counts what is not theirs, or graphs that compute something else."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch

import lowbit

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_graphs  # noqa: E402
import decoder_layer  # noqa: E402

DRY = ["--dry", "--layers", "2", "--ms", "1,2,3", "--vocabulary", "320"]


def test_dry_run_verifies_prints_and_records(tmp_path, capsys):
    out = tmp_path / "graphs.json"
    assert bench_graphs.main([*DRY, "--out", str(out)]) == 0
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert [(r["way"], r["logits"], r["graphs"], r["equal"]) for r in record["rows"]] == [
        ("lowbit.graphs", False, 3, True),
        ("lowbit.graphs", True, 3, True),
    ]
    assert "| logits | lowbit.graphs |" in printed and str(tmp_path) not in out.read_text()


def test_random_weights_are_what_the_formula_of_the_layout_says():
    torch.manual_seed(0)
    model = bench_graphs.Decoder(decoder_layer.SHAPES["tiny"], 1, 0, "cpu")
    pw = model.layers[0]["down"]
    x = torch.randn(2, 512).half()
    exact = x.float() @ pw.dequantize(torch.float32).T
    torch.testing.assert_close(lowbit.matmul(x, pw).float(), exact, rtol=5e-3, atol=5e-3)
    assert 0.8 < exact.std() < 1.2 and model(torch.randn(2, 256).half()).isfinite().all()


@pytest.mark.parametrize("way", [way for way in bench_graphs.WAYS if way != "lowbit.graphs"])
def test_torchs_ways_capture_each_size_into_the_pool_that_they_name(way, monkeypatch):
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: log.append(pool) or contextlib.nullcontext())
    made = bench_graphs.WAYS[way](lambda x: x + 1, [1, 2, 4], torch.randn(4, 2))
    assert log == [None if way == "a pool each" else "pool"] * 3
    sizes = [(m, len(x), len(y)) for m, x, _, y in made]
    order = (4, 2, 1) if "largest" in way else (1, 2, 4)
    assert sizes == [(m, m, m) for m in order]
    made[0][2]()
    assert log[-1] == "replay"


def test_shares_are_of_a_pool_for_each():
    def row(way, device, reserved):
        return {"way": way, "logits": True, "equal": True, "seconds": 1, "device_mb": device, "reserved_mb": reserved}

    text = bench_graphs.table([row("a pool each", 1000, 800), row("lowbit.graphs", 110, 40)])
    assert "| logits | lowbit.graphs | 110.0 | 0.110 * | 40.0 | 0.050 | 1.0 | yes |" in text


def test_options():
    args = bench_graphs.options([])
    assert args.ms == list(range(1, 65)) and args.layers == 32 and len(args.ways) == 4
    for wrong in (["--ms", "2,1"], ["--ms", "0"], ["--ways", "none"]):
        with pytest.raises(SystemExit) as caught:
            bench_graphs.options(wrong)
        assert caught.value.code == 2
