"""Layers whose parameters are cut over processes by transformers' tensor parallelism (DTensor)."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from ..bit_stream import stream_bytes
from ..errors import ShapeError
from ..nn import Linear
from ..placeholder import frozen
from ..tensor import BY_ROW, QuantTensor, as_bytes

_SCRATCH_BYTES = 64 << 20  # most bytes of float weight that are held at a time


class ShardedLinear(Linear):
    """A Linear that multiplies with this process's part of its weight.

    in_features and out_features are those of the whole; transformers hands forward local tensors, and adds or gathers
    what the processes make. The part stays canonical: each product dequantizes it, some rows at a time.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ``[..., k]``, the part of the columns that lies here; -> ``[..., n]``, the rows that do."""
        # Why asked here: transformers takes hold of this method before it is known whether the layer will be cut.
        if not getattr(self, "lowbit_cut", False):
            return Linear.forward(self, x)
        n, k, s = self.qweight.shape[0], x.shape[-1], self.scheme
        step = max(1, _SCRATCH_BYTES // (4 * k))
        parts = []
        for first in range(0, n, step):
            rows = slice(first, min(first + step, n))
            named = zip(BY_ROW, (self.qweight, self.scales, self.zeros, self.row_scales), strict=True)
            held = {field: None if t is None else t.detach()[rows] for field, t in named}
            options = {"dtype": s.weight, "group_size": s.group_size, "zero_kind": s.zero_kind}
            qt = QuantTensor(**held, shape=(rows.stop - first, k), **options)
            bias = None if self.bias is None else self.bias[rows].to(x.dtype)
            parts.append(F.linear(x, qt.dequantize(x.dtype), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def prepare(self) -> Linear:
        """Stays canonical."""
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = destination.get(f"{prefix}scales")
        if not keep_vars and hasattr(scales, "placements") and scales.element_size() == 1:
            scales.__class__ = _gathered_as_bytes()


def shard(layers: dict[str, Linear]) -> None:
    """Mark the layers that are cut, and make plain Linears of the others, in place.

    Raises ShapeError where a cut does not lie between groups, or the weight has an order of columns or a codebook.
    """
    for name, layer in layers.items():
        if not is_cut(layer):
            layer.__class__ = Linear
            continue
        codes, scales = (_local(layer._parameters[short]) for short in ("qweight", "scales"))
        bits, group, columns = layer.scheme.weight.bits, layer.scheme.group_size, layer.in_features
        if codes.shape[1] != stream_bytes(columns, bits):
            part = codes.shape[1] * 8 // bits
            whole = group != -1 and part % group == 0 and scales.shape[1] == part // group
            if not whole or codes.shape[1] * 8 % bits:
                what = "whole rows" if group == -1 else f"groups of {group}"
                raise ShapeError(
                    f"{name}: cutting {columns} columns over the processes cuts {what}; quantize it with a group size "
                    "that divides each part, or leave it out of the plan"
                )
            rows = layer._parameters["row_scales"]
            if hasattr(rows, "placements"):  # every process needs those of all rows
                layer._parameters["row_scales"] = frozen(rows.detach().full_tensor())
        for short in ("perm", "codebook"):
            if layer._parameters.get(short) is not None:
                raise ShapeError(
                    f"{name}: a weight with {short} cannot be cut over processes; leave it out of the plan"
                )
        layer.lowbit_cut = True


def is_cut(layer: nn.Module) -> bool:
    """Whether a layer's codes are a DTensor."""
    return hasattr(layer._parameters["qweight"], "placements")


@functools.cache
def _gathered_as_bytes() -> type:
    """The class of DTensors of floats of 8 bits that any backend gathers: gloo knows no such type."""
    from torch.distributed.tensor import DTensor

    class Narrow(DTensor):
        def full_tensor(self, **options):
            about = {"shape": self.shape, "stride": self.stride(), "run_check": False}
            whole = DTensor.from_local(as_bytes(self.to_local()), self.device_mesh, self.placements, **about)
            return whole.full_tensor(**options).view(self.dtype)

    return Narrow


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
