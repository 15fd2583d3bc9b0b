"""prepare: the layers of a model pack their weights for their devices; unprepare takes that back."""

from __future__ import annotations

from torch import nn

from .errors import DtypeError
from .nn import Linear


def prepare(model: nn.Module) -> nn.Module:
    """Pack every :class:`~lowbit.nn.Linear` of a model for the device it lies on, in place: canonical -> packed, once.

    Layers are packed one after the other, so memory grows by one layer at most. Returns the model.
    """
    for layer in _layers_of(model):
        layer.prepare()
    return model


def unprepare(model: nn.Module) -> nn.Module:
    """Give every :class:`~lowbit.nn.Linear` of a model its canonical form back, in place; what FSDP needs before it
    cuts them.

    One layer after the other, so memory grows by one layer at most. Returns the model; :func:`prepare` packs again.
    """
    for layer in _layers_of(model):
        layer.unprepare()
    return model


def _layers_of(model: nn.Module) -> list[Linear]:
    if not isinstance(model, nn.Module):
        raise DtypeError(f"expected an nn.Module, got {type(model).__name__}")
    return [module for module in model.modules() if isinstance(module, Linear)]
