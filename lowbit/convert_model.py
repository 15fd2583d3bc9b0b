"""quantize_model: replaces the nn.Linear modules of a model, all of them or none."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from .checkpoint.calibrate import quantize_calibrated
from .errors import DtypeError, LowbitError, SchemeError, nearest
from .fusing import expect_known
from .fusing import fuse as fuse_layers
from .nn import Linear
from .ops.schema import check_act
from .quantizers import CALIBRATED, quantize

_SKIP = ("lm_head",)
#: What may be set for a layer.
OPTIONS = ("dtype", "group_size", "method", "zero_kind", "act")


def quantize_model(
    model: nn.Module,
    dtype="int4",
    *,
    group_size: int = 128,
    method: str = "mse",
    zero_kind: str | None = None,
    act: str | None = None,
    skip: Iterable[str] = _SKIP,
    dynamic: Mapping[str, Mapping | None] | None = None,
    calibration: torch.Tensor | None = None,
    prepare: bool = True,
    fuse: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> nn.Module:
    """Replace every module that is exactly an ``nn.Linear`` by a quantized :class:`~lowbit.nn.Linear`, in place.

    method: "rtn", "mse" and "hqq" need only the weights (:func:`lowbit.quantize`). "gptq" (Frantar et al. 2022) and
    "awq" (Lin et al. 2023) are for causal language models, called as ``model(ids, use_cache=False)``: they read
    ``calibration``, token ids int ``[samples, length]`` without padding, one decoder block after the other. "awq" also
    changes float weights, where a scale can be folded into the norm or linear layer before without a change of the
    function, else it only clips.

    skip: layers to leave alone; dynamic: settings (dtype, group_size, method, zero_kind, act) for some layers, or None
    to leave them alone. Both name layers by a module's name (``lm_head``, ``layers.3.mlp``: whole dotted parts of the
    full name, so everything inside a named module too) or by a regular expression that is searched in the full name
    (``r"\\.down_proj$"``). skip wins over dynamic, earlier entries of dynamic over later ones. prepare: also pack for
    the device each layer lies on; fuse: also let layers that read the same x share a product (:func:`lowbit.fuse`).
    progress: called with (done, total, name) after each layer.

    A layer used in several places is quantized once. Hooks of a layer that is replaced are gone, with a warning. A
    layer whose weight is also a parameter of another module (an output layer tied to the embedding) is left alone, with
    a warning. Layers change only when all of them could be quantized: on an error the model is as it was. Returns the
    model.

    Raises SchemeError for settings that do not exist, for an entry of skip or dynamic that no layer has, when nothing
    is left to quantize, and for fuse of a model that :func:`lowbit.fuse` does not know; QuantizationError, with the
    layer's name, for weights that cannot be quantized.
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"expected an nn.Module, got {type(model).__name__}")
    if type(model) is nn.Linear:
        raise SchemeError("expected a model that holds nn.Linear modules, got one itself; use Linear.from_linear")
    if progress is not None and not callable(progress):
        raise DtypeError(f"progress must be a function or None, got {type(progress).__name__}")
    if fuse:
        expect_known(model)
    settings = {"dtype": dtype, "group_size": group_size, "method": method, "zero_kind": zero_kind, "act": act}
    dynamic = checked_dynamic(dynamic)
    places = _places(model)
    skipped = Patterns(checked_skip(skip), "skip", default=_SKIP)
    overridden = Patterns(list(dynamic), "dynamic")
    chosen: list[tuple[nn.Linear, list[str], dict]] = []
    for linear, names in places:
        skip_it, pattern = skipped.find(names), overridden.find(names)
        if skip_it is None and (pattern is None or dynamic[pattern] is not None):
            chosen.append((linear, names, settings if pattern is None else {**settings, **dynamic[pattern]}))
    everything = [name for _, names in places for name in names]
    skipped.expect_used(everything)
    overridden.expect_used(everything)
    chosen = _without_tied(model, chosen)
    _warn_of_hooks(chosen)
    if _needs_calibration(chosen, calibration):
        quantize_calibrated(model, chosen, calibration, prepare=prepare, progress=progress)
        return fuse_layers(model) if fuse else model
    if not chosen:
        raise SchemeError(f"expected an nn.Linear to quantize, got none: the model has {len(places)}, all left alone")

    replacements = []
    for done, (linear, names, options) in enumerate(chosen, 1):
        try:
            replacements.append((names, Linear.from_linear(linear, prepare=prepare, **options)))
        except LowbitError as error:
            raise type(error)(f"{names[0]}: {error}") from error
        if progress is not None:
            progress(done, len(chosen), names[0])
    # Why only here: up to this line the model is untouched, and nothing below can fail.
    for names, layer in replacements:
        for name in names:
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._modules[last] = layer
    return fuse_layers(model) if fuse else model


def _needs_calibration(chosen: list, calibration) -> bool:
    """Whether a layer's method reads calibration data. Raises SchemeError when that is missing, or nobody reads it."""
    named = [(names[0], options) for _, names, options in chosen if options["method"] in CALIBRATED]
    if not named:
        if calibration is not None:
            raise SchemeError(f"calibration is read by the methods {' and '.join(CALIBRATED)}, but no layer uses one")
        return False
    if calibration is None:
        method = named[0][1]["method"]
        raise SchemeError(f"method {method!r} needs calibration=token ids [samples, length], got none")
    # Why here: a setting that does not exist should be known before an hour of work.
    for _, names, options in chosen:
        plain = {key: value for key, value in options.items() if key not in ("act", "method")}
        try:
            method = options["method"]
            quantize(torch.zeros(1, 16), method="mse" if method in CALIBRATED else method, **plain)
            check_act(options["act"])
        except LowbitError as error:
            raise type(error)(f"{names[0]}: {error}") from error
    return True


def _warn_of_hooks(chosen: list) -> None:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = [names[0] for linear, names, _ in chosen if any(getattr(linear, kind, None) for kind in kinds)]
    if hooked:
        warnings.warn(f"hooks of {', '.join(hooked)} are gone: register them on the quantized layers", stacklevel=3)


def _places(model: nn.Module) -> list[tuple[nn.Linear, list[str]]]:
    """Every nn.Linear with all its full names."""
    found: dict[int, tuple[nn.Linear, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear:
            found.setdefault(id(module), (module, []))[1].append(name)
    return list(found.values())


def _without_tied(model: nn.Module, chosen: list) -> list:
    """The layers whose weight is theirs alone; a warning names each of the others."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    kept = []
    for item in chosen:
        linear, names, _ = item
        others = [name for name in owners.get(id(linear._parameters.get("weight")), []) if name not in names]
        if not others:
            kept.append(item)
            continue
        warnings.warn(
            f"{names[0]} stays as it is: its weight is also that of {', '.join(others)}; name it in skip to say so",
            stacklevel=3,
        )
    return kept


def checked_skip(skip) -> list:
    """A list of ``skip``, one entry or many. Raises DtypeError."""
    if skip is None or isinstance(skip, str):
        return [skip] if skip else []
    if not isinstance(skip, Iterable):
        raise DtypeError(f"skip must be names or regular expressions, got {type(skip).__name__}")
    return list(skip)


def checked_dynamic(dynamic, known: tuple[str, ...] = OPTIONS) -> dict[str, dict | None]:
    """A copy of ``dynamic``. Raises DtypeError or SchemeError unless it maps patterns to known settings or None."""
    if dynamic is None:
        return {}
    if not isinstance(dynamic, Mapping):
        raise DtypeError(f"dynamic must map names or regular expressions to settings, got {type(dynamic).__name__}")
    for pattern, options in dynamic.items():
        if options is None:
            continue
        if not isinstance(options, Mapping):
            raise DtypeError(f"dynamic[{pattern!r}] must be settings or None, got {type(options).__name__}")
        for option in options:
            if option not in known:
                raise SchemeError(f"dynamic[{pattern!r}] has no setting {option!r}; expected {nearest(option, known)}")
    return dict(dynamic)


class Patterns:
    """Entries of ``skip`` or ``dynamic``: which of them names a layer, and which were never used."""

    def __init__(self, patterns: list[str], argument: str, default: tuple[str, ...] = ()):
        self.argument, self.default, self.used = argument, default, set()
        self.searches = {pattern: _search(pattern, argument) for pattern in patterns}

    def find(self, names: list[str]) -> str | None:
        """The first entry that matches one of a layer's names."""
        matching = [p for p, search in self.searches.items() if any(search(name) for name in names)]
        self.used.update(matching)
        return matching[0] if matching else None

    def expect_used(self, names: list[str]) -> None:
        """Raises SchemeError for an entry that matched nothing: a misspelt one must not pass in silence."""
        for pattern in self.searches:
            if pattern not in self.used and pattern not in self.default:
                raise SchemeError(
                    f"{self.argument} entry {pattern!r} matches no nn.Linear; near: {nearest(pattern, names)}"
                )


def _search(pattern: str, argument: str) -> Callable[[str], bool]:
    if not isinstance(pattern, str):
        raise DtypeError(f"entries of {argument} must be names or regular expressions, got {type(pattern).__name__}")
    if re.fullmatch(r"[\w.]+", pattern):
        return lambda name: f".{pattern}." in f".{name}."
    try:
        return lambda name, expression=re.compile(pattern): expression.search(name) is not None
    except re.error as error:
        raise SchemeError(f"{argument} entry {pattern!r} is not a regular expression: {error}") from error
