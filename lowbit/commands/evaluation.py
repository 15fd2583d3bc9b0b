"""What `lowbit eval` does, as functions: load a causal language model, take calibration tokens, measure models."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch

from ..errors import FormatError, LowbitError
from .corpus import kind_of_checkpoint
from .measure import ROUNDS, CausalMeter, load, size_as_saved, speeds
from .progress import Progress
from .report import item_of

#: Samples and their length of calibration tokens; as many as the text has where it is short.
SAMPLES, LENGTH = 128, 512


def evaluate(models, tokenizer, text: str, *, window: int = 512) -> list[dict]:
    """One dict a model, of what predicting a text costs and takes.

    models: (name, causal language model, checkpoint folder it is stored in) of models that read the same tokens; the
    first is the reference of the others. window: tokens that see each other. Keys: type (the name), bits_a_byte,
    perplexity (a token), total_bytes (as saved), rate (greedy tokens a second), bytes and tokens of the text, window;
    of quantized models linear_bytes, linear_weights and bits_a_weight; of all but the first kl (bits a token, from the
    reference's prediction of the next token) and same (share of equal top tokens).
    """
    reference = models[0][1]
    meter = CausalMeter(reference, tokenizer, text, window)
    rows = []
    with Progress(len(models) * meter.steps + ROUNDS) as progress:
        for name, model, folder in models:
            progress.start(name)
            row = {"type": name, **meter.quality(model, reference if rows else None, progress)}
            row |= size_as_saved(model, item_of(folder))
            if row["linear_weights"]:
                row["bits_a_weight"] = 8 * row["linear_bytes"] / row["linear_weights"]
            else:
                del row["linear_bytes"], row["linear_weights"]
            rows.append(row | {"bytes": meter.bytes, "tokens": meter.tokens, "window": meter.window})
        progress.start("speed")
        for row, rates in zip(rows, speeds(meter, [model for _, model, _ in models], progress)):
            row["rate"] = statistics.median(rates)
    return rows


def load_causal(folder: Path, dtype):
    """(model on the CPU, tokenizer) of a checkpoint folder, quantized ones too. Raises FormatError."""
    if kind_of_checkpoint(folder, quantized=True) != "causal":
        raise FormatError(f"lowbit eval measures causal language models, got another kind in {folder}")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("quantization_config"):
        return load(folder, "causal", dtype)
    import lowbit

    if not hasattr(lowbit, "from_pretrained"):
        raise FormatError(f"{folder} is quantized; this version of lowbit loads float checkpoints only, see --dtype")
    from transformers import AutoTokenizer

    return lowbit.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)


def calibration_tokens(ids: list[int], model, *, samples: int = SAMPLES, length: int = LENGTH, seed: int = 0):
    """Token ids int64 ``[samples, length]``: windows of a text's tokens, chosen with a seed, that do not overlap.

    Fewer of them where the text is short; shorter ones where the model reads less at a time. Raises LowbitError for a
    text of less than eight windows.
    """
    length = min(length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or length)
    count = len(ids) // length
    if count < 8:
        raise LowbitError(f"the calibration text must have at least 8 x {length} tokens, got {len(ids)}")
    windows = torch.tensor(ids[: count * length]).view(count, length)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return windows[order[:samples].sort().values]
