"""Calibrated quantization, one decoder block after the other: what ``quantize_model(method="gptq" | "awq")`` runs.

Every block reads what the quantized blocks before it make. Inside a block, layers that read the same tensor (q, k and
v; gate and up) are one step, and a step reads what the quantized steps before it make. Why not all layers of a block at
once: the later ones would be calibrated on inputs that never come to be; and this way one matrix of moments is held at
a time, that of the step, shared by its layers. The price, a part of a pass through one block for each step, is small
beside the search for codes.

AWQ first folds the scales of all steps of a block while the block is still float (each fold keeps its function), then
quantizes step by step like GPTQ, with clipping.

Layers that run before the first block come first, all others outside the blocks last.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ..errors import LowbitError
from ..nn import Linear
from ..quantizers import CALIBRATED, Moments, clip, gptq, quantize
from ..quantizers.rule import checked_weight, expect_finite
from .blocks import Blocks, Readers
from .decoder import checked_tokens, find_blocks
from .folding import fold_scales
from .front import in_front, moments_in_front
from .resident import Resident

#: A layer to quantize, all its full names, its settings.
Chosen = tuple[nn.Linear, list[str], dict]


def quantize_calibrated(
    model: nn.Module,
    chosen: list[Chosen],
    calibration: torch.Tensor,
    *,
    prepare: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
    parts: Resident | None = None,
    mixtures: Mapping | None = None,
) -> nn.Module:
    """Replace the chosen layers of a causal language model, in place: all, or on an error none.

    calibration: token ids ``[samples, length]``, without padding. Layers behind the decoder blocks come last, with
    moments of what they read when the blocks are quantized. A layer that no token reaches is quantized with "mse", with
    a warning. parts: where the weights are, by default in the model. mixtures: modules of experts ->
    :class:`~lowbit.checkpoint.calibrate_experts.Mixture`. Memory beside the parts that are entered: their quantized
    layers, the hidden states of all calibration tokens, one matrix of moments. Raises LowbitError with the layer's
    name.
    """
    tokens, parts = checked_tokens(model, calibration), parts or Resident()
    modes = [(module, module.training) for module in model.modules()]
    work = _Work(model, chosen, dict(modes), prepare, progress, parts, mixtures or {})
    for linear, _, _ in chosen if parts.keeps else ():
        # Why not linear.weight: one that is made anew in every pass cannot be changed.
        own = linear._parameters.get("weight")
        work.named(linear, lambda own=own: expect_finite(checked_weight(own)))
    try:
        with torch.no_grad():
            model.eval()
            modules = find_blocks(model)
            inside, head = {*modules.modules()}, work.head
            parts.enter(m for m in model.modules() if m not in inside and m is not head)
            parts.enter(modules[0].modules())
            work.front(modules, tokens)
            blocks = Blocks(model, tokens)
            for index in range(work.go_on(blocks), len(modules)):
                work.block(blocks, index, last=index + 1 == len(modules))
            work.rest(blocks)
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

    def __init__(self, model, chosen: list[Chosen], modes, prepare: bool, progress, parts: Resident, mixtures):
        self.model, self.modes, self.prepare, self.progress = model, modes, prepare, progress
        self.parts, self.mixtures = parts, dict(mixtures)
        self.left = {linear: (names, options) for linear, names, options in chosen}
        self.total = len(chosen) + sum(len(mixture.choice.matrices) for mixture in self.mixtures.values())
        self.count, self.changes, self.made, self.moved = 0, [], [], []
        self.head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None

    def front(self, modules: nn.ModuleList, tokens: torch.Tensor) -> None:
        """Quantize the layers that run before the first block, which reads what they make of the tokens."""
        for linear in in_front(self.model, modules, tokens):
            if linear not in self.left or linear is self.head:
                continue
            found = self.parts.found(self.left[linear][0][0])
            if found is not None:
                act, weight = self.left[linear][1]["act"], linear.weight
                found = Linear.from_quant_tensor(found.to(weight.device), linear.bias, dtype=weight.dtype, act=act)
                self._place(linear, found)
                self.count += 1
            else:
                calibrated = self._method(linear) in CALIBRATED
                self._replace(linear, moments_in_front(self.model, modules, tokens, linear) if calibrated else None)
        if self.made:
            self._done([])
            self.parts.reached(0, None)

    def go_on(self, blocks: Blocks) -> int:
        """Leave out the blocks that are finished; how many those are."""
        finished = self.parts.blocks
        for module in (m for block in blocks.modules[:finished] for m in block.modules()):
            self.count += self.left.pop(module, None) is not None
            mixture = self.mixtures.pop(module, None)
            self.count += 0 if mixture is None else len(mixture.choice.matrices)
        if finished:
            blocks.go_on(self.parts.hidden())
            self.parts.done(blocks.modules[0].modules(), [], [])
        return finished

    def block(self, blocks: Blocks, index: int, last: bool) -> None:
        """Quantize the layers of one block, and let the hidden states pass it."""
        modules = [*blocks.modules[index].modules()]
        self.parts.enter(modules)
        if any(module in self.left or module in self.mixtures for module in modules):
            groups, shared = blocks.readers(index, self.mixtures), self._shared()
            for group in groups:
                awq = {m: self.left[m][1] for m in group.linears if self._method(m) == "awq"}
                if awq:
                    fold = (blocks, index, group, awq, self._set_data, shared)
                    self.named(next(iter(awq)), lambda fold=fold: fold_scales(*fold))
            for group in groups:
                if group.experts is None:
                    self._step(blocks, index, group)
                else:
                    mixture = self.mixtures.pop(group.experts)
                    for layer, name in mixture.quantize(blocks, index, group):
                        self._note(layer, [name], layer.training)
        advance = not last or any(self._method(linear) in CALIBRATED for linear in self.left)
        if advance:
            blocks.advance(index)
        self._done({**dict.fromkeys(modules), **dict.fromkeys(blocks.modules[index].modules())})
        self.parts.reached(index + 1, blocks.hidden if advance else None)

    def _shared(self) -> set[int]:
        owners: dict[int, int] = {}
        for module in self.model.modules():
            for parameter in module._parameters.values():
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        return {key for key, count in owners.items() if count > 1}

    def _done(self, modules: Iterable[nn.Module]) -> None:
        self.parts.done(modules, self.made, self.moved)
        if not self.parts.keeps:
            self.made, self.moved = [], []

    def _step(self, blocks: Blocks, index: int, group: Readers) -> None:
        todo = [linear for linear in group.linears if linear in self.left]
        moments = None
        if group.calls and any(self._method(linear) in CALIBRATED for linear in todo):
            moments = self.named(todo[0], lambda: blocks.moments(index, group))
        for linear in todo:
            self._replace(linear, moments)

    def rest(self, blocks: Blocks) -> None:
        """Quantize the layers outside the blocks."""
        outside = list(self.left)
        self.parts.enter(outside)
        for linear in sorted(outside, key=lambda linear: self._method(linear) not in CALIBRATED):
            calibrated = self._method(linear) in CALIBRATED
            self._replace(linear, blocks.around(linear, stop=linear is self.head) if calibrated else None)
        self._done([*outside, *(layer for layer, _, _ in self.made)])
        self.parts.reached(len(blocks.modules), None, complete=True)

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
        self._note(layer, self._place(linear, layer), self.modes[linear])

    def _place(self, linear: nn.Linear, layer: Linear) -> list[str]:
        names, _ = self.left.pop(linear)
        for name in names:
            parent, _, last = name.rpartition(".")
            modules = self.model.get_submodule(parent)._modules
            if self.parts.keeps:
                self.changes.append(lambda modules=modules, last=last: modules.__setitem__(last, linear))
            modules[last] = layer
        return names

    def _note(self, layer: Linear, names: list[str], mode: bool) -> None:
        self.made.append((layer, names, mode))
        self.count += 1
        if self.progress is not None:
            self.progress(self.count, self.total, names[0])

    def _quantized(self, linear: nn.Linear, moments: Moments | None) -> Linear:
        names, options = self.left[linear]
        if options["method"] in CALIBRATED and (moments is None or not moments.tokens):
            warnings.warn(f"{names[0]} read no calibration token: it is quantized with 'mse'", stacklevel=2)
            options = options | {"method": "mse"}
        return quantized_layer(linear.weight, linear.bias, moments, options)

    def _set_data(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        if self.parts.keeps:
            old = parameter.data
            self.changes.append(lambda: setattr(parameter, "data", old))
        self.moved.append(parameter)
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


def quantized_layer(weight: torch.Tensor, bias: torch.Tensor | None, moments: Moments | None, options: dict) -> Linear:
    """A packed layer for a float weight ``[N, K]``; moments of what it reads, for the methods that need them."""
    options = dict(options)
    method, act = options.pop("method"), options.pop("act")
    if method in CALIBRATED:
        qt = {"gptq": gptq, "awq": clip}[method](weight, moments.second, **options)
    else:
        qt = quantize(weight, method=method, **options)
    # Why packed in any case: the blocks that follow are calibrated on what this layer makes.
    return Linear.from_quant_tensor(qt, bias, dtype=weight.dtype, act=act)
