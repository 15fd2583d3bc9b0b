"""What a causal language model is made of: its decoder blocks, the token ids that it reads."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from ..errors import DtypeError, SchemeError, ShapeError


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks: the longest outermost nn.ModuleList of different modules of one class with
    nn.Linear in them.

    Looked for in ``model.get_decoder()`` where the model has one. Raises SchemeError when there is none.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise SchemeError("calibration expects a model that reads token ids alone, got an encoder with a decoder")
    base = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = {name: m for name, m in (base or model).named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    found = [
        blocks
        for name, blocks in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
        and len({type(block) for block in blocks}) == 1
        and len({id(block) for block in blocks}) == len(blocks)
        and any(type(m) is nn.Linear for m in blocks.modules())
    ]
    if not found:
        raise SchemeError(
            "calibration needs decoder blocks: an nn.ModuleList of different modules of one class; found none"
        )
    return max(found, key=len)


def checked_tokens(model: nn.Module, tokens) -> torch.Tensor:
    """Token ids int64 ``[samples, length]``. Raises DtypeError, ShapeError, or SchemeError for ids that do not fit."""
    if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        got = str(tokens.dtype) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise DtypeError(f"calibration must be a tensor of token ids, got {got.removeprefix('torch.')}")
    if tokens.dim() != 2 or not tokens.numel():
        raise ShapeError(f"calibration must have shape [samples, length], got {tuple(tokens.shape)}")
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    count = getattr(embedding, "num_embeddings", None)
    if int(tokens.min()) < 0 or (count is not None and int(tokens.max()) >= count):
        raise SchemeError(f"calibration ids must be in 0..{(count or 0) - 1}, got {int(tokens.min())}..{tokens.max()}")
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and tokens.shape[1] > longest:
        raise ShapeError(f"calibration samples must have at most {longest} tokens, got {tokens.shape[1]}")
    return tokens.long()


def whole_pass(model: nn.Module, batch: torch.Tensor) -> None:
    """One forward pass of the whole model, without a cache where it could make one."""
    accepted = inspect.signature(model.forward).parameters.values()
    cached = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in accepted)
    model(batch, **({"use_cache": False} if cached else {}))
