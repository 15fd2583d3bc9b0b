"""`lowbit convert`: a checkpoint in a format of others becomes one of lowbit's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import LowbitError
from ..scheme import Scheme
from .progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lowbit convert`."""
    parser.description = (
        "Reads a checkpoint folder quantized by GPTQ, AWQ, compressed-tensors, bitsandbytes, HQQ and others, or a GGUF "
        "file, and writes it in lowbit's own format. Values stay exactly as they are."
    )
    parser.add_argument("src", type=Path, metavar="SRC", help="a checkpoint folder, or a .gguf file; left as it is")
    parser.add_argument("dst", type=Path, metavar="DST", help="the folder to write; it must not exist")
    anew = "weight type, such as int4, for weights that cannot be held exactly: their values are quantized anew"
    parser.add_argument("--requantize", metavar="TYPE", help=anew)
    own = "keep the names and the order of rows of a GGUF file, and write no config.json"
    parser.add_argument("--gguf-names", action="store_true", help=own)
    parser.add_argument(
        "--group-size", type=int, default=128, help="group size with --requantize (default: %(default)s)"
    )
    parser.add_argument("--method", default="mse", help="method with --requantize (default: %(default)s)")
    size = "largest file to write, in GB, which is also about the memory it takes (default: %(default)s)"
    parser.add_argument("--shard-size", type=float, default=2, metavar="GB", help=size)


def run(args: argparse.Namespace) -> int:
    """Convert and print what was done; 0. Raises LowbitError on bad input."""
    from .. import extension
    from ..checkpoint.convert import convert

    extension.load()  # Why: a variable with a value that does not exist is an error of every command
    if args.requantize is not None:
        Scheme.make(args.requantize, args.group_size)
    if not 0.001 <= args.shard_size <= 1000:
        raise LowbitError(f"--shard-size must be from 0.001 to 1000 GB, got {args.shard_size}")
    try:
        with Progress(1) as bar:

            def progress(done: int, total: int, name: str) -> None:
                bar.total, bar.label = total, name
                bar.step(done - bar.done)

            bar.start(f"converting {args.src}")
            options = {"requantize": args.requantize, "group_size": args.group_size, "method": args.method}
            options["gguf_names"] = args.gguf_names
            counts = convert(args.src, args.dst, **options, shard_bytes=int(args.shard_size * 1e9), progress=progress)
    except OSError as error:
        raise LowbitError(f"{error.filename or args.src}: {error.strerror or error}") from error
    anew = f", {counts['requantized']} quantized anew" if counts["requantized"] else ""
    wide = f", {counts['widened']} quantized embeddings made float32" if counts["widened"] else ""
    print(f"{args.dst}: {counts['exact']} weights, exact{anew}{wide}; {counts['copied']} other tensors copied")
    return 0
