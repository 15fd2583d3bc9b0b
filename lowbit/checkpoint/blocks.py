"""The decoder blocks of a model, run one at a time: what each is called with, which layers read the same tensor.

Only the hidden states between two blocks are kept, and one copy of whatever else blocks are called with (masks,
position embeddings): memory grows with the calibration tokens, not with the depth of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import SchemeError
from ..quantizers import Moments
from .decoder import find_blocks, whole_pass

_TOKENS_AT_ONCE = 4096
#: What a block must not be given: it would remember tokens from one run to the next.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


class _Reached(Exception):
    """Ends a forward pass whose rest nobody needs."""


@dataclass
class Readers:
    """nn.Linear modules of a block that read the same tensor; ``norm`` is the module that made it, if that is known.

    calls: how often the first of them runs in one pass (0: never, for example an expert that no token chose).
    """

    linears: list[nn.Linear]
    norm: nn.Module | None = None
    calls: int = 1


class Blocks:
    """The decoder blocks of ``model`` and the hidden states, one tensor a batch, that the next of them reads."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor):
        self.model, self.modules = model, find_blocks(model)
        device = next(model.parameters()).device
        self.batches = tokens.to(device).split(max(1, _TOKENS_AT_ONCE // tokens.shape[1]))
        self.hidden: list[torch.Tensor] = []
        self._calls: list[list[tuple]] = []  # [batch][block]: (further arguments, keywords)
        form = None
        for batch in self.batches:
            form = self._capture(batch, form)

    def _capture(self, batch: torch.Tensor, form):
        """One pass in which every block only notes how it is called. Only the first block runs, and only once.

        Why all blocks: some models give each its own mask or positions. ``form`` makes a block's result of its input.
        """
        calls: list[tuple] = []
        forwards = [block.forward for block in self.modules]
        instance = [block.__dict__.get("forward") for block in self.modules]

        def noting(index: int):
            def forward(*args, **kwargs):
                nonlocal form
                named = not args
                hidden, rest = (kwargs.pop("hidden_states", None), ()) if named else (args[0], args[1:])
                if not isinstance(hidden, torch.Tensor):
                    raise SchemeError("calibration needs blocks whose first argument is the hidden states")
                if index == 0:
                    self.hidden.append(hidden)
                options = {key: None if key in _CACHES else value for key, value in kwargs.items()}
                if "use_cache" in options:
                    options["use_cache"] = False
                calls.append(self._shared(len(calls), (named, rest, options)))
                if len(calls) == len(self.modules):
                    raise _Reached
                if form is None:
                    result = (
                        forwards[0](hidden, *rest, **options)
                        if not named
                        else forwards[0](hidden_states=hidden, **options)
                    )
                    form = (lambda h: (h, *result[1:])) if isinstance(result, tuple) else (lambda h: h)
                return form(hidden)

            return forward

        try:
            for index, block in enumerate(self.modules):
                block.forward = noting(index)
            whole_pass(self.model, batch)
        except _Reached:
            pass
        finally:
            for block, forward in zip(self.modules, instance):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward
        if len(calls) != len(self.modules):
            raise SchemeError(f"calibration expected each of {len(self.modules)} blocks to run once, {len(calls)} did")
        self._calls.append(calls)
        return form

    def _shared(self, index: int, call: tuple) -> tuple:
        """The call, with tensors of the batch before in place of equal ones."""
        if not self._calls:
            return call
        named, rest, options = call
        _, before, known = self._calls[-1][index]
        rest = tuple(_same(new, old) for new, old in zip(rest, before))
        return named, rest, {key: _same(value, known.get(key)) for key, value in options.items()}

    def run(self, index: int, batch: int) -> torch.Tensor:
        """The output of a block for the hidden states of a batch."""
        block = self.modules[index]
        device = next(block.parameters()).device
        named, rest, options = _moved(self._calls[batch][index], device)
        hidden = self.hidden[batch].to(device)
        result = block(hidden_states=hidden, **options) if named else block(hidden, *rest, **options)
        return result[0] if isinstance(result, tuple) else result

    def advance(self, index: int) -> None:
        """Replace the hidden states by the block's outputs."""
        for batch in range(len(self.hidden)):
            self.hidden[batch] = self.run(index, batch)

    def readers(self, index: int) -> list[Readers]:
        """The nn.Linear modules of a block, those that read the same tensor together, in the order they run."""
        block, groups, calls, made = self.modules[index], {}, {}, {}
        held = []  # Why: as long as all tensors live, no two share an address.

        def reads(module, args, kwargs):
            x = args[0] if args else kwargs["input"]
            held.append(x)
            calls[module] = calls.get(module, 0) + 1
            if calls[module] == 1:
                groups.setdefault((x.data_ptr(), x.numel()), []).append(module)

        def makes(module, args, output):
            if isinstance(output, torch.Tensor):
                held.append(output)
                made[output.data_ptr(), output.numel()] = module

        linears = [m for m in block.modules() if type(m) is nn.Linear]
        norms = [m for m in block.modules() if _is_norm(m)]
        handles = [m.register_forward_pre_hook(reads, with_kwargs=True) for m in linears]
        handles += [m.register_forward_hook(makes) for m in norms]
        try:
            self.run(index, 0)
        finally:
            for handle in handles:
                handle.remove()
        found = []
        for key, group in groups.items():
            alone = [m for m in group if calls[m] > 1]  # it also reads other tensors
            together = [m for m in group if calls[m] == 1]
            found += [Readers(together, made.get(key))] if together else []
            found += [Readers([m], None, calls[m]) for m in alone]
        return found + [Readers([m], None, 0) for m in linears if m not in calls]

    def moments(self, index: int, group: Readers) -> Moments:
        """The moments of what a group of layers reads, over all batches."""
        first = group.linears[0]
        with recording(first, stop=group.calls == 1) as moments:
            for batch in range(len(self.hidden)):
                try:
                    self.run(index, batch)
                except _Reached:
                    pass
        return moments


@contextmanager
def recording(linear: nn.Linear, stop: bool = False) -> Iterator[Moments]:
    """Sum the moments of what a layer reads while this is open; stop: end the pass there."""
    moments = Moments(linear.in_features, linear.weight.device)

    def reads(module, args, kwargs):
        moments.add(args[0] if args else kwargs["input"])
        if stop:
            raise _Reached

    handle = linear.register_forward_pre_hook(reads, with_kwargs=True)
    try:
        yield moments
    finally:
        handle.remove()


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1 and not module._modules


def _same(new, old):
    """old where both hold the same numbers, so that the other can be freed."""
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        same = new.shape == old.shape and new.dtype == old.dtype and new.device == old.device
        return old if new is old or (same and torch.equal(new, old)) else new
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return tuple(_same(a, b) for a, b in zip(new, old))
    return new


def _moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if isinstance(value, dict):
        return {key: _moved(part, device) for key, part in value.items()}
    return value
