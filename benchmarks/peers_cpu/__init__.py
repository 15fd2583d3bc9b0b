"""The sides that bench_cpu.py times, one file a library; each is optional."""

from __future__ import annotations

import re
from fnmatch import fnmatch

from . import lowbit_side, openvino_sides, ort_sides, plugin, torch_sides
from .side import Side, Unavailable


def collect(args) -> tuple[list[Side], dict[str, str]]:
    """Every side that the options ask for and this machine can run, and the reason for each that is left out.

    Raises ValueError for a weight type that does not exist.
    """
    sources = {
        "lowbit": lambda: lowbit_side.sides(args.types, args.acts, args.group),
        "torch": torch_sides.sides,
        "onnxruntime": ort_sides.sides,
        "openvino": openvino_sides.sides,
    }
    sides, skipped = [], {}
    for name, make in sources.items():
        if args.only and not any(_may_fit(name, pattern) for pattern in args.only):
            continue  # Why: a library that nobody asked for is not imported.
        try:
            sides += make()
        except Unavailable as why:
            skipped[name] = str(why)
    for path in args.ggml:
        try:
            found, missing = plugin.sides(path)
        except Unavailable as why:
            skipped[path] = str(why)
        else:
            sides += found
            skipped |= missing
    if args.only:
        sides = [s for s in sides if any(fnmatch(s.name, p) for p in args.only)]
    return [s for s in sides if not any(fnmatch(s.name, p) for p in args.skip)], skipped


def _may_fit(family: str, pattern: str) -> bool:
    """Whether some side of the family could have a name that fits, judged by what comes before the first wildcard."""
    head = re.split(r"[*?\[ ]", pattern)[0]
    return family.startswith(head) or head.startswith(family)
