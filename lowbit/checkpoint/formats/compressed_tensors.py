"""compressed-tensors checkpoints (llm-compressor, vLLM): which scheme a layer has. The layouts are in
compressed_tensors_weights.py and compressed_tensors_floats.py.

Configuration (github.com/vllm-project/compressed-tensors, quantization/quant_config.py): ``config_groups`` maps names
to ``{"targets": [...], "weights": {...}, "format": ...}``; a target is the name of a module, of its class, or "re:" and
a regular expression. Activations are not part of a weight: their scales are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError, nearest
from ...tensor import QuantTensor
from .base import Format, matches, setting
from .compressed_tensors_weights import DECODERS


class CompressedTensors(Format):
    """``quant_method: "compressed-tensors"``."""

    name = "compressed-tensors"
    primaries = ("weight_packed", "weight")
    required = ("weight_scale",)
    optional = (
        *("weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"),
        *("input_scale", "input_zero_point", "input_global_scale"),
    )

    def __init__(self, config: Mapping):
        super().__init__(config)
        groups = setting(config, "config_groups", dict)
        self.groups = []
        for name, group in groups.items():
            if not isinstance(group, Mapping):
                raise FormatError(f"config_groups.{name} must be settings, got {type(group).__name__}")
            targets = setting(group, "targets", list)
            if not all(isinstance(target, str) for target in targets):
                raise FormatError(f"config_groups.{name}.targets must be names, got {targets!r:.100}")
            if group.get("weights") is not None:
                self.groups.append((targets, self._scheme(name, group)))
        if self.config.get("transform_config"):
            raise FormatError("transform_config: expected none, got one; weights that are rotated are not read")
        sparsity = setting(config, "sparsity_config", dict, None) or {}
        if sparsity.get("format", "dense") != "dense":
            raise FormatError(f"sparsity_config must have the format dense, got {sparsity['format']!r:.100}")

    def _scheme(self, name: str, group: Mapping) -> Mapping:
        weights = setting(group, "weights", dict)
        layout = group.get("format") or self.config.get("format")
        if layout not in tuple(DECODERS):
            near = nearest(str(layout), DECODERS)
            raise FormatError(f"config_groups.{name}: no known format is called {layout!r:.100}; did you mean {near}?")
        return {**weights, "format": layout, "version": self.config.get("version")}

    def is_primary(self, key: str, keys: Mapping[str, None]) -> bool:
        return key.endswith("_packed") or f"{key}_scale" in keys

    def settings(self, name: str) -> Mapping:
        """The scheme of the group that names a layer, else of the one that names a class of modules."""
        by_class = []
        for targets, scheme in self.groups:
            for target in targets:
                if target == name or (target.startswith("re:") and matches(target[3:], name)):
                    return scheme
                if "." not in target and not target.startswith("re:"):
                    by_class.append(scheme)
        # Why: a checkpoint doesn't say of which class a module is, but "Linear" is the only one that is quantized.
        if not by_class or any(scheme != by_class[0] for scheme in by_class):
            raise FormatError(
                f"{name}: expected one of config_groups to name it or Linear, got {len(by_class)} that do"
            )
        return by_class[0]

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        return DECODERS[settings["format"]](tensors, settings)
