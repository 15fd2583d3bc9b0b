"""What a loader put into quantized layers is judged before the model is handed on."""

from __future__ import annotations

import torch

from ..errors import FormatError, LowbitError
from ..nn import Linear

_HELD = ("qweight", "scales", "zeros", "perm")


def settle(layers: dict[str, Linear]) -> None:
    """Hold every loaded tensor against its layer's scheme, and freeze it.

    Raises FormatError for a tensor that was not loaded, has another type or shape, or breaks the canonical form.
    Tensors on meta (offloaded to disk or for a device that is busy) are left to the one who loads them.
    """
    for name, layer in layers.items():
        held = {short: t for short in _HELD if (t := layer._parameters.get(short)) is not None}
        expected = {short: t for short in _HELD if (t := empty(layer)._parameters.get(short)) is not None}
        for short, tensor in held.items():
            tensor.requires_grad_(False)
            if tensor.is_meta or type(tensor.data) is not torch.Tensor:
                continue
            # Why: loaders leave what a file lacks at some value or other, and only log it.
            if not getattr(tensor, "_is_hf_initialized", False) and not hasattr(layer, "_hf_hook"):
                raise FormatError(f"{name}.{short}: the checkpoint must hold it, in the right shape, but it does not")
            for what in ("dtype", "shape"):
                got, wanted = getattr(tensor, what), getattr(expected[short], what)
                if got != wanted:
                    raise FormatError(f"{name}.{short}: expected {what} {_plain(wanted)}, got {_plain(got)}")
        if all(type(t.data) is torch.Tensor and not t.is_meta for t in held.values()):
            try:
                layer.quant_tensor().validate(name)
            except FormatError:
                raise
            except LowbitError as error:
                raise FormatError(f"{name}: {error}") from error


def empty(layer: Linear) -> Linear:
    """A layer of the same scheme and shape on meta: what its tensors have to look like."""
    options = {"scheme": layer.scheme, "perm": layer._parameters.get("perm") is not None}
    return Linear(layer.in_features, layer.out_features, bias=False, device="meta", **options)


def _plain(value) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
