"""What `lowbit demo` and `lowbit eval` make of their measurements: a table, a JSON file, and the facts beside them."""

from __future__ import annotations

import datetime
import json
import os
from importlib.metadata import version
from pathlib import Path

from ..errors import LowbitError

_FACTS = ("lowbit", "torch", "python", "cpu", "in use", "threads")
_ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_SHOWN_ONLY = ("columns", "notes", "first")


def context() -> dict:
    """Date and environment of a measurement."""
    from .info import info

    facts = info()
    environment = {name: facts[name] for name in _FACTS} | {"transformers": version("transformers")}
    return {"date": datetime.date.today().isoformat(), "environment": environment}


def check_target(path: Path | None) -> None:
    """Raises LowbitError when the folder that a JSON file shall lie in does not exist."""
    if path and not path.absolute().parent.is_dir():
        raise LowbitError(f"the folder of --json {path} does not exist")


def item_of(folder: Path) -> int:
    """Bytes of a number as the checkpoint stores it, from its config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return _ITEM.get(str(config.get("dtype") or config.get("torch_dtype")), 4)


def render(report: dict) -> str:
    """The table as text, with a line of context above and the meaning of the columns below."""
    columns = [
        ("type", report.get("first", "type"), "{}"),
        ("bits_a_weight", "bits a weight", "{:.2f}"),
        ("linear_bytes", "linears MB", "{:.3f}"),
        ("total_bytes", "all MB", "{:.3f}"),
        *report["columns"],
    ]
    lines = [[title for _, title, _ in columns]]
    for row in report["rows"]:
        shown = {**row, **{key: row[key] / 1e6 for key in ("linear_bytes", "total_bytes") if key in row}}
        lines.append([form.format(shown[key]) if key in shown else "-" for key, _, form in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    table.insert(1, "  ".join("-" * width for width in widths))
    facts = report["environment"]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("lowbit", "torch", "transformers", "python"))
    text = report["text"]
    how = f"; groups of {report['group_size']}, method {report['method']}" if "method" in report else ""
    head = [
        f"{report['model']}: {report['parameters'] / 1e6:.2f} M parameters; {text['bytes']} bytes of "
        f"{text['file']}{how}",
        f"{versions}; {facts['cpu']}, {facts['in use']} kernels, threads: {facts['threads']}",
        "",
    ]
    foot = [
        "",
        *report["notes"],
    ]
    if report["parameters"] < 5e6:
        foot.append("A model this small spends most of its time outside the products: its speed is not the kernels'.")
    return "\n".join([*head, *table, *foot])


def write_json(report: dict, path: Path) -> None:
    """Write the report beside ``path`` first and rename it, so that no half-written file is ever seen."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        kept = {key: value for key, value in report.items() if key not in _SHOWN_ONLY}
        draft.write_text(json.dumps(kept, indent=1) + "\n")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise LowbitError(f"{path} cannot be written: {error.strerror or error}") from None
