"""Prints what lowbit reads of each format of others, held against independent decoders; --write puts it into a page.

    python examples/importer_matrix.py --write docs/formats.md

Needs a checkout and `pip install 'lowbit[test]'`; half a minute on one CPU thread, no GPU. The writers of tests/formats
write each weight number by number, as the format is specified, and say in float64 what it means. Where gguf,
compressed-tensors or gptqmodel are installed, these decode the same bytes too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import lowbit
from lowbit import InexactError, quantize

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- importer-matrix:begin -->\n", "<!-- importer-matrix:end -->\n"
HEAD = ("format", "version, layout", "bits", "becomes", "against the specification", "against the library")
PACKAGES = ("torch", "gguf", "compressed-tensors", "gptqmodel")


def rows(found: Iterable) -> list[tuple[str, ...]]:
    """Cells as HEAD names them, of Cases (tests/formats/cases.py); widths with the same answers share a row."""
    made: dict[tuple, list[int]] = {}
    for case in found:
        becomes, stated, library = measured(case)
        key = (case.format, case.layout, becomes.replace(f"{case.bits}", "#", 1), stated, library)
        made.setdefault(key, []).append(case.bits)
    return [
        (form, layout, _span(bits), becomes.replace("#", str(bits[0]) if len(bits) == 1 else "*"), *answers)
        for (form, layout, becomes, *answers), bits in made.items()
    ]


def measured(case) -> tuple[str, str, str]:
    """(what the weight becomes, its error against case.expected, its error against the library's)."""
    try:
        qt = case.read()
    except InexactError as error:
        changed = quantize(error.dequantize(), "int8", group_size=-1, method="mse").dequantize(torch.float64)
        return "refused", f"{_error(changed, case.expected)} by --requantize int8, whole rows", "-"
    qt.validate()
    kind = qt.dtype.name + {"none": "", "zero": " with zeros", "min": " with minima"}[qt.zero_kind]
    kind += {"float8_e8m0fnu": ", E8M0 scales", "float8_e4m3fn": ", E4M3 scales"}.get(qt.scheme.scale_type, "")
    kind += ", row_scales" if qt.row_scales is not None else ""
    kind += ", codebook" if qt.codebook is not None else ""
    kind += ", perm" if qt.perm is not None else ""
    library = "-" if case.library is None else _error(qt.dequantize(torch.float32), case.library().float())
    return kind, _error(qt.dequantize(torch.float64), case.expected), library


def _error(got: torch.Tensor, expected: torch.Tensor) -> str:
    """ "exact", or the largest distance as a part of the largest weight."""
    if torch.equal(got, expected.to(got.dtype)):
        return "exact"
    return f"{float((got.double() - expected.double()).abs().max() / expected.double().abs().max()):.1e}"


def _span(bits: list[int]) -> str:
    whole = len(bits) > 2 and bits == list(range(bits[0], bits[-1] + 1))
    return f"{bits[0]} to {bits[-1]}" if whole else ", ".join(map(str, bits))


def section(table: list[tuple[str, ...]], versions: dict[str, str | None]) -> str:
    """The table as Markdown; versions: of the packages that it was made with."""
    with_ = [f"{name} {release}" for name, release in versions.items() if release]
    lines = [
        f"Made by `python examples/importer_matrix.py --write docs/formats.md`; do not edit. {', '.join(with_)}.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{' --- |' * len(HEAD)}",
        *(f"| {' | '.join(row)} |" for row in table),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also replace the table of this page")
    args = parser.parse_args()
    if not (ROOT / "tests" / "formats").is_dir():
        parser.error(f"needs a checkout of lowbit with tests/formats, got {ROOT}")
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "tests"))
    from formats import cases

    versions = {"lowbit": lowbit.__version__, **{name: cases.installed(name) for name in PACKAGES}}
    text = section(rows(cases.cases()), versions)
    print(text, end="")
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        if page.count(BEGIN) != 1 or page.count(END) != 1:
            parser.error(f"{args.write} must have the lines {BEGIN.strip()} and {END.strip()} once each")
        draft = args.write.with_name(f".{args.write.name}.{os.getpid()}")
        draft.write_text(page.split(BEGIN)[0] + BEGIN + text + END + page.split(END)[1], encoding="utf-8")
        os.replace(draft, args.write)


if __name__ == "__main__":
    main()
