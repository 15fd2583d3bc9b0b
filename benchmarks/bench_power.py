"""What limits a product: the clock and the power of the device while it runs for half a second, and its time.

    python benchmarks/bench_power.py --types int1,int2,int4,int8 --ms 1,8,16,32,64,128,256,1024,4096

A device at its limit of power lowers its clock; ``reasons`` are those that the driver names (0x4: the limit of power).
``rows`` are [side, N, K, M, us, MHz, W, reasons, degrees].
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import gpu_timing  # noqa: E402
import matmul_report as report  # noqa: E402
import peers_gpu  # noqa: E402
import torch  # noqa: E402
from gpu_record import Record  # noqa: E402

ASKED = "timestamp,clocks.sm,power.draw.instant,clocks_event_reasons.active,temperature.gpu"
SETTLES = datetime.timedelta(milliseconds=60)  # after the first launches


def run_for(once, ms: float) -> tuple[float, datetime.datetime, datetime.datetime]:
    """Milliseconds that ``once`` takes while the device is busy with it, from when and until when."""
    timed = gpu_timing.stopwatch(once)
    timed(2)  # the first replay uploads the graph
    turns = max(1, int(ms / max(timed(2), 1e-3)))
    timed(turns)  # the device finds its clock
    start = datetime.datetime.now()
    return timed(turns), start, datetime.datetime.now()


def samples(path: str) -> list[tuple]:
    """Lines of nvidia-smi, but for one that it did not end: when, MHz, W, reasons, degrees."""
    found = []
    with open(path) as lines:
        for line in lines:
            if not line.endswith("\n"):
                continue
            when, clock, power, reasons, degrees = (part.strip() for part in line.split(","))
            found.append((
                datetime.datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f"), float(clock), float(power), reasons,
                float(degrees),
            ))  # fmt: skip
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="int1,int2,int4,int8", help="weight types (int1,int2,int4,int8)")
    parser.add_argument("--peers", default="cublas", help=f"of {', '.join(peers_gpu.PEERS)} (cublas)")
    parser.add_argument("--shapes", default="8192x8192", help="N x K, comma-separated (8192x8192)")
    parser.add_argument("--ms", default="1,8,16,32,64,128,256,1024,4096", help="rows of x")
    parser.add_argument("--for-ms", type=float, default=250, help="ms of each, once before it counts (250)")
    parser.add_argument("--device", help="folder under benchmarks/results (from the device's name)")
    parser.add_argument("--out", help="result file (benchmarks/results/<device>/power_<date>.json)")
    args = parser.parse_args(argv)
    record, cache, runs = Record(__file__, argv), gpu_timing.cache_bytes(), []
    peers = [name for name in args.peers.split(",") if name]
    sides, skipped = peers_gpu.collect(args.types.split(","), ["float16"], 128, None, [None], peers)
    with tempfile.NamedTemporaryFile("w+") as log, torch.inference_mode():
        asks = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits", "-lms", "20"]
        # Why not its number: nvidia-smi counts devices that CUDA_VISIBLE_DEVICES hides too.
        asks += ["-i", f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"]
        watcher = subprocess.Popen(asks, stdout=log, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            for n, k in report.shapes(args.shapes):
                problem = peers_gpu.Problem.make(n, k, "cuda", lambda nbytes: gpu_timing.copies_for(nbytes, cache))
                for side in sides:
                    ready = side.open(problem)
                    for m in map(int, args.ms.split(",")):
                        x, stream = torch.randn(m, k, device="cuda").half(), torch.cuda.Stream()
                        ready.prepare(x)
                        stream.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(stream):
                            some = ready.calls[:4] if m >= 1024 else ready.calls
                            once, _ = gpu_timing.all_at_once([lambda call=call, x=x: call(x) for call in some])
                            ms, start, end = run_for(once, args.for_ms)
                        runs.append((side.name, n, k, m, ms * 1e3 / len(some), start, end))
                        time.sleep(0.2)  # the device cools down
        finally:
            watcher.terminate()
            watcher.wait()
        seen = samples(log.name)
    rows = []
    for *of, us, start, end in runs:
        own = [s for s in seen if start + SETTLES < s[0] < end]
        if not own:
            print(*of, "no sample: --for-ms is too short", file=sys.stderr)
            continue
        mhz, watts = (sum(s[i] for s in own) / len(own) for i in (1, 2))
        reasons, degrees = sorted({s[3] for s in own}), max(s[4] for s in own)
        rows.append([*of, round(us, 3), round(mhz), round(watts), reasons, degrees])
        print(f"{of[0]} {of[1]}x{of[2]} M={of[3]}: {us:.2f} us, {mhz:.0f} MHz, {watts:.0f} W, {reasons}")
    record.keep(args, skipped=skipped, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
