"""Humming (the package ``humming-kernels``), with its own quantizer: its error contains that of the weight."""

from __future__ import annotations

import importlib.util

from .side import Problem, Ready, Side, Unavailable


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

        def layer():
            made = HummingLayer(
                shape_n=problem.n, shape_k=problem.k, weight_config=scheme, torch_dtype=self.x_type
            ).cuda()
            made.load_from_unquantized(weight)
            made.transform()
            return made

        layers = [layer()]
        nbytes = sum(p.nbytes for p in layers[0].parameters())
        layers += [layer() for _ in range(problem.copies(nbytes) - 1)]
        return Ready([lambda x, one=one: one(x) for one in layers], nbytes, problem.weight)
