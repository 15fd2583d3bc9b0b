"""The table that people read and the file that stays."""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import tempfile


def versions(plugins: list[str]) -> dict[str, str]:
    """Version of every library that took part; for plug-ins, the name they give themselves."""
    found = {}
    for name in ("lowbit", "torch", "numpy", "onnxruntime", "openvino"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "lowbit" not in found:  # Why: run from a checkout, it is importable without being installed.
        try:
            import lowbit

            found["lowbit"] = f"{lowbit.__version__} (checkout)"
        except ImportError:
            pass
    return found | {name.split()[0]: name.partition(" ")[2] for name in plugins}


def spread(values: list[float]) -> dict[str, float] | None:
    """Least, median and most; None when there is nothing."""
    return {"least": min(values), "median": round(statistics.median(values), 1), "most": max(values)}


def cell(row: dict | None, m: int) -> str:
    """ "us (GB/s)" at M = 1, "ms / GFLOP/s" beyond; "~" marks a time with the waiting taken off."""
    if row is None:
        return "-"
    mark = "~" if row["kind"] == "corrected" else ""
    if m == 1:
        return f"{mark}{row['median_s'] * 1e6:.0f} ({row['gbs']:.1f})"
    return f"{mark}{row['median_s'] * 1e3:.2f} / {row['gflops']:.0f}"


def table(rows: list[dict], shape: tuple[int, int], threads: int, ms: list[int]) -> str:
    """Markdown: a line for each side, a column for each M, the spread at M = 1 and the worst error."""
    head = [f"{shape[0]}x{shape[1]}, {threads} thread{'s' * (threads > 1)}", "bits/w"]
    for m in ms:
        head += ["M=1: us (GB/s)", "p10-p90 us"] if m == 1 else [f"M={m}: ms / GFLOP/s"]
    lines = [head + ["NRMSE"], ["---"] * (len(head) + 1)]
    chosen = [r for r in rows if tuple(r["shape"]) == shape and r["threads"] == threads]
    for side in dict.fromkeys(r["side"] for r in chosen):
        mine = {r["m"]: r for r in chosen if r["side"] == side}
        line = [side, f"{next(iter(mine.values()))['bits']:.2f}"]
        for m in ms:
            timing = mine.get(m, {}).get("timing")
            line.append(cell(timing, m))
            if m == 1:
                line.append(f"{timing['p10_s'] * 1e6:.0f}-{timing['p90_s'] * 1e6:.0f}" if timing else "-")
        errors = [r["nrmse"] for r in mine.values() if r["nrmse"] is not None]
        lines.append([*line, f"{max(errors):.1e}" if errors else "n/c"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(path: str, record: dict) -> None:
    """JSON to a temporary file beside ``path``, then renamed: a reader sees the old file or the new one."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as out:
            json.dump(record, out, indent=1)
            out.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
