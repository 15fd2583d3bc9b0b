"""Prints a CPU result file as the markdown tables of the README and of reports.

usage: python benchmarks/table.py RESULT.json [--only GLOB ...]
M = 1: us and GB/s of weight bytes; larger M: GFLOP/s. "~": the machine was busy, an upper bound of the time.
"""

import argparse
import fnmatch
import json
from pathlib import Path


def cell(timing, m):
    """One time: "581 (14.9)" in us and GB/s for M = 1, GFLOP/s for larger M, "-" without clean samples."""
    if timing is None:
        return "-"
    mark = "" if timing["kind"] == "clean" else "~"
    if m == 1:
        return f"{mark}{timing['median_s'] * 1e6:.0f} ({timing['gbs']:.1f})"
    return f"{mark}{timing['gflops']:.0f}"


def table(result, shape, only=("*",)):
    """The markdown table of one shape; columns are (threads, M), one row a side."""
    rows = [r for r in result["rows"] if r["shape"] == shape]
    columns = sorted({(r["threads"], r["m"]) for r in rows})
    sides = dict.fromkeys(r["side"] for r in rows if any(fnmatch.fnmatch(r["side"], glob) for glob in only))
    found = {(r["side"], r["threads"], r["m"]): r["timing"] for r in rows}
    errors = {side: max((r["nrmse"] for r in rows if r["side"] == side and r["nrmse"]), default=None) for side in sides}
    bits = {r["side"]: r["bits"] for r in rows}
    heads = [f"{'us (GB/s)' if m == 1 else 'GFLOP/s'}, M={m}, {t} thread{'s' * (t > 1)}" for t, m in columns]
    lines = [
        f"| side | bits | error | {' | '.join(heads)} |",
        "|" + " --- |" * (len(columns) + 3),
    ]
    for side in sides:
        error = "n/c" if errors[side] is None else f"{errors[side]:.0e}"
        cells = [cell(found.get((side, t, m)), m) for t, m in columns]
        lines.append(f"| {side} | {bits[side]:.3g} | {error} | {' | '.join(cells)} |")
    return "\n".join(lines)


def heading(result):
    """The machine, the read rate while it ran, the versions and the date, in two lines."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    reads = "; ".join(
        f"{shape}: {threads} thread(s) {rate['least']}-{rate['most']} GB/s"
        for shape, rates in result["read_gbs"].items()
        for threads, rate in rates.items()
    )
    first = f"{machine['cpu']}, {result['lowbit_isa']} kernels; {versions}; {result['date'][:10]}."
    return f"{first}\nPlain reads: {reads}."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", metavar="GLOB", help="only sides whose name fits; may be repeated")
    args = parser.parse_args()
    result = json.loads(args.file.read_text())
    print(heading(result))
    for shape in sorted({tuple(r["shape"]) for r in result["rows"]}):
        print(f"\n{shape[0]} x {shape[1]}\n\n{table(result, list(shape), args.only or ('*',))}")


if __name__ == "__main__":
    main()
