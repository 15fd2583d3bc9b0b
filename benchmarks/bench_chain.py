"""The products of a decoder layer as a chain on a GPU, lowbit beside its peers: each x is what the kernel before made.

    python benchmarks/bench_chain.py --peers all --deadline 540
    python benchmarks/bench_chain.py --models 8b --ms 1 --peers marlin,cublas

A CUDA graph runs whole layers, copies of one that take turns, so that weights come from memory. Every layer's answer in
the graph that was timed is held against float64. benchmarks/README.md says how and what the result file holds.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import chain_report  # noqa: E402
import gpu_timing  # noqa: E402
import matmul_report as report  # noqa: E402
import peers_gpu  # noqa: E402
import torch  # noqa: E402
from decoder_layer import SHAPES, Shape, Small, step  # noqa: E402
from gpu_record import Record  # noqa: E402
from peers_gpu.side import Problem, Side, exact_product  # noqa: E402

from lowbit.commands.selftest import TOLERANCE  # noqa: E402
from lowbit.errors import LowbitError  # noqa: E402

#: A layer rounds seven times in a row: its bound is that of one product this many times.
_ROUNDINGS = 4
#: Layers in a graph, so that launching the graph does not count; copies take turns.
_LAYERS = 16
_MODELS = ("8b", "70b")


class Chain:
    """The products of one side, each with ``copies`` of its weight; apart: the parts of a weight as products of their
    own, and not as rows of one."""

    def __init__(self, side: Side, shape: Shape, weights: dict[str, torch.Tensor], copies: int, apart: bool):
        self.side, self.shape, self.apart = side, shape, apart
        self.problems = {
            name: [
                Problem(part, lambda nbytes: copies)
                for part in (weights[name].split(rows) if apart else [weights[name]])
            ]
            for name, rows in shape.parts.items()
        }
        self.ready = {name: [side.open(problem) for problem in parts] for name, parts in self.problems.items()}
        self.nbytes = sum(ready.nbytes for parts in self.ready.values() for ready in parts)

    def prepare(self, m: int) -> None:
        """Let the side tune itself for M rows."""
        for name, parts in self.ready.items():
            weight = self.problems[name][0].weight
            x = torch.randn(m, weight.shape[1], device=weight.device).to(self.side.x_type)
            for ready in parts:
                ready.prepare(x)

    def multiply(self, copy: int):
        """The products of one copy of the layer, for :func:`decoder_layer.step`."""
        return lambda name, x: self._parts(name, [ready.calls[copy](x) for ready in self.ready[name]])

    def exact(self, meant: dict[str, list[torch.Tensor]]):
        """The same in float64, with weights [N, K] as the side understands them."""
        return lambda name, x: self._parts(name, [exact_product(x, weight) for weight in meant[name]])

    def meant(self, rows: int) -> dict[str, list[torch.Tensor]]:
        """The weights as the side understands them; of one that can't say, its products with ``rows`` unit vectors."""
        found = {}
        for name, parts in self.ready.items():
            pairs = zip(parts, self.problems[name], strict=True)
            told = not self.side.own_quantizer
            found[name] = [r.reference if told else _by_unit_vectors(r, p, self.side.x_type, rows) for r, p in pairs]
        return found

    def _parts(self, name: str, found: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(found) if self.apart else found[0].split(self.shape.parts[name], -1)


def _by_unit_vectors(ready, problem: Problem, act: torch.dtype, rows: int) -> torch.Tensor:
    columns = []
    for first in range(0, problem.k, rows):
        units = torch.zeros(rows, problem.k, dtype=act, device=problem.weight.device)
        count = min(rows, problem.k - first)
        units[:, first : first + count].fill_diagonal_(1)
        columns.append(ready.calls[0](units)[:count])
    return torch.cat(columns).t().contiguous()


class Run:
    """What has been measured so far, and what was left out."""

    def __init__(self, args, begin: float):
        self.args, self.begin = args, begin
        self.device = "cpu" if args.dry else "cuda"
        self.small = Small() if args.dry else Small.best(self.device)
        self.rows: list[dict] = []
        self.skipped: dict[str, str] = {}

    def model(self, model: str, sides: list[tuple[str, Side, bool]]) -> None:
        shape = SHAPES[model]
        weights = {name: Problem.make(n, k, self.device, None).weight for name, (n, k) in shape.products.items()}
        generator = torch.Generator(device=self.device).manual_seed(1)
        tokens = torch.randn(max(self.args.ms), shape.hidden, generator=generator, device=self.device)
        self._small_alone(model, tokens)
        for name, side, apart in sides:
            start, where = time.monotonic(), f"{name} {model}"
            if start - self.begin > self.args.deadline:
                self.skipped[where] = "the deadline had passed"
                continue
            try:
                self._side(model, name, Chain(side, shape, weights, self._copies(shape, side.bits), apart), tokens)
            except Exception as why:  # Why so wide: one side that fails must not cost the run of all the others.
                self.skipped[where] = f"{type(why).__name__}: {why}".splitlines()[0]
            if not self.args.dry:
                torch.cuda.empty_cache()
            done = chain_report.line(self.rows, name, model) or self.skipped.get(where, "")
            progress(f"{where}: {done} ({time.monotonic() - start:.1f} s)")

    def _copies(self, shape: Shape, bits: int) -> int:
        if self.args.dry:
            return 2
        return gpu_timing.copies_for(shape.weights * bits // 8, gpu_timing.cache_bytes())

    def _side(self, model: str, name: str, chain: Chain, tokens: torch.Tensor) -> None:
        side, shape = chain.side, chain.shape
        meant, copies = chain.meant(max(self.args.ms)), self._copies(shape, side.bits)
        layers = 2 * copies if self.args.dry else -(-_LAYERS // copies) * copies
        exact, lost = chain.exact(meant), _distance(meant, chain.problems)
        for m in self.args.ms:
            x, outs = tokens[:m].to(side.x_type), [tokens] * layers
            chain.prepare(m)

            def layer(i, x=x, outs=outs):
                outs[i] = step(shape, outs[i - 1] if i else x, chain.multiply(i % copies), self.small)

            timing = self._time([lambda i=i, layer=layer: layer(i) for i in range(layers)])
            # What the last replay of the graph left: each layer, from what it was given.
            given = zip([x, *outs], outs, strict=False)
            found = max(_error(y, step(shape, x.double(), exact, Small())) for x, y in given)
            wrong = side.judged and not found <= _ROUNDINGS * TOLERANCE[side.act]
            row = {
                "model": model, "side": name, "family": side.family, "weight": side.dtype, "bits": side.bits,
                "apart": chain.apart, "act": side.act, "m": m, "group": side.group, "copies": copies, "layers": layers,
            }  # fmt: skip
            self._add(row, timing, chain.nbytes, found, wrong, lost)

    def _small_alone(self, model: str, tokens: torch.Tensor) -> None:
        """The kernels between the products, each of x that lies ready."""
        shape = SHAPES[model]
        for m in self.args.ms:
            x = tokens[:m].half()
            ys = {name: x.new_zeros(m, n).split(shape.parts[name], -1) for name, (n, _) in shape.products.items()}

            def alone(x=x, ys=ys):
                step(shape, x, lambda product, _: ys[product], self.small)

            timing = self._time([alone] * _LAYERS)
            row = {
                "model": model, "side": "small kernels alone", "family": "small", "weight": None, "bits": None,
                "apart": False, "act": "float16", "m": m, "group": None, "copies": 1, "layers": _LAYERS,
            }  # fmt: skip
            self._add(row, timing, 0)

    def _time(self, calls: list):
        if self.args.dry:
            return gpu_timing.host_us(calls, self.args.least_ms)
        return gpu_timing.graph_us(calls, self.args.least_ms)

    def _add(self, row, timing, nbytes, found=None, wrong=False, lost=None) -> None:
        us = None if wrong else round(timing.us, 3)
        row |= {"bytes": nbytes, "err": found, "weight_err": lost, "wrong": wrong, "us": us}
        row |= {"least_us": us and round(timing.least, 3), "most_us": us and round(timing.most, 3), "how": timing.how}
        self.rows.append(row | {"tbs": us and nbytes and round(nbytes / timing.us * 1e-6, 3)})


def _error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


def _distance(meant, problems) -> float:
    """How far the weights that a side multiplies with are from the float ones: ||meant - w|| / ||w||, the worst."""
    pairs = [(w, p.weight) for name, parts in meant.items() for w, p in zip(parts, problems[name], strict=True)]
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", type=report.names, default=list(_MODELS), help=f"of {', '.join(SHAPES)} ({','.join(_MODELS)})")
    add("--types", type=report.names, default=["int4"], help="lowbit's weight types (int4)")
    add("--act", choices=("float16", "bfloat16"), default="float16", help="type of x (float16)")
    add("--ms", type=report.numbers, default=[1, 4, 16, 64], help="rows of x (1,4,16,64)")
    add("--group", type=int, default=128, help="group size (128)")
    add("--peers", type=report.names, default=[], help=f"{', '.join(peers_gpu.PEERS)}, or all (none)")
    add("--deadline", type=float, default=math.inf, help="seconds after which nothing new is begun")
    add("--least-ms", type=float, default=15, help="ms of replays in each of 7 trials (15)")
    add("--device", help="folder under benchmarks/results (from the device's name)")
    add("--out", help="result file (benchmarks/results/<device>/chain_<date>.json); '-' for none")
    add("--dry", action="store_true", help="on the CPU, where the times say nothing: to try the options")
    args = parser.parse_args(argv)
    args.peers = list(peers_gpu.PEERS) if args.peers == ["all"] else args.peers
    for what, given, known in (("models", args.models, SHAPES), ("peers", args.peers, peers_gpu.PEERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"--{what} must be of {', '.join(known)}, got {', '.join(unknown)}")
    if min(args.ms) < 1:
        parser.error("--ms must be numbers from 1")
    return args


def collect(args) -> tuple[list[tuple[str, Side, bool]], dict[str, str]]:
    """(name, side, apart) in the order of timing: lowbit's with weights fused and apart, peers' fused."""
    sides, skipped = peers_gpu.collect(args.types, [args.act], args.group, None, [None], args.peers)
    found = []
    for side in sides:
        found.append((side.name, side, False))
        if side.family == "lowbit":
            found.append((f"{side.name} apart", side, True))
    return found, skipped


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    args, record = options(argv), Record(__file__, argv)
    if not args.dry and not torch.cuda.is_available():
        print("bench_chain.py: error: needs a CUDA device; --dry tries the options on the CPU", file=sys.stderr)
        return 2
    run = Run(args, record.begin)
    try:
        sides, run.skipped = collect(args)
    except LowbitError as why:
        print(f"bench_chain.py: error: {why}", file=sys.stderr)
        return 2
    with torch.inference_mode():
        for model in args.models:
            run.model(model, sides)
    print(chain_report.everything(run.rows, run.skipped, run.small.how))
    method = {"group": args.group, "least_ms": args.least_ms, "small": run.small.how}
    record.keep(args, method=method, skipped=run.skipped, rows=run.rows)
    return 1 if any(row["wrong"] for row in run.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
