"""The formats of others: :func:`find` picks the one of a checkpoint's configuration, ``FORMATS`` lists them."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import FormatError, nearest
from .auto_round import AutoRound
from .awq import Awq
from .base import Format, Layer
from .bitnet import BitNet
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors
from .fp8 import Fp8
from .gptq import Gptq
from .hqq import Hqq
from .modelopt import ModelOpt
from .mxfp4 import Mxfp4
from .torchao import TorchAo

#: Every format that a configuration can ask for: one row each.
FORMATS: tuple[type[Format], ...] = (
    *(Gptq, Awq, CompressedTensors, BitsAndBytes, Fp8),
    *(Hqq, AutoRound, TorchAo, ModelOpt, Mxfp4, BitNet),
)

__all__ = ["FORMATS", "Format", "Layer", "find"]


def find(config: Mapping) -> Format | None:
    """The format of a checkpoint, by the dict of its config.json, its ``quantization_config`` alone, or the dict of an
    old quantize_config.json or quant_config.json. None where nothing is quantized, and for lowbit's own.

    Raises FormatError for a ``quant_method`` that is not known, and for settings that a format does not have.
    """
    settings = _settings(config)
    if not settings or settings.get("quant_method") == "lowbit":
        return None
    for kind in FORMATS:
        if kind.claims(settings):
            return kind(settings)
    method = settings.get("quant_method")
    known = [kind.name for kind in FORMATS]
    raise FormatError(f"no known format is called {method!r:.100}; did you mean {nearest(str(method), known)}?")


def _settings(config: Mapping) -> dict | None:
    """The part of a configuration that speaks of quantization, with a quant_method."""
    if not isinstance(config, Mapping):
        raise FormatError(f"a configuration must be a JSON object, got {type(config).__name__}")
    whole = config
    for place in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key) if isinstance(place, Mapping) else None
            if found is not None:
                if not isinstance(found, Mapping):
                    raise FormatError(f"{key} must be a JSON object, got {type(found).__name__}")
                config = found
                break
        else:
            continue
        break
    settings = dict(config)
    if settings.get("quant_method") == "mxfp4":
        return {**settings, "num_experts": _experts(whole)}
    if settings.get("quant_method") is not None:
        return settings
    # Why: files of 2023 and bitsandbytes state no method; what they do state tells them apart.
    if "w_bit" in settings and "q_group_size" in settings:
        return {**settings, "quant_method": "awq"}
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return {**settings, "quant_method": "bitsandbytes"}
    if "config_groups" in settings:
        return {**settings, "quant_method": "compressed-tensors"}
    produced = settings.get("quantization")
    if isinstance(produced, Mapping) and "quant_algo" in produced:
        return {**produced, "quant_method": "modelopt"}
    if "bits" in settings and "group_size" in settings:
        return {**settings, "quant_method": "gptq"}
    return None


def _experts(config: Mapping):
    """How many experts a layer of a model has, as its config.json says."""
    for place in (config.get("text_config"), config):
        for key in ("num_local_experts", "num_experts"):
            if isinstance(place, Mapping) and key in place:
                return place[key]
    return None
