"""`lowbit demo`: quantize a checkpoint at several widths and print what it costs and what it saves."""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path

from ..dtypes import weight_type
from ..errors import LowbitError
from ..scheme import Scheme
from .corpus import CHECKPOINT, HELD_OUT, kind_of_checkpoint, read_text
from .progress import Progress
from .report import check_target, context, item_of, render, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lowbit demo`."""
    parser.description = (
        "Quantizes the small byte-level Llama that ships with lowbit, or any HuggingFace checkpoint folder on this "
        "machine, and prints its size, its quality and its speed beside the float model."
    )
    types = parser.add_mutually_exclusive_group()
    types.add_argument("--bits", default="8,4,3,2,1", help="widths to try, as int types (default: %(default)s)")
    types.add_argument("--dtype", help="weight types to try instead of --bits, such as uint4,float4_e2m1")
    parser.add_argument("--group-size", type=int, default=64, help="weights that share a scale (default: %(default)s)")
    parser.add_argument("--method", default="mse", help="rtn, mse or hqq (default: %(default)s)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a HuggingFace checkpoint: causal LM or encoder")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the UTF-8 text to measure with")
    parser.add_argument("--bytes", type=int, metavar="N", help="measure with the first N bytes of the text only")
    threads = "threads (default: 1 for the shipped checkpoint, which is too small to share; else as torch has it)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table and how it was made to FILE")


def run(args: argparse.Namespace) -> int:
    """Print the table and return 0. Raises LowbitError on bad input, before the long work where it can be known."""
    report = measure(args)
    print(render(report))
    if args.json:
        write_json(report, args.json)
        print(f"written to {args.json}")
    return 0


def chosen_types(args: argparse.Namespace) -> list[str]:
    """The weight types asked for, checked. Raises SchemeError or LowbitError."""
    if args.dtype is not None:
        names = [name.strip() for name in args.dtype.split(",")]
    else:
        names = [bits.strip() for bits in args.bits.split(",")]
        wrong = [bits for bits in names if bits not in map(str, range(1, 9))]
        if wrong:
            raise LowbitError(f"--bits must be whole numbers from 1 to 8 with commas between, got {args.bits!r}")
        names = [f"int{bits}" for bits in names]
    return [Scheme.make(weight_type(name), args.group_size).weight.name for name in names]


def measure(args: argparse.Namespace) -> dict:
    """Everything that the table shows, as JSON can hold it. Raises LowbitError on bad input, before the long work."""
    types = chosen_types(args)
    folder = args.model or CHECKPOINT
    kind = kind_of_checkpoint(folder)
    text = read_text(args.text or HELD_OUT)
    if args.bytes is not None:
        if args.bytes < 1000:
            raise LowbitError(f"--bytes must be at least 1000, got {args.bytes}")
        text = text.encode()[: args.bytes].decode(errors="ignore")
    if args.threads is not None and args.threads < 1:
        raise LowbitError(f"--threads must be at least 1, got {args.threads}")
    check_target(args.json)

    import torch

    before = torch.get_num_threads()
    try:
        if args.threads or not args.model:
            torch.set_num_threads(args.threads or 1)
        return _measure(args, types, folder, kind, text)
    finally:
        torch.set_num_threads(before)


def _measure(args, types: list[str], folder: Path, kind: str, text: str) -> dict:
    import torch

    from .. import extension, quantize, quantize_model
    from .measure import ROUNDS, CausalMeter, EncoderMeter, load, size_as_saved, speeds

    for name in types:  # the quantizer itself judges the settings, on a weight that takes no time
        quantize(torch.zeros(1, 16), name, group_size=args.group_size, method=args.method)
    extension.load()
    model, tokenizer = load(folder, kind)
    meter = (CausalMeter if kind == "causal" else EncoderMeter)(model, tokenizer, text)
    item = item_of(folder)
    rates, rows = [], []
    with Progress((1 + len(types)) * meter.steps + len(types) * ROUNDS) as progress:
        progress.start("float")
        first = {"type": "float", **meter.quality(model, None, progress)}
        for name in types:
            quantized = copy.deepcopy(model)
            options = {"group_size": args.group_size, "method": args.method, "skip": meter.skip}
            quantize_model(quantized, name, **options, progress=progress.note)
            progress.start(name)
            row = {"type": name, **size_as_saved(quantized, item), **meter.quality(quantized, model, progress)}
            beside, own = speeds(meter, (model, quantized), progress)
            rates += beside
            row["rate"] = statistics.median(own)
            row["bits_a_weight"] = 8 * row["linear_bytes"] / row["linear_weights"]
            rows.append(row)
    weights = rows[0]["linear_weights"]
    first |= size_as_saved(model, item)
    first |= {"linear_weights": weights, "linear_bytes": weights * item, "bits_a_weight": 8.0 * item}
    first["rate"] = statistics.median(rates)
    return {
        "model": "byte_llama" if folder == CHECKPOINT else str(folder),
        "parameters": model.num_parameters(),
        "text": {"file": (args.text or HELD_OUT).name, "bytes": meter.bytes},
        "group_size": args.group_size,
        "method": args.method,
        **context(),
        "columns": list(meter.columns),
        "notes": [
            "MB as saved, scales included; the float row is computed in float32, whatever type it is stored in.",
            *meter.about,
        ],
        "rows": [first, *rows],
    }
