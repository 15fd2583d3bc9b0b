"""What a decoder block is called with: tensors, and tuples and dicts of them, among other things."""

from __future__ import annotations

import torch


def same(new, old):
    """old where both hold the same numbers, so that the other can be freed."""
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        alike = new.shape == old.shape and new.dtype == old.dtype and new.device == old.device
        return old if new is old or (alike and torch.equal(new, old)) else new
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return tuple(same(a, b) for a, b in zip(new, old))
    return new


def moved(value, device):
    """The same on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    return value
