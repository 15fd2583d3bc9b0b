"""fuse: the linears of a decoder block that read the same x share one product; unfuse takes that back."""

from __future__ import annotations

import torch
from torch import nn

from .errors import DtypeError, SchemeError
from .fused import Fused
from .nn import Linear

#: Modules whose code is known: ``<name>Attention`` and ``<name>MLP`` of ``transformers.models.<key>``. Their forward
#: calls the projections of a group one after the other, each once, with the same x, and writes nothing to x.
_KNOWN = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
_GROUPS = {"Attention": ("q_proj", "k_proj", "v_proj"), "MLP": ("gate_proj", "up_proj")}
_CHILD = "fused"


def fuse(model: nn.Module) -> nn.Module:
    """Let q, k and v, and gate and up, of each decoder block of a quantized model share one product, in place.

    For attention and MLP modules of Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3Moe in transformers. The rows of
    the weights are concatenated in the stored form and packed as one, so any N will do without padding, and the module
    that holds the layers gets a child ``fused`` with the only copy. Biases are concatenated for each product, a missing
    one as zeros. Layers that differ in weight type, group size, zero kind, scale type, perm, act, K, device or packing,
    that have a codebook, are offloaded or used in several places, stay apart. Fused already, a module stays as it is.

    Each layer stays where it was, the same object with its name, hooks, bias, ``quant_tensor()`` and entries in
    ``state_dict``, which load again (a :class:`~lowbit.fused.FusedLinear`). Within one call of the module that holds
    them, the first that is called multiplies x with all rows, and the others take their columns of that product, each
    once; it is dropped when all are taken, and at the latest when the module's forward ends. Called elsewhere a layer
    makes the whole product for itself: right, but slow.

    What is shared is never stale. It goes to a layer only for the same tensor x in the same state: version counter (a
    write in place changes it), requires_grad, grad mode, autocast, act, CUDA stream and capture. Compiled code and
    inference tensors have no version counter to ask; there it rests on the code between the layers, which is why only
    known modules are fused, and layers with forward hooks of their own each make the whole product.

    Ways to fail: a write to x that torch does not count (``x.data``, a kernel that does not declare it), or in compiled
    code and under inference_mode by a hook on something around a layer, is not seen. Results are slices of one
    tensor, so with several rows they are not contiguous, and keep its memory while one of them lives. Threads that run
    one model at once stay right and share less. Loading a state_dict with another perm is an error. Adapters go on top
    of fused layers, not under them. Before fully_shard or tensor parallelism, and before a part of a model is taken out
    or moved by itself, call :func:`unfuse`.

    Returns the model. Raises DtypeError, or SchemeError for a model without a module of these kinds, or whose layers
    are cut over processes.
    """
    expect_known(model)
    places: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        places[id(module)] = places.get(id(module), 0) + 1
    parents = _parents(model)
    for parent, names in parents:
        for name in names:
            layer = parent._modules.get(name)
            if isinstance(layer, Linear) and hasattr(layer.qweight, "placements"):
                raise SchemeError(f"fuse expects layers that lie whole in each process, got a {name} that is cut")
    for parent, names in parents:
        layers = [parent._modules.get(name) for name in names if _CHILD not in parent._modules]
        alike = _alike([layer for layer in layers if type(layer) is Linear and places[id(layer)] == 1])
        if alike:
            setattr(parent, _CHILD, Fused.of(alike))
            parent.register_forward_pre_hook(_open)
            parent.register_forward_hook(_close, always_call=True)
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Give every layer that :func:`fuse` put together its own weight back, in place and bit for bit; returns the model.

    Raises DtypeError, or SchemeError where another tool has cut the weights since.
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"expected an nn.Module, got {type(model).__name__}")
    for parent in list(model.modules()):
        if isinstance(parent._modules.get(_CHILD), Fused):
            parent._modules[_CHILD].release()
            delattr(parent, _CHILD)
            for hooks, mine in ((parent._forward_pre_hooks, _open), (parent._forward_hooks, _close)):
                for key in [key for key, hook in hooks.items() if hook is mine]:
                    del hooks[key]
                    parent._forward_hooks_always_called.pop(key, None)
    return model


def expect_known(model: nn.Module) -> None:
    """Raises DtypeError, or SchemeError for a model without a module whose layers :func:`fuse` can put together."""
    if not isinstance(model, nn.Module):
        raise DtypeError(f"expected an nn.Module, got {type(model).__name__}")
    if not _parents(model):
        kinds = ", ".join(_KNOWN.values())
        raise SchemeError(f"fuse expects attention or MLP modules of transformers' {kinds}, got {type(model).__name__}")


def _open(parent: nn.Module, _args) -> None:
    parent._modules[_CHILD].scope.held = ()


def _close(parent: nn.Module, _args, _output) -> None:
    parent._modules[_CHILD].scope.held = None


def _parents(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The modules whose layers may be fused, with the names of these."""
    known = {
        (f"transformers.models.{key}.modeling_{key}", name + kind): names
        for key, name in _KNOWN.items()
        for kind, names in _GROUPS.items()
    }
    found = ((module, known.get((type(module).__module__, type(module).__name__))) for module in model.modules())
    return [(module, names) for module, names in found if names is not None]


def _alike(layers: list[Linear]) -> list[Linear]:
    """The first layers, two or more, that can be one product; [] where there are none."""
    for first in layers:
        found = [layer for layer in layers if _may_share(first, layer)]
        if len(found) > 1:
            return found
    return []


def _may_share(a: Linear, b: Linear) -> bool:
    facts = [(m.scheme, m.act, m.in_features, m.layout, m.qweight.device, m.codebook is None) for m in (a, b)]
    if facts[0] != facts[1] or a.codebook is not None or a.qweight.device.type == "meta":
        return False
    return a.perm is None and b.perm is None or None not in (a.perm, b.perm) and torch.equal(a.perm, b.perm)
