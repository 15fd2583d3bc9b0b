"""`lowbit eval`: how well a causal language model predicts a text, how far it is from a float model, size and speed."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

from ..errors import LowbitError
from .corpus import CHECKPOINT, HELD_OUT, read_text
from .progress import Progress
from .report import check_target, context, render, write_json

_FLOATS = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lowbit eval`."""
    parser.description = (
        "Measures a causal language model on a text; with --reference or --dtype also how far it is from a float "
        "model. Windows of the text do not overlap, and every token of it is scored."
    )
    parser.add_argument("model", metavar="MODEL", help="a HuggingFace checkpoint folder, or byte_llama, which ships")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: the one that ships)")
    parser.add_argument("--bytes", type=int, metavar="N", help="measure with the first N bytes of the text only")
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens a window (default: %(default)s)")
    parser.add_argument("--reference", metavar="MODEL", help="the float model that KL and top tokens are compared with")
    parser.add_argument("--dtype", help="quantize MODEL to this weight type first; the reference is then MODEL itself")
    parser.add_argument("--group-size", type=int, help="with --dtype (default: 128)")
    parser.add_argument("--method", help="with --dtype: rtn, mse, hqq, gptq, awq (default: mse)")
    calibration = "text that gptq and awq are calibrated with, which should not be the one to measure with"
    parser.add_argument("--calibration", type=Path, metavar="FILE", help=calibration)
    parser.add_argument("--seed", type=int, default=0, help="for the choice of calibration samples")
    parser.add_argument("--float", default="float32", choices=_FLOATS, help="type to compute in (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="such as cuda (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as torch has it)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table and how it was made to FILE")


def run(args: argparse.Namespace) -> int:
    """Print the table and return 0. Raises LowbitError on bad input, before the long work where it can be known."""
    report = measure(args)
    print(render(report))
    if args.json:
        write_json(report, args.json)
        print(f"written to {args.json}")
    return 0


def measure(args: argparse.Namespace) -> dict:
    """Everything that the table shows, as JSON can hold it."""
    for name, least in (("bytes", 1000), ("window", 2), ("threads", 1)):
        given = getattr(args, name)
        if given is not None and given < least:
            raise LowbitError(f"--{name} must be at least {least}, got {given}")
    if args.reference and args.dtype:
        raise LowbitError("--dtype compares with MODEL itself; expected either it or --reference, got both")
    if not args.dtype and (args.group_size, args.method, args.calibration) != (None, None, None):
        raise LowbitError("--group-size, --method and --calibration go with --dtype, which is missing")
    args.group_size, args.method = 128 if args.group_size is None else args.group_size, args.method or "mse"
    check_target(args.json)
    text = read_text(args.text or HELD_OUT)
    if args.bytes is not None:
        text = text.encode()[: args.bytes].decode(errors="ignore")
    calibration = None if args.calibration is None else read_text(args.calibration)

    import torch

    try:
        device = torch.device(args.device)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # Why both: torch built without CUDA asserts
        raise LowbitError(f"--device {args.device} cannot be used: {str(error).splitlines()[0]}") from None
    before = torch.get_num_threads()
    try:
        if args.threads:
            torch.set_num_threads(args.threads)
        return _measure(args, text, calibration, device)
    finally:
        torch.set_num_threads(before)


def _measure(args, text: str, calibration: str | None, device) -> dict:
    import torch

    from .. import extension
    from .evaluation import evaluate, load_causal
    from .measure import CausalMeter

    extension.load()
    dtype = getattr(torch, args.float)
    folder = _folder(args.model)
    if args.dtype:
        _check_settings(args, calibration)
    model, tokenizer = load_causal(folder, dtype)
    model.to(device)
    models = [("float" if args.dtype else args.model, model, folder)]
    if args.reference:
        beside = _folder(args.reference)
        reference, its_tokenizer = load_causal(beside, dtype)
        if its_tokenizer(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise LowbitError(
                f"{args.reference} cuts the text into other tokens than {args.model}, so they don't compare"
            )
        models.insert(0, (args.reference, reference.to(device), beside))
    if args.dtype:
        models.append((args.dtype, _quantized(args, model, tokenizer, calibration), folder))
    rows = evaluate(models, tokenizer, text, window=args.window)
    return {
        "model": args.model,
        "first": "model",
        "parameters": model.num_parameters(),
        "text": {"file": (args.text or HELD_OUT).name, "bytes": rows[0]["bytes"], "window": rows[0]["window"]},
        **({"group_size": args.group_size, "method": args.method} if args.dtype else {}),
        "compute": args.float,
        "device": args.device,
        **context(),
        "columns": [*CausalMeter.columns[:1], ("perplexity", "perplexity", "{:.3f}"), *CausalMeter.columns[1:]],
        "notes": [
            f"MB as saved, scales included; computed in {args.float}.",
            f"perplexity: a token, in windows of {rows[0]['window']}.",
            *CausalMeter.about,
        ],
        "rows": rows,
    }


def _quantized(args, model, tokenizer, calibration: str | None):
    """A quantized copy of a model; the output layer stays float, as in `lowbit demo`."""
    import torch

    from ..convert_model import quantize_model
    from .evaluation import calibration_tokens

    copied, head = copy.deepcopy(model), model.get_output_embeddings()
    options = {"group_size": args.group_size, "method": args.method}
    if calibration is not None:
        ids = tokenizer(calibration, add_special_tokens=False)["input_ids"]
        options["calibration"] = calibration_tokens(ids, model, seed=args.seed)
    skip = [name for name, module in model.named_modules() if module is head]
    with Progress(sum(type(module) is torch.nn.Linear for module in model.modules())) as progress:
        progress.start(f"{args.dtype}, {args.method}")

        def count(*step) -> None:
            progress.step()
            progress.note(*step)

        return quantize_model(copied, args.dtype, skip=skip, progress=count, **options)


def _check_settings(args, calibration: str | None) -> None:
    import torch

    from ..quantizers import CALIBRATED, quantize

    calibrated = args.method in CALIBRATED
    quantize(torch.zeros(1, 16), args.dtype, group_size=args.group_size, method="mse" if calibrated else args.method)
    if calibrated != (calibration is not None):
        got = "without" if calibrated else "with"
        raise LowbitError(f"--calibration goes with the methods {' and '.join(CALIBRATED)}, got {args.method} {got} it")


def _folder(model: str) -> Path:
    return CHECKPOINT if model == "byte_llama" else Path(model)
