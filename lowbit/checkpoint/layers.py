"""Which layers of a transformers model are quantized, and what takes their place."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from ..convert_model import Patterns
from ..errors import LowbitError, SchemeError
from ..nn import Linear
from ..quantizers import quantize
from ..tensor import QuantTensor
from .settings import Settings, expect_quantizable


@dataclass
class Choice:
    """A module to quantize. matrices: its weights by name, "" for the one of a Linear: full name -> settings.

    kind: "linear"; "conv1d" (a Linear of GPT-2, whose weight is [K, N]); "experts" (a mixture's fused 3-D weights).
    """

    module: nn.Module
    kind: str
    matrices: dict[str, dict]


def choose(model: nn.Module, settings: Settings) -> tuple[dict[str, Choice], list[str]]:
    """(module name -> Choice, names of modules that could be quantized and stay as they are).

    The output layer follows ``settings.lm_head``; a layer whose weight is tied to another parameter stays.
    Raises SchemeError when the experts of one mixture would not all be treated alike.
    """
    head = output_layer(model)[1]
    tied = tied_parameters(model)
    chosen, left = {}, []
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is None:
            continue
        if kind == "experts":
            found = _of_experts(model, name, module, settings)
        else:
            options = None
            if f"{name}.weight" not in tied:
                options = settings.of(aliases(model, name), head=module is head)
            found = None if options is None else {name: options}
        if found is None:
            left.append(name)
        else:
            chosen[name] = Choice(module, kind, found)
    return chosen, left


def expect_possible(model: nn.Module, settings: Settings, chosen: dict[str, Choice], calibrated: bool = False) -> None:
    """Raises SchemeError for an entry of skip or dynamic that no layer has, and for a layer that can't be made so."""
    known = _known_names(model, settings)
    for argument, entries in (("skip", settings.skip), ("dynamic", settings.dynamic)):
        patterns = Patterns(list(entries), argument, default=("lm_head",))
        patterns.find(known)
        patterns.expect_used(known)
    for full, options in (item for choice in chosen.values() for item in choice.matrices.items()):
        try:
            expect_quantizable(options, calibrated)
        except LowbitError as error:
            raise type(error)(f"{full}: {error}") from error


def _known_names(model: nn.Module, settings: Settings) -> list[str]:
    """Every name that a pattern may know a layer, or a matrix of an expert or of all of them, by; each once."""
    found = []
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind == "experts":
            parts = parts_of(module.has_gate, settings.experts)
            found += [f"{name}.{part}" for part in parts]
            found += [f"{name}.{i}.{part}" for i in range(count_of(module)) for part in parts]
        elif kind is not None:
            found.append(name)
    return list(dict.fromkeys(alias for name in found for alias in aliases(model, name)))


def kind_of(module: nn.Module) -> str | None:
    """The kind of a module that can be quantized, else None. Subclasses of nn.Linear mean something else: None."""
    if type(module) is nn.Linear:
        return "linear"
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return "conv1d"
    # Why these attributes: transformers sets them on every class of experts that it can exchange the products of.
    marked = all(hasattr(module, mark) for mark in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
    if marked and not getattr(module, "has_post_expert_norm", False):
        first = module._parameters.get("gate_up_proj" if module.has_gate else "up_proj")
        down = module._parameters.get("down_proj")
        if first is not None and down is not None and first.dim() == down.dim() == 3:
            return "experts"
    return None


def output_layer(model: nn.Module) -> tuple[str, nn.Module | None]:
    """The name and the module of the layer that makes logits; ("", None) where there is none."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        return "", None
    return next(((name, head) for name, module in model.named_modules() if module is head), ("", None))


def tied_parameters(model: nn.Module) -> set[str]:
    """Full names of the parameters that share their tensor with another."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {*tied, *tied.values()}


def aliases(model: nn.Module, name: str) -> list[str]:
    """The names that a pattern may know a layer by: with the prefix of the base model and without it.

    Why: a checkpoint of a model with a head also loads into the base model, whose names lack the prefix.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return [name]
    if getattr(model, "base_model", model) is model:
        return [name, f"{prefix}.{name}"]
    return [name, name.removeprefix(f"{prefix}.")]


def as_patterns(names: list[str], others: list[str]) -> list[str]:
    """Entries of skip that match exactly these names, and none of the others."""
    made = []
    for name in names:
        catches = any(f".{name}." in f".{other}." for other in others)
        made.append(f"^{re.escape(name)}$" if catches else name)
    return made


# ---- experts -------------------------------------------------------------------------------------------------------


def count_of(module: nn.Module) -> int:
    """How many experts a module holds."""
    return module._parameters["down_proj"].shape[0]


def parts_of(has_gate: bool, layout: str) -> tuple[str, ...]:
    """The matrices of one expert in a layout."""
    if not has_gate:
        return ("up_proj", "down_proj")
    return ("gate_up_proj", "down_proj") if layout == "fused" else ("gate_proj", "up_proj", "down_proj")


def shape_of(module: nn.Module, part: str) -> tuple[int, int]:
    """(N, K) of a matrix of one expert."""
    whole = part if part in module._parameters else "gate_up_proj"
    a, b = module._parameters[whole].shape[1:]
    n, k = (b, a) if module.is_transposed else (a, b)
    return (n if whole == part else n // 2), k


def _of_experts(model, name: str, module: nn.Module, settings: Settings) -> dict[str, dict] | None:
    found = {}
    for expert in range(count_of(module)):
        for part in parts_of(module.has_gate, settings.experts):
            full = f"{name}.{expert}.{part}"
            found[full] = settings.of([*aliases(model, full), *aliases(model, f"{name}.{part}")])
    left = [full for full, options in found.items() if options is None]
    if left and len(left) < len(found):
        raise SchemeError(
            f"{name}: the experts of a layer are quantized all or none, got {len(left)} of {len(found)} matrices left "
            f"alone, the first is {left[0]}; name {name} in skip or dynamic"
        )
    return None if left else found


# ---- what takes a module's place -----------------------------------------------------------------------------------


def empty_linear(choice: Choice, full: str, dtype: torch.dtype) -> Linear:
    """A quantized Linear on meta for the matrix ``full`` of a choice; the bias of a Linear has its old type."""
    options, module = choice.matrices[full], choice.module
    bias = None if choice.kind == "experts" else module.bias
    if choice.kind == "linear":
        n, k = module.out_features, module.in_features
    elif choice.kind == "conv1d":
        k, n = module.weight.shape
    else:
        n, k = shape_of(module, full.rpartition(".")[2])
    made = {"device": "meta", "dtype": dtype, "scheme": Settings.scheme(options), "perm": options["perm"]}
    if options["codebook"]:
        made["codebook"] = True
    layer = Linear(k, n, bias=bias is not None, act=options["act"], **made)
    if bias is not None:
        layer.bias = nn.Parameter(torch.empty(n, dtype=bias.dtype, device="meta"), bias.requires_grad)
    return layer.train(module.training)


def quantize_matrix(full: str, weight: torch.Tensor, options: dict) -> QuantTensor:
    """Quantize ``[N, K]`` with a layer's settings; errors name the layer."""
    scale = options["scale_dtype"]
    try:
        return quantize(
            weight.contiguous(),
            options["dtype"],
            group_size=options["group_size"],
            method=options["method"],
            zero_kind=options["zero_kind"],
            scale_dtype=None if scale is None else getattr(torch, scale),
        )
    except LowbitError as error:
        raise type(error)(f"{full}: {error}") from error
