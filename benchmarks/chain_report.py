"""The tables that bench_chain.py prints: microseconds of a layer, and how often faster lowbit's is."""

from __future__ import annotations

from matmul_report import cell, markdown

#: (model, M) -> times the best peer's chain at W4.
GOALS = {("8b", 1): 1.5}


def line(rows: list[dict], side: str, model: str) -> str:
    """One side of one model, in short: us by M."""
    return ", ".join(f"M={r['m']} {cell(r)}" for r in rows if (r["side"], r["model"]) == (side, model))


def table(rows: list[dict], model: str) -> str:
    """A line for each side, a column for each M: us of a layer (TB/s of its weights); the worst error."""
    chosen = [r for r in rows if r["model"] == model]
    ms = sorted({r["m"] for r in chosen})
    lines = [[f"a layer of {model}", *(f"M={m}: us (TB/s)" for m in ms), "error", "of the weight"]]
    for side in dict.fromkeys(r["side"] for r in chosen):
        mine = {r["m"]: r for r in chosen if r["side"] == side}
        cells = [cell(mine.get(m)) + (f" ({mine[m]['tbs']:.2f})" if m in mine and mine[m]["tbs"] else "") for m in ms]
        worst = [
            max((r[key] for r in mine.values() if r[key] is not None), default=None) for key in ("err", "weight_err")
        ]
        lines.append([side, *cells, *("-" if error is None else f"{error:.1e}" for error in worst)])
    return markdown(lines)


def ratios(rows: list[dict]) -> str:
    """How often faster each of lowbit's chains is than each peer's with as many bits, or 16, and than the best."""
    peers = [r for r in rows if r["family"] not in ("lowbit", "small") and r["us"]]
    families = list(dict.fromkeys(r["family"] for r in peers))
    if not families:
        return ""
    lines = [["times faster", "M", "than the best peer", "goal", *families]]
    for row in rows:
        if row["family"] != "lowbit" or not row["us"]:
            continue
        same = ("model", "m", "act")
        beside = [p for p in peers if p["bits"] in (row["bits"], 16) and all(p[key] == row[key] for key in same)]
        if not beside:
            continue
        best = min(beside, key=lambda p: p["us"])
        goal = GOALS.get((row["model"], row["m"])) if row["bits"] == 4 and not row["apart"] else None
        reached = "-" if goal is None else f"{goal:g}" + ("" if best["us"] / row["us"] >= goal else " *")
        by = {p["family"]: f"{p['us'] / row['us']:.2f}" for p in beside}
        cells = [
            f"{row['side']} {row['model']}",
            str(row["m"]),
            f"{best['us'] / row['us']:.2f} {best['family']}",
            reached,
        ]
        lines.append([*cells, *(by.get(family, "-") for family in families)])
    return markdown(lines)


def everything(rows: list[dict], skipped: dict[str, str], small: str) -> str:
    """All that is printed at the end of a run; "*": the goal was missed."""
    parts = [table(rows, model) for model in dict.fromkeys(r["model"] for r in rows)]
    parts += [ratios(rows), f"norm and silu-mul: {small}"]
    parts += ["\n".join(f"without {name}: {why}" for name, why in skipped.items())]
    return "\n\n".join(part for part in parts if part)
