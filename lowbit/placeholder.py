"""What a layer has in place of a float weight, and how its tensors of packed bytes are kept."""

from __future__ import annotations

import torch
from torch import nn

from .errors import SchemeError

_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class NoWeight(torch.Tensor):
    """The empty ``weight`` of a quantized layer: says so when something multiplies with it.

    A tensor class of its own also keeps torch's fused transformer layers away, which read weights past the layers.
    """

    _PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm", "einsum"})
    _SAME = frozenset({"__get__", "clone", "detach", "to", "float"})
    #: Tools that merge an adapter into the weight do this.
    _CHANGES = frozenset({"add", "add_", "__add__", "__iadd__", "sub", "sub_", "__sub__", "__isub__", "copy_"})

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in cls._CHANGES:
            raise SchemeError(
                "a quantized layer has no float weight to change or merge into; dequantize the model first"
            )
        if getattr(func, "__name__", "") in cls._PRODUCTS:
            raise SchemeError("a quantized layer has no float weight to multiply with; use layer.dequantize()")
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        # Why: `weight.data` and its copies are as empty, and have to say so too.
        same = getattr(func, "__name__", "") in cls._SAME and type(made) is torch.Tensor
        return made.as_subclass(cls) if same else made


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter that never gets a gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def keep_type(fn, tensor: torch.Tensor) -> torch.Tensor:
    """fn of a tensor seen as whole numbers, which a change of float type leaves alone."""
    bits = tensor.view(_BITS_OF_SIZE[tensor.element_size()])
    changed = fn(bits)
    if changed.dtype != bits.dtype:
        changed = bits.to(changed.device)
    return changed.view(tensor.dtype)
