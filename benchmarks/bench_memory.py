"""What only moves weights on a GPU: pack, unpack and expand, and how much of the memory's speed each reaches.

    python benchmarks/bench_memory.py
    python benchmarks/bench_memory.py --types int4 --shape 8192x8192

benchmarks/README.md says how and what the result file holds.
"""

from __future__ import annotations

import argparse
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE] if HERE not in sys.path else []
sys.path.append(os.path.dirname(HERE))  # the checkout's lowbit, where none is installed

import gpu_timing  # noqa: E402
import matmul_report as report  # noqa: E402
import torch  # noqa: E402
from gpu_record import Record  # noqa: E402

import lowbit  # noqa: E402
from lowbit import extension  # noqa: E402
from lowbit.bit_stream import stream_bytes  # noqa: E402
from lowbit.dtypes import WEIGHT_TYPES, weight_type  # noqa: E402
from lowbit.pack import layout as layouts  # noqa: E402

_WIDTHS = "int1,int2,int3,int4,int5,int6,int7,int8,float4_e2m1,float8_e4m3"


def moving(dtype: str, n: int, k: int) -> list[tuple[str, list, int]]:
    """Name, calls on copies, and bytes read and written by one call, of everything that moves the weight."""
    bits = weight_type(dtype).bits
    copies = gpu_timing.copies_for(n * k * bits // 8, gpu_timing.cache_bytes())
    streams = [
        torch.randint(0, 256, (n, stream_bytes(k, bits)), dtype=torch.uint8, device="cuda") for _ in range(copies)
    ]
    packed = [torch.empty(layouts.codes_shape("nvidia", n, k, bits), dtype=torch.uint8, device="cuda") for _ in streams]
    numbers, pairs = (n, k, bits, layouts.LAYOUTS.index("nvidia")), list(zip(streams, packed, strict=True))
    extension.load()
    pack, unpack = torch.ops.lowbit.pack_codes, torch.ops.lowbit.unpack_codes
    first, codes = streams[0].clone(), streams[0].nbytes + packed[0].nbytes
    found = [("pack", [lambda a=a, b=b: pack(a, *numbers, b) for a, b in pairs], codes)]
    for call in found[0][1]:
        call()
    found.append(("unpack", [lambda a=a, b=b: unpack(b, *numbers, a) for a, b in pairs], codes))
    streams[0].zero_()
    found[1][1][0]()
    if not torch.equal(streams[0], first):
        raise SystemExit(f"bench_memory.py: {dtype}: what was packed did not come back")
    weight = torch.randn(n, k, device="cuda").half()
    pw = lowbit.pack_weight(lowbit.quantize(weight, dtype, group_size=128, method="rtn"), "cuda")
    outs = [torch.empty_like(weight) for _ in range(2)]

    def expand(out: torch.Tensor):
        return lambda: torch.ops.lowbit.dequantize_out(pw.codes, pw.scales, pw.zeros, *pw.numbers, 0, out, pw.codebook)

    found.append(("expand", [expand(out) for out in outs], pw.nbytes + weight.nbytes))
    return found


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--types", type=report.names, default=_WIDTHS.split(","), help=f"weight types, or all ({_WIDTHS})")
    add("--shape", type=report.shapes, default=[(28672, 8192)], help="N x K (28672x8192)")
    add("--device", help="folder under benchmarks/results (from the device's name)")
    add("--out", help="result file (benchmarks/results/<device>/memory_<date>.json); '-' for none")
    args = parser.parse_args(argv)
    args.types = [t.name for t in WEIGHT_TYPES] if args.types == ["all"] else args.types
    return args


def main(argv: list[str]) -> int:
    args, record = options(argv), Record(__file__, argv)
    if not torch.cuda.is_available():
        print("bench_memory.py: error: needs a CUDA device", file=sys.stderr)
        return 2
    rows, lines = [], [["us (TB/s)", "N x K", "pack", "unpack", "expand to float16"]]
    for dtype, (n, k) in ((d, s) for d in args.types for s in args.shape):
        cells = []
        for name, calls, nbytes in moving(dtype, n, k):
            timing = gpu_timing.graph_us(calls)
            row = {"what": name, "weight": dtype, "shape": [n, k], "bytes": nbytes, "us": round(timing.us, 2)}
            row |= {"least_us": round(timing.least, 2), "most_us": round(timing.most, 2), "how": timing.how}
            rows.append(row | {"tbs": round(nbytes / timing.us * 1e-6, 3)})
            cells.append(f"{timing.us:.0f} ({rows[-1]['tbs']:.2f})")
        torch.cuda.empty_cache()
        lines.append([dtype, f"{n} x {k}", *cells])
    print(report.markdown(lines))
    record.keep(args, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
