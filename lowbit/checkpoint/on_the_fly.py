"""Float weights that are quantized as transformers reads them, one tensor at a time."""

from __future__ import annotations

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ..errors import LowbitError, ShapeError
from ..nn import Linear
from ..tensor import QuantTensor
from . import layers
from .native import FIELDS


class Quantize(ConversionOps):
    """The step at the end of a weight's conversion: float tensors in, the tensors of quantized layers out."""

    def __init__(self, quantizer):
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(self, input_dict, *_, missing_keys=None, **__):
        """Full names of float parameters -> full names of quantized ones; other parameters pass."""
        made = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            choice = self.quantizer.pending.get(name)
            if choice is None:
                made[name] = tensor
                continue
            owner, _, part = name.rpartition(".")
            try:
                if choice.kind == "experts":
                    made |= self._experts(owner, part, choice, tensor)
                else:
                    made |= self._matrix(owner, choice, tensor.T if choice.kind == "conv1d" else tensor)
                self._drop_placeholder(owner, part, choice)
            except LowbitError as error:
                # Why not at once: transformers would catch it and raise an error of its own that names nothing.
                self.quantizer.failed = self.quantizer.failed or error
            if missing_keys is not None:
                missing_keys.discard(name)
        return made

    def _drop_placeholder(self, owner: str, part: str, choice: layers.Choice) -> None:
        # Why now: accelerate dispatches before loading has ended, and has no value to put in its place.
        if choice.kind == "experts":
            self.quantizer.experts[owner]._parameters.pop(part, None)
        else:
            self.quantizer.layers[owner]._parameters["weight"] = None

    def _matrix(self, full: str, choice: layers.Choice, weight) -> dict[str, nn.Parameter]:
        layer, options = self.quantizer.layers[full], choice.matrices[full]
        check_cut(full, layer, weight)
        return parameters(full, layers.quantize_matrix(full, weight, options))

    def _experts(self, name: str, part: str, choice: layers.Choice, whole) -> dict[str, nn.Parameter]:
        made = {}
        for index, weight in enumerate(whole):
            full = f"{name}.{index}.{part}"
            made |= self._matrix(full, choice, weight.T if choice.module.is_transposed else weight)
        return made


def check_cut(full: str, layer: Linear, weight: torch.Tensor) -> None:
    """Raises ShapeError where a process has got a part of the columns that cuts a group."""
    k, group = weight.shape[1], layer.scheme.group_size
    if k != layer.in_features and (group == -1 or k % group):
        what = "whole rows" if group == -1 else f"groups of {group}"
        raise ShapeError(f"{full}: {layer.in_features} columns in parts of {k} cut {what}; use another group_size")


def parameters(full: str, qt: QuantTensor) -> dict[str, nn.Parameter]:
    """The parameters of a layer, frozen, by full name."""
    held = {short: getattr(qt, field) for short, field in FIELDS.items()}
    return {f"{full}.{short}": nn.Parameter(t, False) for short, t in held.items() if t is not None}


def quantize_tied_head(model, name: str, config) -> None:
    """Give the output layer quantized weights of its own, made from the embedding that it was tied to."""
    head, settings = model.get_submodule(name), config.settings
    options = settings.of(layers.aliases(model, name), head=True)
    qt = layers.quantize_matrix(name, head.weight.detach(), options)
    bias, dtype = head.bias, head.weight.dtype
    layer = Linear.from_quant_tensor(qt, bias, dtype=dtype, act=options["act"]).train(head.training)
    layer._hf_quantized_needs_local_tp = True
    model.set_submodule(name, layer)
    for part in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        part.tie_word_embeddings = False
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if f"{name}.weight" not in (target, source)
    }
