"""Humming (the package ``humming-kernels``), with its own quantizer: its error contains that of the weight."""

from __future__ import annotations

import copy
import importlib.util

import torch

from .side import Problem, Ready, Side, Unavailable


def _again(layer: torch.nn.Module) -> torch.nn.Module:
    """The same layer with memory of its own. Why not made anew: that would quantize once more."""
    other = copy.copy(layer)
    other._parameters = {
        name: torch.nn.Parameter(held.detach().clone(), requires_grad=False)
        for name, held in layer._parameters.items()
        if held is not None
    }
    other._buffers = {name: held.clone() for name, held in layer._buffers.items() if held is not None}
    return other


class HummingSide(Side):
    family = "humming"
    own_quantizer = True

    def __init__(self, dtype: str, act: str, group: int):
        super().__init__(dtype, act, group)
        if importlib.util.find_spec("humming") is None:
            raise Unavailable("the package humming is not installed")
        if dtype.startswith("uint"):
            raise Unavailable("only its types without a zero point are timed")

    def open(self, problem: Problem) -> Ready:
        from humming.layer import HummingLayer

        weight = problem.weight.to(self.x_type)
        scheme = {"dtype": self.dtype, "weight_scale_group_size": self.group}
        made = HummingLayer(shape_n=problem.n, shape_k=problem.k, weight_config=scheme, torch_dtype=self.x_type).cuda()
        made.load_from_unquantized(weight)
        made.transform()
        nbytes = sum(p.nbytes for p in made.parameters())
        layers = [made] + [_again(made) for _ in range(problem.copies(nbytes) - 1)]
        return Ready([lambda x, one=one: one(x) for one in layers], nbytes, problem.weight)
