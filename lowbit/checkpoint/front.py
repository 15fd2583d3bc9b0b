"""The layers in front of the decoder blocks (OPT's ``project_in``): which they are, what they read."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from ..quantizers import Moments
from .blocks import Reached, batches_of, forwards_of, recording
from .decoder import whole_pass


def in_front(model: nn.Module, modules: nn.ModuleList, tokens: torch.Tensor) -> list[nn.Linear]:
    """The nn.Linear modules that run before the first of the blocks ``modules``, in the order in which they run."""
    inside, found = {*modules.modules()}, {}
    outside = [m for m in model.modules() if type(m) is nn.Linear and m not in inside]
    handles = [m.register_forward_pre_hook(lambda m, _: found.setdefault(m)) for m in outside]
    try:
        if outside:
            _pass(model, modules, batches_of(tokens)[0])
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


def moments_in_front(model: nn.Module, modules: nn.ModuleList, tokens: torch.Tensor, linear: nn.Linear) -> Moments:
    """The moments of what one of them reads, over all tokens."""
    with recording(linear) as moments:
        for batch in batches_of(tokens):
            _pass(model, modules, batch)
    return moments


def _pass(model: nn.Module, modules: nn.ModuleList, batch: torch.Tensor) -> None:
    device = next(p.device for p in model.parameters() if p.device.type != "meta")
    with forwards_of([modules[0]], [_ends]), suppress(Reached):
        whole_pass(model, batch.to(device))


def _ends(*_, **__):
    raise Reached
