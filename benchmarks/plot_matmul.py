"""Plots result files of bench_matmul.py: time and effective TB/s, over the bits of a weight and over M, and TFLOP/s
where there are many rows.

usage: python benchmarks/plot_matmul.py RESULT.json [RESULT.json ...] [--shape NxK] [--act float16] [--out FILE.svg]

The picture is written beside the first file, unless --out says where; its ending picks the form (svg, png).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

_STYLES = ("o-", "s:", "^--", "d-.", "v:")
_LABELS = {"us": "us", "tbs": "TB/s: weight, x and y over time", "tflops": "TFLOP/s: 2 M N K over time"}
_MANY = 64  # rows, from which on TFLOP/s say more than TB/s
_FEW = 16  # rows, up to which the bits of a weight say how long a product takes


def rows_of(results: list[dict], shape: tuple[int, int], act: str) -> list[dict]:
    """The timed rows of one shape, int weights and the peers' alike; of forced kernels none."""
    rows = [row for result in results for row in result["rows"]]
    fits = [r for r in rows if tuple(r["shape"]) == shape and r["act"] == act and r["us"] and r["tile"] is None]
    work = 2e-6 * shape[0] * shape[1]
    return [
        r | {"tflops": work * r["m"] / r["us"]} for r in fits if r["weight"] is None or r["weight"].startswith("int")
    ]


def curves(rows: list[dict], along: str, apart: str) -> dict[tuple, tuple[list, list[dict]]]:
    """(family, value of ``apart``) -> the values of ``along`` in order, and their rows."""
    found = {}
    for key in dict.fromkeys((r["family"], r[apart]) for r in rows):
        mine = sorted((r for r in rows if (r["family"], r[apart]) == key), key=lambda r: r[along])
        found[key] = ([r[along] for r in mine], mine)
    return found


def plot(results: list[dict], shapes: list[tuple[int, int]], act: str, path: Path) -> None:
    """One row of panels a shape: lines of one colour have one M or one width, lowbit's are solid.

    Over bits (products of few rows, if there are any) and over M, of what the results have more than one of.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen = {shape: rows_of(results, shape, act) for shape in shapes}
    few = {shape: [r for r in rows if r["bits"] <= 8] for shape, rows in seen.items()}
    if any(r["m"] <= _FEW for rows in few.values() for r in rows):
        few = {shape: [r for r in rows if r["m"] <= _FEW] for shape, rows in few.items()}
    widths, ms = ({r[what] for rows in seen.values() for r in rows if r["bits"] <= 8} for what in ("bits", "m"))
    kinds = [(few, value, "bits", "m") for value in ("us", "tbs") if len(widths) > 1]
    kinds += [(seen, value, "m", "bits") for value in ("us", "tbs") if len(ms) > 1 or not kinds]
    kinds += [(seen, "tflops", "m", "bits")] * (len(ms) > 1 and max(ms) >= _MANY)
    size = (5.5 * len(kinds), 4.8 * len(shapes))
    figure, panels = pyplot.subplots(len(shapes), len(kinds), figsize=size, squeeze=False)
    for row, shape in zip(panels, shapes, strict=True):
        for panel, (rows, value, along, apart) in zip(row, kinds, strict=True):
            _draw(panel, rows[shape], value, along, apart)
            panel.set_title(f"{shape[0]} x {shape[1]}, x {act}")
    figure.suptitle(f"{results[0]['device']['name']}, {results[0]['date'][:10]}")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path)
    pyplot.close(figure)


def _draw(panel, rows: list[dict], value: str, along: str, apart: str) -> None:
    colours = {key: f"C{i % 10}" for i, key in enumerate(sorted({r[apart] for r in rows}))}
    styles = dict(zip(["lowbit", *dict.fromkeys(r["family"] for r in rows if r["family"] != "lowbit")], _STYLES))
    for (family, key), (places, mine) in curves(rows, along, apart).items():
        label = f"{family}, M={key}" if apart == "m" else f"{family} W{key}"
        panel.plot(places, [r[value] for r in mine], styles.get(family, ":"), color=colours[key], ms=4, label=label)
    panel.set_xlabel("bits of a weight" if along == "bits" else "M, rows of x")
    panel.set_ylabel(_LABELS[value])
    if along == "m":
        panel.set_xscale("log", base=2)
    if along == "m" and value == "us":
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    if rows:
        panel.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--shape", action="append", help="N x K; may be repeated (every shape of the first file)")
    parser.add_argument("--act", default="float16", help="type of x (float16)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        results = [json.loads(path.read_text()) for path in args.files]
    except (OSError, ValueError) as why:
        parser.error(f"expected result files of bench_matmul.py: {why}")
    known = list(dict.fromkeys(tuple(r["shape"]) for r in results[0]["rows"]))
    shapes = [tuple(map(int, text.split("x"))) for text in args.shape] if args.shape else known
    path = args.out or args.files[0].with_suffix(".svg")
    plot(results, shapes, args.act, path)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
