"""Writes docs/accuracy.md: every quantization method at 8, 4, 3 and 2 bits on small models.

    python examples/accuracy_table.py --out docs/accuracy.md
    python examples/accuracy_table.py --checkpoint build/byte_llama_25m --device cuda --jobs 8 --out docs/accuracy.md

Each run writes the section of one model, by default of the checkpoint that ships with lowbit (ten minutes on one CPU
thread), and keeps those of others. A checkpoint is what train_byte_llama.py writes. The same model is measured a second
time with outliers put in: some gains of every norm are multiplied by 30 and the columns that read them are divided by
30, so that the float model computes the same and quantizers have the large activations that large models are known for.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import multiprocessing
import os
import re
import types
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch

import lowbit
from lowbit.commands.corpus import CHECKPOINT
from lowbit.commands.evaluation import calibration_tokens, load_causal
from lowbit.commands.measure import CausalMeter
from lowbit.commands.progress import Progress
from lowbit.quantizers import block_hadamard, rotate_weight, unrotate_weight

METHODS = ("rtn", "mse", "hqq", "hadamard + mse", "awq", "gptq")
GROUP, FACTOR, CHANNELS, SEED = 64, 30, 4, 0


def inject_outliers(model, factor: float = FACTOR, channels: int = CHANNELS, seed: int = SEED) -> None:
    """Multiply the gain of some channels of every norm of a Llama and divide the columns that read it: same function.

    The channels, chosen by the seed, are the same in all layers, as they are in large models.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(model.config.hidden_size, generator=generator)[:channels]
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[chosen] *= factor
                for reader in readers:
                    reader.weight[:, chosen] /= factor


def quantized(model, dtype: str, method: str, calibration: torch.Tensor):
    """A quantized copy. With "hadamard" the weights are rotated, quantized, and rotated back into float weights: what a
    product with rotated activations would compute, for no kernel rotates them yet.
    """
    model = copy.deepcopy(model)
    if not method.startswith("hadamard"):
        data = {"calibration": calibration} if method in lowbit.quantizers.CALIBRATED else {}
        return lowbit.quantize_model(model, dtype, group_size=GROUP, method=method, **data)
    for layer in model.model.layers.modules():
        if type(layer) is torch.nn.Linear:
            rotation = block_hadamard(layer.in_features, seed=SEED)
            qt = lowbit.quantize(rotate_weight(layer.weight.data, rotation), dtype, group_size=GROUP, method="mse")
            layer.weight.data = unrotate_weight(qt.dequantize(torch.float32), rotation)
    return model


class Bench:
    """The float models and the texts that every row is measured with."""

    def __init__(self, folder: Path, size: int, device: torch.device):
        self.plain, tokenizer = load_causal(folder, torch.float32)
        text = (folder / "held_out.txt").read_bytes()
        half = len(text) // 2
        self.meter = CausalMeter(self.plain, tokenizer, text[: min(size, half)].decode(errors="ignore"))
        ids = tokenizer(text[half:].decode(errors="ignore"), add_special_tokens=False)["input_ids"]
        self.calibration = calibration_tokens(ids, self.plain, seed=SEED)
        self.loud = copy.deepcopy(self.plain)
        inject_outliers(self.loud)
        self.plain, self.loud, self.device = self.plain.to(device), self.loud.to(device), device
        self.exact = self.quality(self.plain, None)  # the first, which the others are held against

    def quality(self, model, reference) -> dict:
        return self.meter.quality(model, reference, types.SimpleNamespace(step=lambda: None))

    def row(self, dtype: str, method: str) -> dict:
        """dtype, method and, for the plain model and the one with outliers, what CausalMeter.quality says."""
        made = {"dtype": dtype, "method": method}
        for name, model in (("plain", self.plain), ("outliers", self.loud)):
            made[name] = self.quality(quantized(model, dtype, method, self.calibration), self.plain)
        return made

    def facts(self) -> dict:
        """What the page says of the model and the machine."""
        linears = [m for m in self.plain.model.layers.modules() if type(m) is torch.nn.Linear]
        return {
            "bytes": self.meter.bytes,
            "exact": self.exact,
            "moved": self.quality(self.loud, self.plain),
            "calibration": tuple(self.calibration.shape),
            "parameters": sum(p.numel() for p in self.plain.parameters()),
            "linears": len(linears),
            "hidden": self.plain.config.hidden_size,
            "device": "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
        }


_bench: Bench | None = None


def _start(*settings) -> None:
    global _bench
    torch.set_num_threads(1)
    _bench = Bench(*settings)


def _row(dtype: str, method: str) -> dict:
    return _bench.row(dtype, method)


def measure(folder: Path, size: int, bits: list[int], device: torch.device, jobs: int = 1) -> tuple[dict, list[dict]]:
    """(facts, rows) of Bench, the rows by so many processes."""
    kinds = [(f"{kind}{b}", method) for b in bits for kind in ("int", "uint") for method in METHODS]
    _start(folder, size, device)
    with Progress(len(kinds)) as progress, contextlib.ExitStack() as stack:
        if jobs == 1:
            made = map(_row, *zip(*kinds))
        else:
            # Why spawn: a process that was forked cannot use a GPU that its parent uses.
            context, settings = multiprocessing.get_context("spawn"), (folder, size, device)
            pool = ProcessPoolExecutor(jobs, context, _start, settings)
            made = stack.enter_context(pool).map(_row, *zip(*kinds))
        rows = []
        for row in made:
            rows.append(row)
            progress.start(f"{row['dtype']} {row['method']}")
            progress.step()
    return _bench.facts(), rows


HEAD = f"""\
# Accuracy of the methods

Made by `python examples/accuracy_table.py --out docs/accuracy.md`, one section a run; do not edit.

- **added**: bits a byte above the float model's. **KL**: mean distance of the prediction from the float model's, in
  bits a token; the less noisy of the two. **same**: how often the most likely byte is the same.
- **with outliers**: {CHANNELS} gains of each norm are multiplied by {FACTOR} and the columns that read them divided by
  {FACTOR}. In float the function is the same.
- `int` is symmetric, `uint` has a zero point, with a fraction under `hqq`. With outliers that costs: no code means 0
  any more, and the small weights that large activations meet are read up to half a step off.
- `hadamard + mse`: weights rotated in blocks along K, quantized, rotated back; the kernels do not rotate activations
  yet. With outliers it is worse: rotated, they meet the rounding errors of all weights of a block.

The models are small and have seen little text: read relations between rows, not what a model of 7 B would lose.
`lowbit eval` measures any model.
"""


def section(name: str, facts: dict, rows: list[dict]) -> str:
    """What one model lost, as Markdown."""
    exact, (samples, length) = facts["exact"]["bits_a_byte"], facts["calibration"]
    lines = [
        f"## {name}: {facts['parameters'] / 1e6:.3g} M parameters",
        "",
        f"{datetime.date.today().isoformat()}, lowbit {lowbit.__version__}, torch {torch.__version__}, "
        f"transformers {version('transformers')}, {facts['device']}. A byte-level Llama, its {facts['linears']} linear "
        f"layers quantized in groups of {GROUP}; measured on {facts['bytes']} bytes that it has not seen, at "
        f"{exact:.4f} bits a byte in float. `gptq` and `awq` are calibrated on {samples} samples of {length} bytes of "
        f"other unseen text, chosen with seed {SEED}. Outliers: {CHANNELS} of {facts['hidden']} gains; in float they "
        f"cost a KL of {abs(facts['moved']['kl']):.0e}.",
    ]
    bits = list(dict.fromkeys(int(row["dtype"].lstrip("uint")) for row in rows))
    for b in bits:
        lines += ["", f"### {b} bits", ""]
        lines += [
            "| type | method | added | KL | same | with outliers: added | KL | same |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
        ]
        for row in rows:
            if int(row["dtype"].lstrip("uint")) == b:
                cells = [row["dtype"], row["method"]]
                for quality in (row["plain"], row["outliers"]):
                    cells += [
                        f"{quality['bits_a_byte'] - exact:+.4f}",
                        f"{quality['kl']:.5f}",
                        f"{quality['same']:.1%}",
                    ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def merged(old: str, name: str, made: str) -> str:
    """The page with the section of a model put in its place, or at the end of what the page ``old`` has."""
    parts = re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]
    sections = {part[3:].partition(":")[0]: part for part in parts} | {name: made}
    return "\n".join(part.strip("\n") + "\n" for part in (HEAD, *sections.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page, which may have other models")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, metavar="FOLDER", help="(default: lowbit's own)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="(default: %(default)s)")
    parser.add_argument("--bytes", type=int, default=60_000, help="of the held-out text (default: %(default)s)")
    parser.add_argument("--bits", default="8,4,3,2", help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, also on one GPU (default: %(default)s)")
    args = parser.parse_args()
    bits = [int(b) for b in args.bits.split(",")]
    made = section(args.checkpoint.name, *measure(args.checkpoint, args.bytes, bits, args.device, args.jobs))
    text = merged(args.out.read_text(encoding="utf-8") if args.out.exists() else "", args.checkpoint.name, made)
    draft = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, args.out)


if __name__ == "__main__":
    main()
