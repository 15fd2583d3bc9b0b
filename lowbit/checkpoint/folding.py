"""Folding AWQ's scales into what comes before a group of layers, so that nothing is left to do at run time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..quantizers import awq_scales
from .blocks import Blocks, Readers

#: Linear layer -> the one before it in Llama-like blocks, both in one module: a factor between them only scales.
_BEFORE = {"down_proj": "up_proj", "o_proj": "v_proj", "out_proj": "v_proj", "fc2": "fc1"}
#: The largest change of a block's contribution that rounding may make, by the type of the weights.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def fold_scales(
    blocks: Blocks, index: int, group: Readers, options: dict[nn.Linear, dict], set_data: Callable, shared: set[int]
) -> bool:
    """Search the scales of a group of layers, multiply their columns by them and divide what makes their input.

    That is the norm whose output they read, or the linear layer before. Whether the scales cancel is not concluded from
    names but tried: unless the block still computes the same, up to rounding, all is set back. options: settings of
    the layers that will be quantized with AWQ. set_data(parameter, tensor) changes a parameter; shared: ids of
    parameters that other modules hold too, which are never changed. Returns whether scales were folded.
    """
    searched = [linear for linear in group.linears if linear in options]
    maker = group.norm or _linear_before(blocks.modules[index], group)
    if not searched or maker is None or group.calls != 1:
        return False
    divided = [p for p in (maker.weight, getattr(maker, "bias", None)) if p is not None]
    multiplied = [linear.weight for linear in group.linears]
    rows = maker.weight.shape[0]
    if rows != group.linears[0].in_features or any(id(p) in shared for p in (*divided, *multiplied)):
        return False
    moments = blocks.moments(index, group)
    settings = {name: [options[m][name] for m in searched] for name in ("dtype", "group_size", "zero_kind")}
    weights = [linear.weight for linear in searched]
    s = awq_scales(weights, moments.mean_abs, moments.second, **settings)
    if bool((s == 1).all()):
        return False

    before = blocks.run(index, 0)
    old = [(p, p.data) for p in (*divided, *multiplied)]
    for p in divided:
        factor = s.to(p.device)
        set_data(p, (p.data.float() / (factor if p.dim() == 1 else factor[:, None])).to(p.dtype))
    for p in multiplied:
        set_data(p, (p.data.float() * s.to(p.device)).to(p.dtype))
    after = blocks.run(index, 0)
    # Why less the input: most of a block's output is its input, beside which a wrong contribution looks small.
    contribution = (before - blocks.hidden[0].to(before.device)).float().norm()
    changed = float((after - before).float().norm() / contribution.clamp(min=1e-30))
    if changed <= _TOLERANCE.get(maker.weight.dtype, 1e-2):  # NaN is no less
        return True
    for p, data in old:
        set_data(p, data)
    return False


def _linear_before(block: nn.Module, group: Readers) -> nn.Linear | None:
    if len(group.linears) != 1:
        return None
    for module in block.modules():
        for name, child in module._modules.items():
            if child is group.linears[0] and name in _BEFORE:
                before = module._modules.get(_BEFORE[name])
                return before if type(before) is nn.Linear else None
    return None
