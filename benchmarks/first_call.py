"""What a fresh process waits for: imports, a layer that is made, the first product of it. Prints one JSON object.

    python benchmarks/first_call.py lowbit --shape 4096x4096 --m 1

bench_host.py runs it for each side. Seconds of its steps: ``torch`` (import and CUDA context), ``names`` (import
lowbit, its libraries, matmul and Linear), ``made`` (quantized and packed), ``first`` (the first product, until it is
done), ``again`` (the same), ``shape`` (the first of a layer of another shape), ``rows`` (the first with 64 rows).
"""

import argparse
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

_MANY_ROWS = 64


class Steps:
    """Seconds of each step; each ends when the device is done."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.begin = time.perf_counter()

    def done(self, name: str, device: str) -> None:
        if device != "cpu":
            import torch

            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name], self.begin = round(now - self.begin, 6), now


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", help="lowbit, or a peer of bench_matmul.py")
    parser.add_argument("--shape", default="4096x4096", help="N x K (4096x4096)")
    parser.add_argument("--m", type=int, default=1, help="rows of x (1)")
    parser.add_argument("--type", default="int4", help="weight type (int4)")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    (n, k), steps = map(int, args.shape.split("x")), Steps()

    import torch

    torch.zeros(1, device=args.device)
    steps.done("torch", args.device)
    if args.side == "lowbit":
        import lowbit

        _ = lowbit.matmul, lowbit.Linear
        steps.done("names", args.device)

    import peers_gpu
    from peers_gpu import lowbit_side

    known = {**peers_gpu.PEERS, "lowbit": lowbit_side.LowbitSide}
    try:
        side = known[args.side](args.type, "float16", 128)
    except peers_gpu.Unavailable as why:
        print(json.dumps({"side": args.side, "skipped": str(why)}))
        return 0
    problems = [peers_gpu.Problem.make(*shape, args.device, lambda nbytes: 1) for shape in ((n, k), (n + 256, k))]
    xs = [torch.randn(m, k, device=args.device).half() for m in (args.m, _MANY_ROWS)]
    steps.done("begun", args.device)
    with torch.no_grad():
        one = side.open(problems[0]).calls[0]
        steps.done("made", args.device)
        for name in ("first", "again"):
            one(xs[0])
            steps.done(name, args.device)
        other = side.open(problems[1]).calls[0]
        steps.done("begun", args.device)
        for name, call, x in (("shape", other, xs[0]), ("rows", one, xs[1])):
            call(x)
            steps.done(name, args.device)
    steps.seconds.pop("begun")
    print(json.dumps({"side": args.side, "shape": [n, k], "m": args.m, "seconds": steps.seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
