"""``python -m generator --out build/gen``: see --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lowbit.errors import LowbitError
from lowbit.scheme import why_not

from .enumerate import decoder, rows
from .families import families
from .manifest import manifest, support_table, write
from .naming import parse_tags, row_name
from .render import sources


def explain(tags: str) -> str:
    """Which kernels serve a pair of tags such as w3a8, how they read its codes, and the reason for each that is not."""
    weight, acts = parse_tags(tags)
    kind, multiplier = decoder(weight)
    how = {
        "codes": f"integer products on the CPU use {multiplier} * code",
        "bytes": "integer products on the CPU use a table of bytes",
        "floats": "every product is in floating point (no byte form: the values span too wide)",
        "codebook": "every product is in floating point (the values are a table that comes with the weight)",
    }[kind]
    lines = [f"{weight.name}: {weight.bits} bits in planes of {weight.planes}; {how}"]
    if weight.byte_form:
        lines.append("  byte = value * 2**{} + {}".format(*weight.byte_form))
    for act in acts:
        for family in families():
            reason = why_not(weight, act, family=family.name)
            for variant in family.variants:
                name = row_name(weight, act, family.name, variant.name)
                lines.append(f"  {name}: " + (f"no: {reason}" if reason else "built"))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0, or 2 after one sentence on bad input."""
    parser = argparse.ArgumentParser("generator", description=sys.modules["generator"].__doc__)
    parser.add_argument("--out", type=Path, help="write sources, registries and manifest.json to this folder")
    parser.add_argument("--arch", help="only these devices, comma-separated (cpu, cuda)")
    parser.add_argument("--cuda-archs", help="only kernels compiled for one of these architectures ('80;90a')")
    parser.add_argument(
        "--only", help="only kernels whose name matches these globs ('w3*,*_avx2,w4a16_decode_*'), or 'none'"
    )
    parser.add_argument("--list", action="store_true", help="print the kernels' names")
    parser.add_argument("--table", action="store_true", help="print the support table in Markdown")
    parser.add_argument("--explain", metavar="TAGS", help="say which kernels serve tags such as w3a8, and why not")
    args = parser.parse_args(argv)
    archs = None if args.cuda_archs is None else args.cuda_archs.split(";")
    try:
        if args.explain:
            print(explain(args.explain))
            return 0
        found = rows(args.arch, args.only, archs)
    except LowbitError as error:
        print(f"generator: {error}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(row.name for row in found))
    if args.table:
        print(support_table(found), end="")
    if args.out:
        files = sources(found)
        files["manifest.json"] = manifest(found, list(files), archs)
        touched = write(args.out, files)
        print(f"generator: {len(found)} kernels in {len(files)} files, {len(touched)} changed", file=sys.stderr)
    elif not (args.list or args.table):
        parser.error("expected one of --out, --list, --table, --explain")
    return 0


if __name__ == "__main__":
    sys.exit(main())
