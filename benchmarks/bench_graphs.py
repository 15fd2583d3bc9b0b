"""GPU memory of CUDA graphs for many numbers of rows: lowbit.graphs beside torch's own graphs.

    python benchmarks/bench_graphs.py                    # M = 1..64, a model of the shape of Llama 3 8B
    python benchmarks/bench_graphs.py --ms 1,2,4,8,16,32,64 --layers 4 --out -

The model has random int4 weights, no context and no cache; each way to capture runs in a process of its own.
benchmarks/README.md says what is counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import decoder_layer  # noqa: E402
import matmul_report as report  # noqa: E402
import torch  # noqa: E402
from gpu_record import Record  # noqa: E402

import lowbit  # noqa: E402
from lowbit.pack.layout import codes_shape, padded_shape  # noqa: E402
from lowbit.pack.packed import finish  # noqa: E402
from lowbit.scheme import Scheme  # noqa: E402

_VOCABULARY = 128256
#: At most this share of the memory of graphs with a pool each.
GOAL = 0.1
_BY_TORCH = decoder_layer.Small()


class Decoder:
    """Layers of random packed int4 weights, made on the device, and a head if there are logits to make."""

    def __init__(
        self,
        shape: decoder_layer.Shape,
        layers: int,
        vocabulary: int,
        device: str,
        small: decoder_layer.Small = _BY_TORCH,
    ):
        self.shape, self.device, self.small = shape, torch.device(device), small
        self.layers = [{name: self._weight(*nk) for name, nk in shape.products.items()} for _ in range(layers)]
        self.head = self._weight(vocabulary, shape.hidden) if vocabulary else None
        finish(self.device)

    def _weight(self, n: int, k: int) -> lowbit.PackedWeight:
        scheme = Scheme.make("int4", 128)
        layout = "nvidia" if self.device.type == "cuda" else "cpu"
        codes = torch.randint(0, 256, codes_shape(layout, n, k, 4), dtype=torch.uint8, device=self.device)
        # Codes have a standard deviation of 4.6: products are of the size of x.
        groups = (padded_shape(layout, n, k, 4)[0] // 16, scheme.groups(k), 16)
        scales = torch.full(groups, 1 / (4.6 * k**0.5), dtype=torch.float16, device=self.device)
        return lowbit.PackedWeight(codes, scales, None, None, scheme=scheme, shape=(n, k), layout=layout)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float16 ``[M, hidden]`` -> the hidden state of the same shape, or logits ``[M, vocabulary]``."""
        small = self.small
        for weights in self.layers:

            def multiply(name, x, weights=weights):
                return lowbit.matmul(x, weights[name]).split(self.shape.parts[name], -1)

            x = x + decoder_layer.step(self.shape, x, multiply, small)
        x = small.norm(x)
        return x if self.head is None else lowbit.matmul(x, self.head)


def by_torch(step, ms, xs: torch.Tensor, pool=None) -> list:
    """torch's way: for each number of rows a graph, its input and its output; pool: where all of them lie."""
    found = []
    for m in ms:
        graph, x = torch.cuda.CUDAGraph(), torch.zeros_like(xs[:m])
        with torch.cuda.graph(graph, pool=pool):
            y = step(x)
        found.append((m, x, graph.replay, y))
    return found


def by_lowbit(step, ms, xs: torch.Tensor) -> list:
    held = torch.zeros_like(xs)
    graphs = lowbit.graphs.capture(step, ms, held)
    return [(m, held[:m], lambda m=m: graphs.replay(m), graphs.outputs[0][:m]) for m in ms]


WAYS = {
    "a pool each": by_torch,
    "one pool": lambda step, ms, xs: by_torch(step, ms, xs, torch.cuda.graph_pool_handle()),
    "one pool, largest first": lambda step, ms, xs: by_torch(step, ms[::-1], xs, torch.cuda.graph_pool_handle()),
    "lowbit.graphs": by_lowbit,
}


def _memory(device: str) -> dict[str, int]:
    """Bytes in use on the whole device, and with torch's allocator."""
    if device == "cpu":
        return {"device": 0, "reserved": 0, "allocated": 0}
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    return {"device": total - free, "reserved": held[0], "allocated": held[1]}


def one_way(args, device: str) -> dict:
    """Capture in one way: MB that it took, seconds, and whether every graph gives the bits of the eager step."""
    shape = decoder_layer.SHAPES["tiny" if args.dry else "8b"]
    small = decoder_layer.Small.best(device, dynamic=True) if args.compiled else _BY_TORCH
    step = Decoder(shape, args.layers, args.vocabulary, device, small)
    chance = torch.Generator(device=device).manual_seed(0)
    xs = torch.randn(max(args.ms), shape.hidden, generator=chance, device=device).half()
    with torch.no_grad():
        # Why first: kernels are loaded at their first launch, and their memory belongs to no graph.
        expected = {m: step(xs[:m]).sum(dtype=torch.float64).item() for m in args.ms}
        before, begin = _memory(device), time.perf_counter()
        made = WAYS[args.way](step, args.ms, xs)
        seconds = time.perf_counter() - begin
        equal = True
        for m, x, replay, y in made:
            x.copy_(xs[:m])
            replay()
            equal = equal and y.sum(dtype=torch.float64).item() == expected[m] and torch.equal(y, step(xs[:m]))
        after = _memory(device)
    row = {"way": args.way, "logits": bool(args.vocabulary), "graphs": len(args.ms), "equal": equal}
    row |= {f"{key}_mb": round((after[key] - before[key]) / 2**20, 1) for key in before}
    return row | {"seconds": round(seconds, 2)}


def table(rows: list[dict]) -> str:
    lines = [["outputs", "way", "MB on the device", "share", "MB of torch's allocator", "share", "seconds", "right"]]
    for row in rows:
        each = next((r for r in rows if (r["way"], r["logits"]) == ("a pool each", row["logits"])), None)
        cells = ["logits" if row["logits"] else "hidden", row["way"]]
        for key in ("device_mb", "reserved_mb"):
            share = row[key] / each[key] if each and each[key] else None
            missed = " *" if row["way"] == "lowbit.graphs" and share is not None and share > GOAL else ""
            cells += [f"{row[key]:.1f}", "-" if share is None else f"{share:.3f}{missed}"]
        lines.append([*cells, f"{row['seconds']:.1f}", "yes" if row["equal"] else "NO"])
    return report.markdown(lines) + f'\n\nShares are of "a pool each"; the goal of lowbit.graphs is {GOAL:g}.'


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ms", type=report.numbers, default=list(range(1, 65)), help="numbers of rows, ascending (1 to 64)")
    add("--layers", type=int, default=32, help="layers of the model (32)")
    add("--ways", type=lambda text: text.split(";"), default=list(WAYS), help=f"of {'; '.join(WAYS)} (all)")
    add("--way", help=argparse.SUPPRESS)
    add("--vocabulary", type=int, default=_VOCABULARY, help=f"rows of the head; 0 leaves it out ({_VOCABULARY})")
    add("--compiled", action="store_true", help="norm and silu-mul as one kernel each, made by torch's compiler")
    add("--device", help="folder under benchmarks/results (from the device's name)")
    add("--out", help="result file (benchmarks/results/<device>/graphs_<date>.json); '-' for none")
    add("--dry", action="store_true", help="on the CPU, where there are no graphs: to try the options")
    args = parser.parse_args(argv)
    unknown = [way for way in args.ways if way not in WAYS]
    if unknown or min(args.ms) < 1 or args.ms != sorted(set(args.ms)):
        parser.error(f"--ways must be of {'; '.join(WAYS)}, --ms ascending from 1, got {unknown or args.ms}")
    if args.dry:
        args.ways = ["lowbit.graphs"]
    return args


def main(argv: list[str]) -> int:
    args, record = options(argv), Record(__file__, argv)
    if not args.dry and not torch.cuda.is_available():
        print("bench_graphs.py: error: needs a CUDA device; --dry tries the options on the CPU", file=sys.stderr)
        return 2
    if args.way:
        print(json.dumps(one_way(args, "cpu" if args.dry else "cuda")))
        return 0
    rows, skipped = [], {}
    given = [
        "--ms",
        ",".join(map(str, args.ms)),
        "--layers",
        str(args.layers),
        *["--dry"] * args.dry,
        *["--compiled"] * args.compiled,
    ]
    for vocabulary in dict.fromkeys((0, args.vocabulary)):
        for way in args.ways:
            command = [sys.executable, os.path.abspath(__file__), *given, "--way", way, "--vocabulary", str(vocabulary)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            else:
                skipped[f"{way}, {vocabulary} logits"] = (done.stderr.strip().splitlines() or ["no reason"])[-1]
    print(table(rows))
    print("\n".join(f"without {name}: {why}" for name, why in skipped.items()))
    method = {key: getattr(args, key) for key in ("ms", "layers", "vocabulary", "compiled")}
    record.keep(args, method=method, skipped=skipped, rows=rows)
    return 0 if rows and all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
