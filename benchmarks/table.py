"""Prints a CPU result file as the tables that bench_cpu.py prints: a markdown table for each shape and thread count.

usage: python benchmarks/table.py RESULT.json [--only GLOB ...]
"""

import argparse
import fnmatch
import json
from pathlib import Path

from peers_cpu import report


def heading(result: dict) -> str:
    """The machine, the read rate while it ran, the versions and the date, in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    reads = "; ".join(
        f"{shape}: {threads} thread(s) {rate['least']}-{rate['most']} GB/s, median {rate['median']}"
        for shape, rates in result["read_gbs"].items()
        for threads, rate in rates.items()
    )
    first = f"{result['machine']['cpu']}, {result['lowbit_isa']} kernels; {versions}; {result['date'][:10]}."
    return f"{first}\nPlain reads: {reads}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", metavar="GLOB", help="only sides whose name fits; may be repeated")
    args = parser.parse_args()
    result = json.loads(args.file.read_text())
    print(heading(result))
    rows = [r for r in result["rows"] if any(fnmatch.fnmatch(r["side"], glob) for glob in args.only or ["*"])]
    for shape, threads in sorted({(tuple(r["shape"]), r["threads"]) for r in rows}):
        ms = sorted({r["m"] for r in rows if r["threads"] == threads})
        print("\n" + report.table(rows, shape, threads, ms))


if __name__ == "__main__":
    main()
