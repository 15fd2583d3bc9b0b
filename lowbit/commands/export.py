"""`lowbit export`: a checkpoint of lowbit's own becomes one that other programs read."""

from __future__ import annotations

import argparse
from pathlib import Path

from .progress import Progress

_STEPS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lowbit export`."""
    from ..checkpoint.export_files import FORMATS

    parser.description = (
        "Writes a checkpoint that `lowbit quantize` or `lowbit convert` made in the format of another library. Values "
        "stay exactly as they are; what the format cannot hold is an error. A run that was cut off goes on when it is "
        "started again."
    )
    parser.add_argument("src", type=Path, metavar="SRC", help="a checkpoint folder; left as it is")
    parser.add_argument("dst", type=Path, metavar="DST", help="the folder to write; it must not exist")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write DST, say how large it is, and return 0. Raises LowbitError on bad input."""
    from .. import extension
    from ..checkpoint.export_files import export_checkpoint

    extension.load()  # Why: a variable with a value that does not exist is an error of every command
    with Progress(_STEPS) as bar:

        def progress(done: int, total: int, name: str) -> None:
            bar.label = name
            bar.step(done * _STEPS // max(total, 1) - bar.done)

        bar.start(f"exporting {args.src}")
        export_checkpoint(args.src, args.dst, args.format, progress=progress)
    size = sum(path.stat().st_size for path in args.dst.glob("*.safetensors"))
    print(f"{args.dst}: {size / 1e6:.1f} MB of weights as {args.format}")
    return 0
