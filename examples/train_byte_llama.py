"""Train the byte-level Llama that `lowbit demo` quantizes, or a larger one, and write it as a HuggingFace checkpoint.

    python examples/train_byte_llama.py --out build/byte_llama
    python examples/train_byte_llama.py --size 25m --device cuda --out build/byte_llama_25m

The text ships with CPython: the topics of `pydoc_data` and every docstring of the standard library; for the large model
the topics and the whole sources, 11 MB. A token is a byte; a form feed separates documents. Files are held out by the
hash of their name; a document that also stands in a file to train on is left out of the held-out text. Another version
of Python gives another text.

One seed, one thread and a fixed number of steps: the same Python, torch and CPU give the same small checkpoint, in
about seven minutes on one core. On a GPU sums are taken in any order, and two runs differ in the last digits.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEPARATOR = b"\f"
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """A model and how it is trained; all rows of its Linears are whole groups of 64."""

    model: dict  # of LlamaConfig
    context: int  # bytes of a window
    steps: int
    batch: int  # windows of a step
    rates: tuple[float, float]  # of Muon and of AdamW, at the top
    sources: bool  # whole files to read, not docstrings alone
    held_out: int  # bytes at most


SIZES = {
    "1m": Size(  # 1.33 M parameters
        {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6},
        256, 1400, 8, (0.02, 4e-3), False, 125_000,
    ),
    "25m": Size(  # 24.3 M parameters
        {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
        512, 1500, 64, (0.006, 3e-3), True, 200_000,
    ),
}  # fmt: skip


def clean(text: str) -> str:
    """The text of one document: no separator inside, one newline at its end."""
    return text.replace(SEPARATOR.decode(), "").strip() + "\n"


def docstrings(path: Path) -> list[str]:
    """Every docstring of a Python file, each under a line that names what it documents."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # the standard library ships broken files, for its own tests
        return []
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        title = path.stem
        if isinstance(node, ast.ClassDef):
            title = f"class {node.name}"
        elif isinstance(node, FUNCTIONS):
            title = f"{node.name}({ast.unparse(node.args)})"
        found.append(clean(f"{title}\n\n{text}"))
    return found


def source(path: Path) -> list[str]:
    """The text of a Python file, as a list of one or none."""
    try:
        return [clean(path.read_text(encoding="utf-8"))]
    except UnicodeDecodeError:
        return []


def documents(whole: bool = False) -> dict[str, list[str]]:
    """Name of a file (or topic) to its texts, in a fixed order: of a file its docstrings, or the whole of it."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    found = {f"topic:{name}": [clean(text)] for name, text in sorted(topics.items())}
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(set(inner) - SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py") and name != "topics.py":
                path = Path(folder, name)
                found[path.relative_to(root).as_posix()] = source(path) if whole else docstrings(path)
    return {name: texts for name, texts in found.items() if texts}


def split(found: dict[str, list[str]], limit: int) -> tuple[bytes, bytes]:
    """(text to train on, held-out text of at most `limit` bytes): 1 file in 10 is held out, by the hash of its name."""
    train, held = [], []
    for name, texts in found.items():
        (held if hashlib.sha256(name.encode()).digest()[0] < 26 else train).extend(texts)
    seen = set(train)
    size, kept = 0, []
    for text in held:
        size += len(text.encode()) + 1
        if text not in seen and size <= limit:
            kept.append(text)
    return SEPARATOR.join(t.encode() for t in train), SEPARATOR.join(t.encode() for t in kept)


def batches(text: bytes, size: int, context: int, seed: int):
    """Endless batches int64 [size, context + 1] of windows of the text: every byte once before any byte twice."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    chance = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(context, (1,), generator=chance))
        count = (len(tokens) - start - 1) // context
        for rows in torch.randperm(count, generator=chance).split(size):
            if len(rows) == size:
                yield torch.stack([tokens[start + r * context :][: context + 1] for r in rows.tolist()]).long()


@torch.no_grad()
def bits_a_byte(model, text: bytes) -> float:
    """Mean bits a byte of the text, in windows of as many bytes as the model reads that do not see each other."""
    context = model.config.max_position_embeddings
    tokens = torch.frombuffer(bytearray(SEPARATOR + text), dtype=torch.uint8).long()
    total = 0.0
    for start in range(0, len(text), context):
        window = tokens[start : start + context + 1].to(model.device)
        logits = model(window[None, :-1]).logits[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return total / math.log(2) / len(text)


def make_model(size: Size) -> LlamaForCausalLM:
    """An untrained model."""
    config = LlamaConfig(
        **size.model, vocab_size=256, num_key_value_heads=2, max_position_embeddings=size.context,
        tie_word_embeddings=True,
        bos_token_id=SEPARATOR[0], eos_token_id=SEPARATOR[0], pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_optimizers(model, rates: tuple[float, float]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for the embedding and the gains.

    Why: after 150 steps of 12 windows the small model's held-out text costs 2.5 bits a byte; with AdamW for all, 4.1.
    """
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    return [
        torch.optim.Muon(inside, lr=rates[0], weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rates[1], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(size: Size, text: bytes, steps: int, batch: int, seed: int, device: torch.device) -> LlamaForCausalLM:
    """A trained model in float32: a short warm-up, then the rate falls to zero along a half cosine."""
    torch.manual_seed(seed)
    model = make_model(size).to(device)
    optimizers = make_optimizers(model, size.rates)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    warm, began, windows = max(1, min(50, steps // 10)), time.time(), batches(text, batch, size.context, seed)
    for step in range(steps):
        rate = min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / (steps - warm)))
        window = next(windows).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(window[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
        if step % 100 == 99 or step + 1 == steps:
            bits = loss.item() / math.log(2)
            print(f"step {step + 1}/{steps}  {bits:.3f} bits a byte  {time.time() - began:.0f} s", file=sys.stderr)
    return model.eval()


def byte_tokenizer() -> Tokenizer:
    """The tokenizer in which token i is byte i: byte-level BPE without a single merge."""
    # Why: the byte-level alphabet writes byte b as itself where it is printable, else as the next letter from U+0100.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b) if b in printable else chr(256 + others.index(b)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write(model, held: bytes, out: Path) -> None:
    """The checkpoint in float16, its tokenizer and the held-out text."""
    model.half().save_pretrained(out)
    limit = model.config.max_position_embeddings
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), clean_up_tokenization_spaces=False, model_max_length=limit
    )
    wrapped.save_pretrained(out)
    (out / "held_out.txt").write_bytes(held)
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint to write")
    parser.add_argument("--size", choices=SIZES, default="1m", help="parameters (default: %(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, help="1400 for 1m, 1500 for 25m")
    parser.add_argument("--batch", type=int, help="windows a step: 8 of 256 bytes for 1m, 64 of 512 for 25m")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = SIZES[args.size]
    steps, batch = args.steps or size.steps, args.batch or size.batch
    if args.device.type == "cpu":
        torch.set_num_threads(1)  # Why: sums are then taken in one order, so a run can be repeated bit for bit
    text, held = split(documents(size.sources), size.held_out)
    print(f"{len(text)} bytes to train on, {len(held)} held out", file=sys.stderr)
    model = train(size, text, steps, batch, args.seed, args.device)
    write(model, held, args.out)
    model.float()  # the weights that were written, rounded to float16
    print(json.dumps({"held_out_bits_a_byte": round(bits_a_byte(model, held), 4), "steps": steps}))


if __name__ == "__main__":
    main()
