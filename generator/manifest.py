"""The manifest: the list of kernels as data, for the build, the tests, the documents and run-time selection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lowbit.dtypes import ACT_TYPES, KERNEL_TYPES

from .enumerate import Row, decoder

FORMAT = 1


def record(row: Row, cuda_archs: Sequence[str] | None = None) -> dict:
    """One row of the manifest. On the CPU ``isa`` is the variant and ``byte_form`` [shift, offset] or null; on CUDA
    ``archs`` are those that the kernel is compiled for, ``least_group`` is there where it takes none of less than that,
    and the sizes of the variant follow.
    """
    fields = {
        "name": row.name,
        "family": row.family.name,
        "variant": row.variant.name,
        "weight": row.weight.name,
        "act": row.act.name,
        "unit": row.unit,
        "library": row.family.library,
    }
    if row.family.device == "cpu":
        kind, multiplier = decoder(row.weight)
        fields["isa"] = row.variant.name
        fields["decoder"] = f"codes*{multiplier}" if kind == "codes" else kind
        fields["byte_form"] = row.weight.byte_form
    elif cuda_archs is not None:
        fields["archs"] = row.compiled_for(cuda_archs)
    if row.variant.least_group > 16:
        fields["least_group"] = row.variant.least_group
    return fields | dict(row.variant.sizes)


def manifest(found: Sequence[Row], files: Sequence[str], cuda_archs: Sequence[str] | None = None) -> str:
    """manifest.json: the rows one a line, and the generated files that a build compiles."""
    lines = ",\n".join("    " + json.dumps(record(row, cuda_archs)) for row in found)
    compiled = json.dumps([name for name in files if name.endswith((".cpp", ".cu"))])
    return f'{{\n  "format": {FORMAT},\n  "files": {compiled},\n  "kernels": [\n{lines}\n  ]\n}}\n'


def support_table(found: Sequence[Row]) -> str:
    """What is built, in Markdown: weight types (neighbours with equal rows together) x activation types."""
    heads = " | ".join(f"x {a.name}" if not a.on_the_fly else f'`act="{a.name}"`' for a in ACT_TYPES)
    groups: list[tuple[list[str], str, list[str]]] = []
    for weight in KERNEL_TYPES:
        cells = []
        for act in ACT_TYPES:
            built: dict[str, list[str]] = {}
            for row in found:
                if row.weight == weight and row.act == act:
                    part = row.variant.name if row.family.device == "cpu" else row.family.name
                    built.setdefault(row.family.device, []).append(part)
            cells.append("; ".join(f"{d}: " + ", ".join(dict.fromkeys(parts)) for d, parts in built.items()) or "no")
        if groups and groups[-1][1:] == (weight.kind, cells):
            groups[-1][0].append(weight.name)
        else:
            groups.append(([weight.name], weight.kind, cells))
    body = []
    for names, kind, cells in groups:
        named = [f"`{name.replace('codebook', 'uint')}`" for name in names]
        spread = ", ".join(named) if kind == "float" or len(names) < 3 else f"{named[0]} to {named[-1]}"
        body.append(f"| {spread}{' with a codebook' * (kind == 'codebook')} | " + " | ".join(cells) + " |\n")
    return f"| weight | {heads} |\n|" + " --- |" * (len(ACT_TYPES) + 1) + "\n" + "".join(body)


def write(out: Path, files: dict[str, str]) -> list[str]:
    """Write what changed, delete generated files that are no longer made; the names that were touched.

    Why: a file's time decides what ninja compiles again, so equal text must keep its time.
    """
    out.mkdir(parents=True, exist_ok=True)
    touched = []
    for name, text in files.items():
        path = out / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            touched.append(name)
    for path in sorted(out.iterdir()):
        if path.name not in files and path.is_file() and path.read_bytes().startswith(b"// generated"):
            path.unlink()
            touched.append(path.name)
    return touched
