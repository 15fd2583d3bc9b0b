"""`lowbit quantize`: a HuggingFace checkpoint to a quantized one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import FormatError, LowbitError, SchemeError
from .progress import Progress

_STEPS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lowbit quantize`."""
    parser.description = (
        "Quantizes a float safetensors checkpoint of HuggingFace's form into a new folder, shard by shard. DST appears "
        "when it is complete; a run that was cut off goes on where it stopped when it is started again."
    )
    parser.add_argument("src", type=Path, metavar="SRC", help="folder with config.json and *.safetensors")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to make; must not exist")
    parser.add_argument(
        "--dtype", default="int4", help="weight type, such as int3, uint4, float4_e2m1 (default: %(default)s)"
    )
    parser.add_argument(
        "--group-size", type=int, default=128, help="weights that share a scale, or -1 for a row (default: 128)"
    )
    parser.add_argument("--method", default="mse", help="rtn, mse, hqq, gptq or awq (default: %(default)s)")
    parser.add_argument("--zero-kind", help="zero or min, for uint types (default: zero)")
    parser.add_argument(
        "--scale-dtype",
        metavar="TYPE",
        help="float16, bfloat16, float32 or, for types without zeros, float8_e8m0fnu or float8_e4m3fn "
        "(default: that of the weights)",
    )
    parser.add_argument("--act", help="int8: quantize activations while the model runs")
    parser.add_argument("--lm-head", metavar="DTYPE", help="weight type of the output layer (default: left as it is)")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="NAME", help="layers to leave alone; may be repeated"
    )
    parser.add_argument(
        "--dynamic", metavar="JSON", help='settings of some layers, such as \'{"down_proj$": {"dtype": "int8"}}\''
    )
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="text that gptq and awq read, plain UTF-8")
    parser.add_argument("--seed", type=int, default=0, help="which parts of the calibration text (default: 0)")
    parser.add_argument("--device", default="cpu", help="where to compute (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write DST, say how large it is, and return 0. Raises LowbitError on bad input."""
    dynamic = _parsed(args.dynamic)
    from .. import extension, quantize_checkpoint

    extension.load()  # reads the environment: a misspelt variable is an error here too
    calibration = None if args.calibration is None else _tokens(args)
    options = {name: getattr(args, name) for name in ("group_size", "method", "zero_kind", "scale_dtype", "act")}
    with Progress(_STEPS) as bar:
        shown = ""

        def progress(done: int, total: int, name: str) -> None:
            nonlocal shown
            layer = ".".join(name.split(".")[:3])
            if layer != shown:
                shown = layer
                bar.start(layer)
            bar.step(done * _STEPS // max(total, 1) - bar.done)

        quantize_checkpoint(
            args.src, args.dst, args.dtype, **options, skip=args.skip, dynamic=dynamic, lm_head=args.lm_head,
            calibration=calibration, device=args.device, progress=progress,
        )  # fmt: skip
    before, after = (sum(p.stat().st_size for p in folder.glob("*.safetensors")) for folder in (args.src, args.dst))
    print(f"{args.dst}: {after / 1e6:.1f} MB of weights, from {before / 1e6:.1f} MB")
    return 0


def _tokens(args: argparse.Namespace):
    """Token ids of the calibration text, by the tokenizer that lies beside the model."""
    from types import SimpleNamespace

    from .corpus import read_text
    from .evaluation import calibration_tokens

    text = read_text(args.calibration)
    try:
        from transformers import AutoConfig, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.src, local_files_only=True)
        config = AutoConfig.from_pretrained(args.src, local_files_only=True)
    except ImportError:
        raise LowbitError(
            "--calibration needs transformers, which is not installed: pip install 'lowbit[hf]'"
        ) from None
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"{args.src} has no tokenizer that can be read: {reason}") from error
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return calibration_tokens(ids, SimpleNamespace(config=config), seed=args.seed)


def _parsed(text: str | None):
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise SchemeError(f"--dynamic must be JSON, such as '{{\"down_proj$\": null}}': {error}") from None
