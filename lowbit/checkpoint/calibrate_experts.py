"""Calibration of a mixture's experts: fused 3-D weights, quantized an expert at a time on the tokens routed to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import nn

from ..convert_model import OPTIONS
from ..errors import LowbitError
from ..nn import Linear
from ..quantizers import CALIBRATED, Moments
from .blocks import Blocks, Reached, Readers
from .calibrate import quantized_layer
from .experts import matrix, swap
from .layers import Choice, count_of, parts_of


class Mixture:
    """The experts of one module. choice: their settings, matrix by matrix; layout: how they lie on disk.

    ``starved`` names the experts' matrices that a calibrated method was asked for and got too few tokens.
    """

    def __init__(self, name: str, choice: Choice, layout: str):
        self.name, self.choice, self.layout, self.starved = name, choice, layout, []

    def quantize(self, blocks: Blocks, index: int, group: Readers) -> Iterator[tuple[Linear, str]]:
        """Quantize all experts of a module in a block, in place; yields each new layer with its full name.

        The first matrices of an expert read the hidden states of the tokens that chose it, the last one what the
        quantized first ones make of them. No scales are folded: what the experts read, the router reads too.
        """
        module, float_dtype = self.choice.module, self.choice.module._parameters["down_proj"].dtype
        routed = _routed(blocks, index, module) if group.calls == 1 else []
        whole = {part: module._parameters[part] for part in parts_of(module.has_gate, "fused")}
        *first, last = parts_of(module.has_gate, self.layout)
        count, training = count_of(module), module.training
        swap(self.name, self.choice, float_dtype, self.layout)
        for expert in range(count):
            x = _tokens_of(routed, expert, whole["down_proj"])
            for parts in (first, [last]):
                moments = None
                if x is not None:
                    x = module.lowbit_middle(expert, x) if parts == [last] else x
                    moments = Moments(x.shape[-1], x.device)
                    moments.add(x)
                for part in parts:
                    weight = matrix(module, whole.get(part, whole.get("gate_up_proj")), expert, part)
                    full = f"{self.name}.{expert}.{part}"
                    layer = self._layer(full, weight, moments).train(training)
                    module.get_submodule(str(expert))._modules[part] = layer
                    yield layer, full

    def _layer(self, full: str, weight: torch.Tensor, moments: Moments | None) -> Linear:
        options = {name: self.choice.matrices[full][name] for name in OPTIONS}
        method, tokens = options["method"], 0 if moments is None else moments.tokens
        if method in CALIBRATED and tokens < fewest(method, weight.shape[1]):
            self.starved.append(full)
            options["method"] = "mse"
        try:
            return quantized_layer(weight, None, moments, options)
        except LowbitError as error:
            raise type(error)(f"{full}: {error}") from error


def warn_starved(mixtures: Iterable[Mixture]) -> None:
    """One warning for all matrices of experts that read too few tokens."""
    mixtures = list(mixtures)
    starved = [full for mixture in mixtures for full in mixture.starved]
    if starved:
        count = sum(len(mixture.choice.matrices) for mixture in mixtures)
        warnings.warn(
            f"{len(starved)} of {count} matrices of experts read too few calibration tokens (gptq wants one a column, "
            f"awq 32) and are quantized with 'mse', the first is {starved[0]}; give more calibration",
            stacklevel=2,
        )


def fewest(method: str, k: int) -> int:
    """How many tokens a matrix of K columns must read to be calibrated.

    Why: on fresh tokens, int4 and uint2, K of 128 to 1024, inputs whose spectrum falls like 1/f: gptq made 0.8 to 0.9
    of the error of mse with K tokens, up to 1.2 times it with less; awq 0.9 from 32 on, up to 1.1 times it below 16.
    """
    return k if method == "gptq" else 32


def _routed(blocks: Blocks, index: int, module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a module of experts reads, for each batch: hidden [tokens, hidden] and chosen experts [tokens, chosen]."""
    found = []

    def reads(module, args, kwargs):
        names = ("hidden_states", "top_k_index", "top_k_weights")
        given = dict(zip(names, args)) | kwargs
        found.append((given["hidden_states"], given["top_k_index"]))
        raise Reached

    handle = module.register_forward_pre_hook(reads, with_kwargs=True)
    try:
        for batch in range(len(blocks.hidden)):
            with suppress(Reached):
                blocks.run(index, batch)
    finally:
        handle.remove()
    return found


def _tokens_of(routed: list, expert: int, like: torch.Tensor) -> torch.Tensor | None:
    """The hidden states [tokens, hidden] that chose an expert, or None where there are none."""
    chosen = [hidden[(index == expert).any(-1)] for hidden, index in routed]
    rows = torch.cat(chosen) if chosen else like.new_empty(0, 1)
    return rows if len(rows) else None
