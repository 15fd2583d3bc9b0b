"""Risk: the benchmark of a layer's chain times a wrong answer, or chains that are not the same for all sides."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import lowbit

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_chain  # noqa: E402
import chain_report  # noqa: E402
import decoder_layer  # noqa: E402
from peers_gpu.side import Problem, Ready, Side, error  # noqa: E402

DRY = ["--dry", "--models", "tiny", "--ms", "1,3", "--least-ms", "0.1"]


def test_dry_run_verifies_times_prints_and_records(tmp_path, capsys):
    out = tmp_path / "new" / "chain.json"
    assert bench_chain.main([*DRY, "--types", "int4,uint3", "--peers", "all", "--out", str(out)]) == 0
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    assert record["command"].startswith("python benchmarks/bench_chain.py") and str(tmp_path) not in out.read_text()
    names = {"lowbit int4", "lowbit int4 apart", "lowbit uint3", "lowbit uint3 apart", "cublas", "small kernels alone"}
    assert {(r["side"], r["m"]) for r in record["rows"]} == {(name, m) for name in names for m in (1, 3)}
    for row in record["rows"]:
        assert row["us"] > 0 and not row["wrong"] and f"| {row['side']} |" in printed
        assert row["family"] == "small" or row["err"] < 4 * 5e-4
    assert "without marlin uint3" in printed


def test_wrong_answer_is_not_timed_and_fails_the_run(monkeypatch, capsys):
    right = lowbit.matmul
    monkeypatch.setattr(lowbit, "matmul", lambda x, pw: right(x, pw) * (1.05 if pw.shape == (1024, 256) else 1))
    assert bench_chain.main([*DRY, "--out", "-"]) == 1
    assert "| lowbit int4 | WRONG" in capsys.readouterr().out


def test_a_step_is_the_layer_that_it_says():
    """Each part of each product reaches its place: against a plain decoder layer with one token of context."""
    shape, chance = (
        decoder_layer.Shape(hidden=8, heads=4, kv_heads=2, inner=6, head=2),
        torch.Generator().manual_seed(0),
    )
    weights = {
        name: torch.randn(n, k, generator=chance, dtype=torch.float64) for name, (n, k) in shape.products.items()
    }
    x = torch.randn(3, 8, generator=chance, dtype=torch.float64)

    def multiply(name, x):
        return (x @ weights[name].T).split(shape.parts[name], -1)

    found = decoder_layer.step(shape, x, multiply, decoder_layer.Small())
    for row, y in zip(x, found, strict=True):
        h = row / (row.square().mean() + 1e-5).sqrt()
        q, k, v = (weights["qkv"] @ h).split((8, 4, 4))
        q, k, v = q.view(4, 1, 2), k.view(2, 1, 2), v.view(2, 1, 2)
        attended = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).flatten()
        o = weights["o"] @ attended
        o = o / (o.square().mean() + 1e-5).sqrt()
        gate, up = (weights["gate_up"] @ o).chunk(2)
        torch.testing.assert_close(y, weights["down"] @ (functional.silu(gate) * up))


@pytest.mark.parametrize("rows", [3, 5, 64])
def test_a_weight_is_read_through_its_products(rows):
    weight = torch.randn(4, 10).half()
    ready = Ready([lambda x: x.float() @ weight.float().T], 0, None)
    found = bench_chain._by_unit_vectors(ready, Problem(weight, None), torch.float16, rows)
    assert torch.equal(found, weight.float())


def test_a_side_that_quantizes_for_itself_is_held_against_its_own_weight():
    class Rounds(Side):
        family, own_quantizer = "rounds", True

        def open(self, problem):
            mine = (problem.weight.float() * 8).round() / 8
            return Ready([lambda x: (x.float() @ mine.T).to(x.dtype)] * 2, 1, problem.weight)

    shape = decoder_layer.SHAPES["tiny"]
    weights = {name: Problem.make(n, k, "cpu", None).weight for name, (n, k) in shape.products.items()}
    chain = bench_chain.Chain(Rounds("int4", "float16", 128), shape, weights, 2, apart=True)
    meant = chain.meant(64)
    assert [len(parts) for parts in meant.values()] == [3, 1, 2, 1]
    x = torch.randn(2, 256).half()
    y = decoder_layer.step(shape, x, chain.multiply(1), decoder_layer.Small())
    exact = decoder_layer.step(shape, x.double(), chain.exact(meant), decoder_layer.Small())
    assert error(y, exact) < 2e-3 and bench_chain._distance(meant, chain.problems) > 0.1


def test_copies_are_layers_of_their_own():
    shape = decoder_layer.SHAPES["tiny"]
    weights = {name: Problem.make(n, k, "cpu", None).weight for name, (n, k) in shape.products.items()}
    ((_, side, _), (_, _, apart)), _ = bench_chain.collect(bench_chain.options(DRY))
    assert apart
    chain = bench_chain.Chain(side, shape, weights, 3, apart=False)
    places = [pw.codes.data_ptr() for (p,) in chain.problems.values() for pw in p.kept["weights"]]
    assert len(set(places)) == 4 * 3


def test_ratios_are_of_the_best_peer_and_say_when_a_goal_is_missed():
    def row(family, us, bits=4, m=1, apart=False):
        side = f"{family} int{bits}" + " apart" * apart
        return {
            "model": "8b",
            "family": family,
            "side": side,
            "us": us,
            "bits": bits,
            "m": m,
            "act": "float16",
            "apart": apart,
        }

    rows = [
        row("lowbit", 10),
        row("lowbit", 12, apart=True),
        row("lowbit", 8, m=4),
        row("marlin", 14),
        row("cublas", 30, 16),
    ]
    rows += [row("humming", 5, 8), row("marlin", 16, m=4)]
    lines = chain_report.ratios(rows).splitlines()[2:]
    assert lines == [
        "| lowbit int4 8b | 1 | 1.40 marlin | 1.5 * | 1.40 | 3.00 | - |",
        "| lowbit int4 apart 8b | 1 | 1.17 marlin | - | 1.17 | 2.50 | - |",
        "| lowbit int4 8b | 4 | 2.00 marlin | - | 2.00 | - | - |",
    ]


def test_options():
    args = bench_chain.options([])
    assert args.models == ["8b", "70b"] and args.ms == [1, 4, 16, 64] and args.types == ["int4"]
    assert decoder_layer.SHAPES["8b"].products == {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)
    }  # fmt: skip
    assert decoder_layer.SHAPES["70b"].products["qkv"] == (10240, 8192)
    for wrong in (["--models", "9b"], ["--peers", "cutlass"], ["--ms", "0"], ["--act", "int8"]):
        with pytest.raises(SystemExit) as caught:
            bench_chain.options(wrong)
        assert caught.value.code == 2
    assert bench_chain.main([*DRY, "--types", "int9"]) == 2
