"""What a call costs on the host: microseconds until it returns, while the GPU keeps up; and what a first call costs.

    python benchmarks/bench_host.py --peers all
    python benchmarks/bench_host.py --peers cublas,marlin --no-first --shape 2048x2048
    python benchmarks/bench_host.py --dry --no-first           # on the CPU: the product's own time is inside

benchmarks/README.md says how and what the result file holds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import matmul_report as report  # noqa: E402
import peers_gpu  # noqa: E402
import torch  # noqa: E402
from gpu_record import Record  # noqa: E402

import lowbit  # noqa: E402
from lowbit.fused import Fused  # noqa: E402
from lowbit.ops.schema import FLOAT_IDS  # noqa: E402

#: Most microseconds a call, on a host where a bare launch takes 5.7 and torch.add 9.8; seconds of a fresh process.
GOALS = {"lowbit.matmul": 13.5, "lowbit.Linear": 16}
FIRST_GOALS = {"names": 0.3, "first": 0.05}


def torch_cases(x: torch.Tensor, weight: torch.Tensor) -> dict:
    """Yardsticks: what the smallest things of torch cost."""
    (n, k), linear = weight.shape, torch.nn.functional.linear
    layer = torch.nn.Linear(k, n, dtype=x.dtype, device=x.device)
    y, bias = x.new_zeros(len(x), n), weight.new_zeros(n)
    return {
        "torch.empty": lambda: torch.empty((len(x), n), dtype=x.dtype, device=x.device),
        "a launch: y.neg_()": y.neg_,
        "torch.add": lambda: torch.add(y, y),
        "F.linear": lambda: linear(x, weight),
        "F.linear, bias": lambda: linear(x, weight, bias),
        "nn.Linear": lambda: layer(x),
    }


def lowbit_cases(x: torch.Tensor, weight: torch.Tensor, dtype: str, group: int) -> dict:
    options = {"group_size": group, "method": "rtn"}
    pw = lowbit.pack_weight(lowbit.quantize(weight, dtype, **options), weight.device)
    plain = torch.nn.Linear(pw.shape[1], pw.shape[0], dtype=x.dtype, device=x.device)
    bare = torch.nn.Linear(pw.shape[1], pw.shape[0], bias=False, dtype=x.dtype, device=x.device)
    one = lowbit.Linear.from_linear(plain, dtype, **options)
    a, b, *members = (lowbit.Linear.from_linear(bare, dtype, **options) for _ in range(4))
    bias, y, op = one.bias.detach(), x.new_empty(len(x), pw.shape[0]), torch.ops.lowbit.matmul_out.default
    held = (x, pw.codes, pw.scales, pw.zeros, None, *pw.numbers, FLOAT_IDS[x.dtype], y)
    fused = Fused.of(members)

    def shared():
        # What the hooks of a model's module do around its layers.
        fused.scope.held = ()
        members[0](x), members[1](x)
        fused.scope.held = None

    return {
        "lowbit's op alone": lambda: op(*held, None),
        "lowbit.matmul": lambda: lowbit.matmul(x, pw),
        "lowbit.matmul, bias": lambda: lowbit.matmul(x, pw, bias),
        "lowbit.matmul, out": lambda: lowbit.matmul(x, pw, out=y),
        "lowbit.Linear": lambda: one(x),
        "lowbit.Linear, no bias": lambda: a(x),
        "two lowbit.Linear, no bias": lambda: (a(x), b(x)),
        "two of lowbit.fuse, no bias": shared,
    }


def peer_cases(x: torch.Tensor, weight: torch.Tensor, args) -> tuple[dict, dict[str, str]]:
    """Each peer's call, and why for each that is left out; cuBLAS is among torch's."""
    found, skipped = {}, {}
    for name in args.peers:
        if name == "cublas":
            continue
        try:
            side = peers_gpu.PEERS[name](args.type, args.act, args.group)
            ready = side.open(peers_gpu.Problem(weight.half(), lambda nbytes: 1))
            ready.prepare(x)
            ready.calls[0](x)
            found[name] = lambda call=ready.calls[0]: call(x)
        except Exception as why:  # Why so wide: one side that fails must not cost the run of all the others.
            skipped[name] = f"{type(why).__name__}: {why}".splitlines()[0]
    return found, skipped


def measure(cases: dict, calls: int, trials: int, wait) -> dict[str, dict]:
    """For each case us a call: the least, the median and the most of the trials, which take turns. ``drain_us``: what
    the GPU still had to do then, by calls; more than ``us`` says that it did not keep up."""
    found = {name: [] for name in cases}
    for call in cases.values():
        for _ in range(20):
            call()
    for _ in range(trials):
        for name, call in cases.items():
            wait()
            begin = time.perf_counter()
            for _ in itertools.repeat(None, calls):
                call()
            end = time.perf_counter()
            wait()
            found[name].append(((end - begin) * 1e6 / calls, (time.perf_counter() - end) * 1e6 / calls))
    rows = {}
    for name, pairs in found.items():
        us, drain = zip(*pairs, strict=True)
        row = {
            "least_us": min(us),
            "us": statistics.median(us),
            "most_us": max(us),
            "drain_us": statistics.median(drain),
        }
        rows[name] = {key: round(value, 3) for key, value in row.items()}
    return rows


def first_calls(args, device: str) -> tuple[list[dict], dict[str, str]]:
    """first_call.py for lowbit, three times, and for each peer, each in a process of its own."""
    found, skipped = [], {}
    for side in ["lowbit"] * 3 + args.peers:
        command = [
            sys.executable,
            os.path.join(HERE, "first_call.py"),
            side,
            "--shape",
            "x".join(map(str, args.first_shape)),
        ]
        command += ["--m", str(args.m), "--type", args.type, "--device", device]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.first_timeout)
            row = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"skipped": _last(done.stderr)}
        except subprocess.TimeoutExpired:
            row = {"skipped": f"not done within {args.first_timeout} s"}
        if "skipped" in row:
            skipped[f"first call of {side}"] = row["skipped"]
        else:
            found.append(row)
    return found, skipped


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason"])[-1]


def table(rows: dict[str, dict]) -> str:
    lines = [["host us a call", "least", "median", "goal"]]
    for name, row in rows.items():
        goal = GOALS.get(name)
        reached = "" if goal is None else f"{goal:g}" + (" *" if row["us"] > goal else "")
        late = "" if row["drain_us"] <= row["us"] else " (the GPU was slower)"
        lines.append([name, f"{row['least_us']:.1f}", f"{row['us']:.1f}{late}", reached])
    return report.markdown(lines)


def first_table(found: list[dict]) -> str:
    if not found:
        return ""
    steps = list(dict.fromkeys(step for row in found for step in row["seconds"]))
    lines = [["ms in a fresh process", *steps]]
    for side in dict.fromkeys(row["side"] for row in found):
        mine = [row["seconds"] for row in found if row["side"] == side]
        cells = []
        for step in steps:
            seconds = [row[step] for row in mine if step in row]
            missed = side == "lowbit" and step in FIRST_GOALS and statistics.median(seconds) > FIRST_GOALS[step]
            cells.append(f"{statistics.median(seconds) * 1e3:.1f}" + " *" * missed if seconds else "-")
        lines.append([side, *cells])
    goals = ", ".join(f"{step} {seconds * 1e3:g} ms" for step, seconds in FIRST_GOALS.items())
    return report.markdown(lines) + f"\n\nGoals of lowbit: {goals}."


def options(argv: list[str]) -> argparse.Namespace:
    def shape(text):
        n, k = map(int, text.split("x"))
        return n, k

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", type=shape, default=(1024, 1024), help="N x K: small, so that the GPU keeps up (1024x1024)")
    add("--m", type=int, default=1, help="rows of x (1)")
    add("--type", default="int4", help="weight type (int4)")
    add("--act", choices=("float16", "bfloat16"), default="float16", help="type of x (float16)")
    add("--group", type=int, default=128, help="group size (128)")
    add("--peers", type=report.names, default=[], help="of bench_matmul.py, or all (none)")
    add("--calls", type=int, default=200, help="calls in a trial, without waiting for the GPU (200)")
    add("--trials", type=int, default=30, help="trials of each case, which take turns (30)")
    add(
        "--mode",
        choices=("no_grad", "inference_mode", "grad"),
        default="no_grad",
        help="what the calls run in (no_grad)",
    )
    add("--no-first", action="store_true", help="leave out the first calls in fresh processes")
    add("--first-shape", type=shape, default=(4096, 4096), help="N x K of the first calls (4096x4096)")
    add("--first-timeout", type=float, default=150, help="seconds for one process of first calls (150)")
    add("--device", help="folder under benchmarks/results (from the device's name)")
    add("--out", help="result file (benchmarks/results/<device>/host_<date>.json); '-' for none")
    add("--dry", action="store_true", help="on the CPU, where a product is done when its call returns")
    args = parser.parse_args(argv)
    args.peers = list(peers_gpu.PEERS) if args.peers == ["all"] else args.peers
    unknown = [name for name in args.peers if name not in peers_gpu.PEERS]
    if unknown:
        parser.error(f"--peers must be of {', '.join(peers_gpu.PEERS)}, got {', '.join(unknown)}")
    return args


def main(argv: list[str]) -> int:
    args, record = options(argv), Record(__file__, argv)
    if not args.dry and not torch.cuda.is_available():
        print("bench_host.py: error: needs a CUDA device; --dry tries the options on the CPU", file=sys.stderr)
        return 2
    device, wait = ("cpu", lambda: None) if args.dry else ("cuda", torch.cuda.synchronize)
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": contextlib.nullcontext}
    first, skipped = ([], {}) if args.no_first else first_calls(args, device)
    n, k = args.shape
    x = torch.randn(args.m, k, device=device).to(getattr(torch, args.act))
    weight = (torch.randn(n, k, device=device) / k**0.5).to(x.dtype)
    with modes[args.mode]():
        cases = torch_cases(x, weight) | lowbit_cases(x, weight, args.type, args.group)
        peers, why = peer_cases(x, weight, args)
        rows = measure(cases | peers, args.calls, args.trials, wait)
    skipped |= why
    print(table(rows), first_table(first), sep="\n\n")
    print("\n".join(f"without {name}: {why}" for name, why in skipped.items()))
    method = {key: getattr(args, key) for key in ("shape", "m", "type", "act", "group", "calls", "trials", "mode")}
    listed = [{"case": name, **row} for name, row in rows.items()]
    record.keep(args, method=method, skipped=skipped, rows=listed, first=first)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
