"""convert: a checkpoint in a format of others becomes one of lowbit's own, weight by weight, with the same values."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import FormatError, InexactError
from ..quantizers import quantize
from ..scheme import Scheme
from ..tensor import QuantTensor
from ..tensor_checks import checked_path
from . import native
from . import safetensors_file as container
from .foreign import INDEX, Folder, open_foreign
from .gguf_source import Gguf
from .settings import described

_SHARD_BYTES = 2 << 30


def convert(
    src,
    dst,
    *,
    requantize: str | None = None,
    gguf_names: bool = False,
    group_size: int = 128,
    method: str = "mse",
    shard_bytes: int = _SHARD_BYTES,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, int]:
    """Convert the checkpoint src (a folder, or a .gguf file) to a new folder dst of lowbit's native format.

    A weight keeps its values exactly; one that the canonical form cannot hold is an InexactError, unless requantize
    names a weight type: then its values are quantized anew (group_size and method as for :func:`lowbit.quantize`).
    Tensors that are not quantized, and the other files of the folder, are copied. Memory holds one layer and one shard
    of at most shard_bytes (more only for a single weight that is larger). dst appears whole or not at all; src is left
    as it is. progress: called with (done, total, name).

    A GGUF file becomes a model of transformers: its names, its order of the rows of q and k, a config.json, and an
    embedding of floats (float32 where the file quantizes it). With gguf_names it keeps GGUF's names and order, and has
    no config.json. Its metadata go to gguf_metadata.json.

    Returns counts: "exact", "requantized", "widened" (to float32) and "copied" tensors. Raises FormatError, also for a
    GGUF file of an architecture whose names are not known; DtypeError for what is no path; OSError as the system gives
    it.
    """
    dst = checked_path(dst, "dst")
    if dst.exists():
        raise FormatError(f"{dst} exists already; give the name of a folder that does not")
    with open_foreign(src, gguf_names) as source:
        temporary = dst.absolute().with_name(f".{dst.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        temporary.mkdir()
        try:
            shards = _Shards(temporary, shard_bytes)
            again = {"dtype": requantize, "group_size": group_size, "method": method} if requantize else None
            counts = _write_weights(source, shards, again, progress)
            shards.finish()
            _write_config(source, temporary, shards.schemes, requantize and method)
            for path in source.others():
                shutil.copyfile(path, temporary / path.name)
            os.replace(temporary, dst)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return counts


def _write_weights(source: Folder | Gguf, shards: _Shards, again: dict | None, progress) -> dict[str, int]:
    counts = {"exact": 0, "requantized": 0, "widened": 0, "copied": 0}
    for done, name in enumerate(source.names, 1):
        if name not in source.layers:
            shards.add({name: source.plain(name)})
            counts["widened" if source.is_widened(name) else "copied"] += 1
        else:
            try:
                qt, kind = source.weight(name), "exact"
            except InexactError as error:
                if again is None:
                    raise
                qt, kind = quantize(error.dequantize(), **again), "requantized"
            shards.add_weight(name, qt)
            counts[kind] += 1
        if progress is not None:
            progress(done, len(source.names), name)
    return counts


class _Shards:
    """Writes tensors to files of bounded size, and the index of them at the end."""

    def __init__(self, folder: Path, most: int):
        self.folder, self.most = folder, most
        self.files: list[list[str]] = []
        self.schemes: dict[str, dict] = {}
        self.total, self.seen = 0, set()
        self._clear()

    def _clear(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.entries: dict[str, dict] = {}
        self.size = 0

    def add_weight(self, name: str, qt: QuantTensor) -> None:
        tensors, entry = native.describe(name, qt.validate(name))
        self.add(tensors, {name: entry})
        self.schemes[name] = described(qt)

    def add(self, tensors: dict[str, torch.Tensor], entries: dict | None = None) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if self.tensors and self.size + size > self.most:
            self._flush()
        for name in tensors:
            if name in self.seen:
                raise FormatError(f"two tensors would be called {name}")
        self.seen.update(tensors)
        self.tensors.update(tensors)
        self.entries.update(entries or {})
        self.size += size

    def _flush(self) -> None:
        metadata = {"format": "pt"}
        if self.entries:
            metadata["lowbit"] = json.dumps({"format": native.FORMAT, "weights": self.entries})
        container.write(self.folder / f"{len(self.files)}.part", self.tensors, metadata)
        self.files.append(list(self.tensors))
        self.total += self.size
        self._clear()

    def finish(self) -> None:
        """Write what is left, give the files their names, write the index where there is more than one."""
        if self.tensors or not self.files:
            self._flush()
        count = len(self.files)
        if count == 1:
            os.replace(self.folder / "0.part", self.folder / "model.safetensors")
            return
        places = {}
        for i, names in enumerate(self.files):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            os.replace(self.folder / f"{i}.part", self.folder / file)
            places.update(dict.fromkeys(names, file))
        _write_json(self.folder / INDEX, {"metadata": {"total_size": self.total}, "weight_map": places})


def _write_config(source: Folder | Gguf, folder: Path, schemes: dict[str, dict], method) -> None:
    if isinstance(source, Gguf):
        _write_json(folder / "gguf_metadata.json", dict(source.metadata))
    if source.config is None:
        return
    config = {key: value for key, value in source.config.items() if key != "compression_config"}
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config["text_config"] = {k: v for k, v in nested.items() if k != "quantization_config"}
    floats = [n for n in source.names if n not in source.layers and n.endswith(".weight") and source.dims(n) == 2]
    if schemes:
        config["quantization_config"] = quantization_config(schemes, [name.removesuffix(".weight") for name in floats])
    if schemes and method:
        config["quantization_config"]["method"] = method
    _write_json(folder / "config.json", config)


def quantization_config(schemes: dict[str, dict], left: list[str]) -> dict:
    """The ``quantization_config`` of layers with these schemes: the most common one, the others under ``dynamic``.

    left: names of matrices that are not quantized.
    """

    def frozen(scheme: dict) -> tuple:
        return tuple(scheme.items())

    common = dict(Counter(map(frozen, schemes.values())).most_common(1)[0][0])
    by_last: dict[str, set] = {}
    for name, scheme in schemes.items():
        by_last.setdefault(name.rpartition(".")[2], set()).add(frozen(scheme))
    dynamic = {}
    for name, scheme in schemes.items():
        changed = {key: value for key, value in scheme.items() if value != common[key]}
        last = name.rpartition(".")[2]
        if changed and last != "lm_head":
            alone = len(by_last[last]) == 1 and not last.isdecimal()
            dynamic[rf"(^|\.){re.escape(last)}$" if alone else f"^{re.escape(name)}$"] = changed
    made = {"quant_method": "lowbit", "format": native.FORMAT, **_quiet(common)}
    if "lm_head" in schemes:
        head = schemes["lm_head"]
        made["lm_head"] = head["dtype"]
        # Why: of its own the output layer has but its type, with the kind of zeros that is usual for it.
        implied = {**common, "dtype": head["dtype"], "zero_kind": Scheme.make(head["dtype"], 128).zero_kind}
        changed = {key: value for key, value in head.items() if value != implied[key]}
        if changed:
            dynamic["^lm_head$"] = changed
    made["skip"] = [name if _harmless(name, schemes) else f"^{re.escape(name)}$" for name in left]
    if dynamic:
        made["dynamic"] = dynamic
    return made


def _quiet(scheme: dict) -> dict:
    """Without what is false: readers that know no codebooks read all other checkpoints."""
    return {key: value for key, value in scheme.items() if value is not False}


def _harmless(name: str, schemes: dict) -> bool:
    """Whether an entry of skip matches no layer that is quantized."""
    return not any(f".{name}." in f".{other}." for other in schemes)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
