"""Calibrated quantization, one decoder block after the other: what ``quantize_model(method="gptq" | "awq")`` runs.

Every block reads what the quantized blocks before it make. Inside a block, layers that read the same tensor (q, k and
v; gate and up) are one step, and a step reads what the quantized steps before it make. Why not all layers of a block at
once: the later ones would be calibrated on inputs that never come to be; and this way one matrix of moments is held at
a time, that of the step, shared by its layers. The price, a part of a pass through one block for each step, is small
beside the search for codes.

AWQ first folds the scales of all steps of a block while the block is still float (each fold keeps its function), then
quantizes step by step like GPTQ, with clipping.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from ..errors import LowbitError
from ..nn import Linear
from ..quantizers import CALIBRATED, Moments, clip, gptq, quantize
from ..quantizers.rule import checked_weight, expect_finite
from .blocks import Blocks, Readers, recording
from .decoder import checked_tokens, whole_pass
from .folding import fold_scales

#: A layer to quantize, all its full names, its settings.
Chosen = tuple[nn.Linear, list[str], dict]


def quantize_calibrated(
    model: nn.Module,
    chosen: list[Chosen],
    calibration: torch.Tensor,
    *,
    prepare: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> nn.Module:
    """Replace the chosen layers of a causal language model, in place: all, or on an error none.

    calibration: token ids ``[samples, length]``, without padding. Layers outside the decoder blocks come last, with
    moments from one pass of the whole model. A layer that no token reaches is quantized with "mse", with a warning.
    Memory beside the model: its quantized layers, the hidden states of all calibration tokens, one matrix of moments.
    Raises LowbitError with the layer's name.
    """
    tokens = checked_tokens(model, calibration)
    modes = [(module, module.training) for module in model.modules()]
    work = _Work(model, chosen, dict(modes), prepare, progress)
    for linear, _, _ in chosen:
        # Why not linear.weight: one that is made anew in every pass cannot be changed.
        own = linear._parameters.get("weight")
        work.named(linear, lambda own=own: expect_finite(checked_weight(own)))
    try:
        with torch.no_grad():
            model.eval()
            blocks = Blocks(model, tokens)
            for index in range(len(blocks.modules)):
                work.block(blocks, index, last=index + 1 == len(blocks.modules))
            work.rest(blocks.batches)
    except BaseException:
        work.undo()
        raise
    finally:
        for module, mode in modes:
            module.training = mode
    work.finish()
    return model


class _Work:
    """The layers still to be quantized, and how to set back what was changed."""

    def __init__(self, model, chosen: list[Chosen], modes, prepare: bool, progress):
        self.model, self.modes, self.prepare, self.progress = model, modes, prepare, progress
        self.left = {linear: (names, options) for linear, names, options in chosen}
        self.total, self.changes, self.made = len(chosen), [], []
        owners: dict[int, int] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self.shared = {key for key, count in owners.items() if count > 1}

    def block(self, blocks: Blocks, index: int, last: bool) -> None:
        """Quantize the layers of one block, and let the hidden states pass it."""
        if any(linear in self.left for linear in blocks.modules[index].modules()):
            groups = blocks.readers(index)
            for group in groups:
                awq = {m: self.left[m][1] for m in group.linears if self._method(m) == "awq"}
                if awq:
                    fold = (blocks, index, group, awq, self._set_data, self.shared)
                    self.named(next(iter(awq)), lambda fold=fold: fold_scales(*fold))
            for group in groups:
                self._step(blocks, index, group)
        if not last:
            blocks.advance(index)

    def _step(self, blocks: Blocks, index: int, group: Readers) -> None:
        todo = [linear for linear in group.linears if linear in self.left]
        moments = None
        if group.calls and any(self._method(linear) in CALIBRATED for linear in todo):
            moments = self.named(todo[0], lambda: blocks.moments(index, group))
        for linear in todo:
            self._replace(linear, moments)

    def rest(self, batches) -> None:
        """Quantize the layers outside the blocks."""
        calibrated = [linear for linear in self.left if self._method(linear) in CALIBRATED]
        for linear in calibrated:
            with recording(linear) as moments:
                for batch in batches:
                    whole_pass(self.model, batch)
            self._replace(linear, moments)
        for linear in list(self.left):
            self._replace(linear, None)

    def _method(self, linear) -> str | None:
        return self.left[linear][1]["method"] if linear in self.left else None

    def named(self, linear, make):
        """What make() returns; an error gets the layer's name."""
        try:
            return make()
        except LowbitError as error:
            raise type(error)(f"{self.left[linear][0][0]}: {error}") from error

    def _replace(self, linear: nn.Linear, moments: Moments | None) -> None:
        layer = self.named(linear, lambda: self._quantized(linear, moments))
        names, _ = self.left.pop(linear)
        for name in names:
            parent, _, last = name.rpartition(".")
            modules = self.model.get_submodule(parent)._modules
            self.changes.append(lambda modules=modules, last=last: modules.__setitem__(last, linear))
            modules[last] = layer
        self.made.append((layer, names, self.modes[linear]))
        if self.progress is not None:
            self.progress(len(self.made), self.total, names[0])

    def _quantized(self, linear: nn.Linear, moments: Moments | None) -> Linear:
        options = {**self.left[linear][1]}
        method, act = options.pop("method"), options.pop("act")
        if method in CALIBRATED and (moments is None or not moments.tokens):
            warnings.warn(
                f"{self.left[linear][0][0]} read no calibration token: it is quantized with 'mse'", stacklevel=2
            )
            method = "mse"
        if method == "gptq":
            qt = gptq(linear.weight, moments.second, **options)
        elif method == "awq":
            qt = clip(linear.weight, moments.second, **options)
        else:
            qt = quantize(linear.weight, method=method, **options)
        # Why packed in any case: the blocks that follow are calibrated on what this layer makes.
        return Linear.from_quant_tensor(qt, linear.bias, dtype=linear.weight.dtype, act=act)

    def _set_data(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        old = parameter.data
        self.changes.append(lambda: setattr(parameter, "data", old))
        parameter.data = data

    def undo(self) -> None:
        """Set the model back to what it was."""
        for change in reversed(self.changes):
            change()

    def finish(self) -> None:
        """Give every new layer the training flag of the old one; unpack where the caller wants no packed layers."""
        for layer, names, mode in self.made:
            if not self.prepare:
                canonical = {"dtype": layer.float_dtype, "act": layer.act, "prepare": False}
                layer = Linear.from_quant_tensor(layer.quant_tensor(), layer.bias, **canonical)
                for name in names:
                    parent, _, last = name.rpartition(".")
                    self.model.get_submodule(parent)._modules[last] = layer
            layer.train(mode)
