"""The tables that bench_matmul.py prints, its targets, and the options that benchmarks on a GPU share."""

from __future__ import annotations

import math

#: Microseconds to reach on an H200, by (N, K), M and bits of int weights, x fp16, group 128.
TARGET_BITS = (1, 2, 3, 4, 6, 8)
TARGETS = {
    ((8192, 8192), 1): (4.5, 5.5, 7.2, 9.0, 13, 16.8),
    ((8192, 8192), 8): (5.0, 6.0, 8.0, 9.5, 13.5, 17.3),
    ((8192, 8192), 16): (7.0, 7.5, 9.0, 10.5, 14.5, 18),
    ((4096, 4096), 1): (2.2, 2.5, 2.9, 3.3, 4.5, 5.6),
    ((57344, 8192), 1): (24, 33, 45, 57, 85, 112),
}
SHAPES = {
    "targets": [(8192, 8192), (4096, 4096), (57344, 8192)],
    # Layers of language models of 7 to 70 billion parameters.
    "models": [
        (6144, 4096), (4096, 14336), (28672, 4096), (10240, 8192), (8192, 28672), (7168, 8192),
        (8192, 3584), (4608, 3584), (37888, 3584), (55296, 5120), (5120, 27648), (3584, 14336),
    ],
}  # fmt: skip


def line(rows: list[dict], side: str, act: str, shape: tuple[int, int]) -> str:
    """One side at one shape, in short: us by M."""
    mine = [r for r in rows if (r["side"], r["act"], tuple(r["shape"])) == (side, act, shape)]
    return ", ".join(f"M={r['m']} {cell(r)}" for r in mine)


def names(text: str) -> list[str]:
    """An option's value: names with commas between."""
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    """An option's value: whole numbers with commas between."""
    return [int(part) for part in names(text)]


def shapes(text: str) -> list[tuple[int, int]]:
    """An option's value: N x K such as 4096x14336, or sets of :data:`SHAPES`, each shape once."""
    found = []
    for part in names(text):
        found += SHAPES[part] if part in SHAPES else [tuple(map(int, part.split("x", 1)))]
    return list(dict.fromkeys(found))


def cell(row: dict | None) -> str:
    """Microseconds of a row, ``!`` where it was timed without a graph."""
    if row is None:
        return "-"
    if row["us"] is None:
        return f"WRONG ({row['err']:.1e})"
    return f"{row['us']:.1f}" + ("" if row["how"] in ("graph", "host") else "!")


def markdown(lines: list[list[str]]) -> str:
    """A table; the first line is its head."""
    head, *body = lines
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def table(rows: list[dict], shape: tuple[int, int], act: str) -> str:
    """A line for each side, a column for each M: us (TB/s), and the worst error."""
    chosen = [r for r in rows if tuple(r["shape"]) == tuple(shape) and r["act"] == act]
    ms = sorted({r["m"] for r in chosen})
    lines = [[f"{shape[0]}x{shape[1]}, {act}", *(f"M={m}: us (TB/s)" for m in ms), "error"]]
    for side in dict.fromkeys(r["side"] for r in chosen):
        mine = {r["m"]: r for r in chosen if r["side"] == side}
        cells = [cell(mine.get(m)) + (f" ({mine[m]['tbs']:.2f})" if m in mine and mine[m]["us"] else "") for m in ms]
        errors = [r["err"] for r in mine.values() if r["err"] is not None]
        lines.append([side, *cells, f"{max(errors):.1e}" if errors else "-"])
    return markdown(lines)


def _own(rows: list[dict]) -> list[dict]:
    """lowbit's rows of its own choice of kernel."""
    return [r for r in rows if r["family"] == "lowbit" and r["tile"] is None and r["us"]]


def _peers(rows: list[dict], own: dict, family: str | None = None) -> list[dict]:
    """Peers beside one of lowbit's rows: weights of as many bits, and those of 16."""
    same = ("shape", "m", "act")
    return [
        r
        for r in rows
        if r["us"] and r["family"] != "lowbit" and r["bits"] in (own["bits"], 16) and family in (None, r["family"])
        if all(r[key] == own[key] for key in same)
    ]


def targets(rows: list[dict]) -> str:
    """Measured / target us, "*" where that is missed, for each cell of the table, and the best peer at 4 bits."""
    lines = [["N x K", "M", *(f"W{bits}" for bits in TARGET_BITS), "best peer at W4"]]
    for (shape, m), wanted in TARGETS.items():
        at = [r for r in _own(rows) if (tuple(r["shape"]), r["m"], r["act"]) == (shape, m, "float16")]
        found = {r["bits"]: r for r in at if r["weight"] == f"int{r['bits']}" and r["group"] == 128}
        cells = []
        for bits, goal in zip(TARGET_BITS, wanted, strict=True):
            us = found[bits]["us"] if bits in found else None
            cells.append(f"- / {goal:g}" if us is None else f"{us:.1f} / {goal:g}" + ("" if us <= goal else " *"))
        peers = _peers(rows, found[4]) if 4 in found else []
        best = min(peers, key=lambda r: r["us"], default=None)
        lines.append([f"{shape[0]}x{shape[1]}", str(m), *cells, f"{best['us']:.1f} {best['family']}" if best else "-"])
    return markdown(lines)


def speedups(rows: list[dict]) -> str:
    """How often faster lowbit is, by weight type: geometric mean over shapes and M, and the worst of them."""
    families = list(dict.fromkeys(r["family"] for r in rows if r["family"] != "lowbit"))
    if not families:
        return ""
    lines = [["times faster than", "best peer", "worst", "where", *families]]
    for weight, act in dict.fromkeys((r["weight"], r["act"]) for r in _own(rows)):
        mine = [r for r in _own(rows) if (r["weight"], r["act"]) == (weight, act)]
        beside = [(min(p["us"] for p in _peers(rows, r)) / r["us"], r) for r in mine if _peers(rows, r)]
        if not beside:
            continue
        worst, row = min(beside, key=lambda pair: pair[0])
        cells = [f"{weight} {act}", f"{_geomean([ratio for ratio, _ in beside]):.2f} ({len(beside)})", f"{worst:.2f}"]
        cells.append(f"{row['shape'][0]}x{row['shape'][1]} M={row['m']}")
        for family in families:
            ratios = [min(p["us"] for p in found) / r["us"] for r in mine if (found := _peers(rows, r, family))]
            cells.append(f"{_geomean(ratios):.2f} ({len(ratios)})" if ratios else "-")
        lines.append(cells)
    return markdown(lines)


def _geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def everything(rows: list[dict], skipped: dict[str, str], with_targets: bool) -> str:
    """All that is printed at the end of a run."""
    parts = [table(rows, *key) for key in dict.fromkeys((tuple(r["shape"]), r["act"]) for r in rows)]
    parts += [speedups(rows)] + ([targets(rows)] if with_targets else [])
    parts += ["\n".join(f"without {name}: {why}" for name, why in skipped.items())]
    return "\n\n".join(part for part in parts if part)
