"""Checkpoints of other tools, decoded layer by layer to lowbit's form (formats/ knows what theirs mean)."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from pathlib import Path

import torch

from ..errors import FormatError
from ..tensor import QuantTensor
from . import layers
from .names import in_model
from .native import FIELDS
from .safetensors_file import Reader
from .settings import Settings, described
from .source import Source


def state_of(path, config, cls, hub: dict):
    """(config with lowbit's quantization_config, state dict) of a quantized checkpoint in another tool's format.

    The state dict holds the whole model, its weights quantized: that is the peak of memory. Raises FormatError for a
    format that is not known, and for a weight that the canonical form cannot hold exactly.
    """
    source = Source(_folder(path, hub), quantized=True)
    known = _format(source)
    if known is None:
        raise FormatError(f"{path} is quantized in a format that this lowbit does not read")
    with contextlib.ExitStack() as open_files:
        readers = {shard: open_files.enter_context(Reader(source.folder / shard)) for shard in source.shards}
        metadata = {key: text for reader in readers.values() for key, text in reader.metadata.items()}

        def read(key: str) -> torch.Tensor:
            return readers[source.tensors[key].file].read(key)

        found, used, held = {}, set(), {}
        for layer in known.layers(source.tensors, metadata):
            keys = layer.tensors.values()
            # Why kept: the experts of a stack come one after the other out of the same tensors.
            held = held if held.keys() == set(keys) else {key: read(key) for key in keys}
            found[layer.name] = known.decode(layer, {role: held[key] for role, key in layer.tensors.items()})
            used.update(keys)
        state = {key: read(key) for key in source.tensors if key not in used}
    for stem, qt in found.items():
        held = {f"{stem}.{short}": getattr(qt, field) for short, field in FIELDS.items()}
        state |= {name: tensor for name, tensor in held.items() if tensor is not None}
    config = copy.deepcopy(config)
    config.quantization_config = _settings(config, cls, found).to_json()
    return config, state


def _format(source: Source):
    try:
        from .formats import find
    except ImportError:
        return None
    return find(source.config)


def _folder(path, hub: dict) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"], **hub))


def _options(qt: QuantTensor) -> tuple:
    return tuple(described(qt).items())


def _settings(config, cls, found: dict[str, QuantTensor]) -> Settings:
    """Settings that say of every layer of the model what was found for it."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with torch.device("meta"):
        model = cls(plain)
    names = in_model(model, [f"{stem}.weight" for stem in found])
    options = {names[f"{stem}.weight"][0].removesuffix(".weight"): _options(qt) for stem, qt in found.items()}
    common = dict(Counter(options.values()).most_common(1)[0][0])
    head = layers.output_layer(model)[0]
    if head in options and f"{head}.weight" in layers.tied_parameters(model):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    split = any(re.search(r"\.experts\.\d+\.(gate_proj|w1)$", name) for name in options)
    made = Settings.make(
        **common,
        method="rtn",
        dynamic=_dynamic(options, common, head),
        lm_head=dict(options[head])["dtype"] if head in options else None,
        experts="split" if split else "fused",
    )
    chosen, left = layers.choose(model, made)
    absent = [name for name, choice in chosen.items() if not set(choice.matrices) <= set(options)]
    return made.with_(skip=tuple(layers.as_patterns([*left, *absent], [*options])))


def _dynamic(options: dict[str, tuple], common: dict, head: str) -> dict[str, dict]:
    """Entries for the layers that differ: one for all of a kind where they agree, else one a layer."""
    kinds: dict[str, set] = {}
    for name, facts in options.items():
        kinds.setdefault(name.rpartition(".")[2], set()).add(facts)
    made = {}
    for name, facts in options.items():
        last = name.rpartition(".")[2]
        if name == head or dict(facts) != common:
            alike = name != head and len(kinds[last]) == 1
            made[rf"\.{re.escape(last)}$" if alike else f"^{re.escape(name)}$"] = dict(facts)
    return made
