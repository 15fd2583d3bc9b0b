"""The decoder blocks of a model, run one at a time: what each is called with, which layers read the same tensor.

Only the hidden states between two blocks are kept, and one copy of whatever else blocks are called with (masks,
position embeddings): memory grows with the calibration tokens, not with the depth of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import SchemeError
from ..quantizers import Moments
from .calls import moved, same
from .decoder import find_blocks, whole_pass

_TOKENS_AT_ONCE = 4096
#: What a block must not be given: it would remember tokens from one run to the next.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")


class Reached(Exception):
    """Ends a forward pass whose rest nobody needs."""


@dataclass
class Readers:
    """nn.Linear modules of a block that read the same tensor; ``norm`` is the module that made it, if that is known.

    calls: how often the first of them runs in one pass (0: never). experts: in place of linears, a mixture's experts.
    """

    linears: list[nn.Linear]
    norm: nn.Module | None = None
    calls: int = 1
    experts: nn.Module | None = None


def batches_of(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Token ids ``[samples, length]`` in the pieces that pass a block at once."""
    return tokens.split(max(1, _TOKENS_AT_ONCE // tokens.shape[1]))


class Blocks:
    """The decoder blocks of ``model`` and the hidden states, one tensor a batch, that the next of them reads."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor):
        self.model, self.modules = model, find_blocks(model)
        # Why not the first: a model whose weights are read block by block has the others on meta.
        device = next(p.device for p in model.parameters() if p.device.type != "meta")
        self.batches = batches_of(tokens.to(device))
        self.hidden: list[torch.Tensor] = []
        self._calls: list[list[tuple]] = []  # [batch][block]: (further arguments, keywords)
        self._form = None  # makes a block's result of hidden states
        for batch in self.batches:
            self._capture(batch)

    def _capture(self, batch: torch.Tensor) -> None:
        """One pass in which every block only notes how it is called. Only the first block runs, and only once.

        Why all blocks: some models give each its own mask or positions.
        """
        calls: list[tuple] = []
        first = self.modules[0].forward

        def noting(index: int):
            def forward(*args, **kwargs):
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
                    raise Reached
                if self._form is None:
                    result = first(hidden_states=hidden, **options) if named else first(hidden, *rest, **options)
                    others = result[1:] if isinstance(result, tuple) else None
                    self._form = (lambda h: h) if others is None else (lambda h: (h, *others))
                return self._form(hidden)

            return forward

        forwards = [noting(index) for index in range(len(self.modules))]
        with forwards_of(self.modules, forwards), suppress(Reached):
            whole_pass(self.model, batch)
        if len(calls) != len(self.modules):
            raise SchemeError(f"calibration expected each of {len(self.modules)} blocks to run once, {len(calls)} did")
        self._calls.append(calls)

    def _shared(self, index: int, call: tuple) -> tuple:
        """The call, with tensors of the batch before in place of equal ones."""
        if not self._calls:
            return call
        named, rest, options = call
        _, before, known = self._calls[-1][index]
        rest = tuple(same(new, old) for new, old in zip(rest, before))
        return named, rest, {key: same(value, known.get(key)) for key, value in options.items()}

    def run(self, index: int, batch: int) -> torch.Tensor:
        """The output of a block for the hidden states of a batch."""
        block = self.modules[index]
        device = next(block.parameters()).device
        named, rest, options = moved(self._calls[batch][index], device)
        hidden = self.hidden[batch].to(device)
        result = block(hidden_states=hidden, **options) if named else block(hidden, *rest, **options)
        return result[0] if isinstance(result, tuple) else result

    def advance(self, index: int) -> None:
        """Replace the hidden states by the block's outputs."""
        for batch in range(len(self.hidden)):
            self.hidden[batch] = self.run(index, batch)

    def go_on(self, hidden: Iterable[torch.Tensor] | None) -> None:
        """Take these hidden states, one tensor a batch, where somebody reads them."""
        for batch, states in enumerate(hidden or ()):
            self.hidden[batch] = states.to(self.hidden[batch].device)

    def around(self, linear: nn.Linear, stop: bool) -> Moments:
        """The moments of what a layer outside the blocks reads, when all blocks are advanced. stop: once is enough.

        One pass of the model for each batch, in which the last hidden states stand for what the blocks make.
        """
        with recording(linear, stop=stop) as moments:
            for batch, hidden in zip(self.batches, self.hidden):
                made = [lambda *_, hidden=hidden, **__: self._form(hidden)] * len(self.modules)
                with forwards_of(self.modules, made), suppress(Reached):
                    whole_pass(self.model, batch)
        return moments

    def readers(self, index: int, experts: Collection[nn.Module] = ()) -> list[Readers]:
        """The nn.Linear modules of a block, those that read the same tensor together, in the order they run.

        experts: modules that come as a group of their own. Layers that read what they read get no norm: it can't be
        changed for the layers alone.
        """
        block, groups, calls, made, routed = self.modules[index], {}, {}, {}, set()
        held = []  # Why: as long as all tensors live, no two share an address.

        def reads(module, args, kwargs):
            x = args[0] if args else next(iter(kwargs.values()))
            held.append(x)
            calls[module] = calls.get(module, 0) + 1
            if calls[module] == 1:
                key = (x.data_ptr(), x.numel())
                if module in experts:
                    routed.add(key)
                    key = module
                groups.setdefault(key, []).append(module)

        def makes(module, args, output):
            if isinstance(output, torch.Tensor):
                held.append(output)
                made[output.data_ptr(), output.numel()] = module

        linears = [m for m in block.modules() if type(m) is nn.Linear or m in experts]
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
            if key in experts:
                found.append(Readers([], None, calls[key], key))
                continue
            alone = [m for m in group if calls[m] > 1]  # it also reads other tensors
            together = [m for m in group if calls[m] == 1]
            found += [Readers(together, None if key in routed else made.get(key))] if together else []
            found += [Readers([m], None, calls[m]) for m in alone]
        found += [Readers([], None, 0, m) for m in linears if m in experts and m not in calls]
        return found + [Readers([m], None, 0) for m in linears if m not in experts and m not in calls]

    def moments(self, index: int, group: Readers) -> Moments:
        """The moments of what a group of layers reads, over all batches."""
        first = group.linears[0]
        with recording(first, stop=group.calls == 1) as moments:
            for batch in range(len(self.hidden)):
                with suppress(Reached):
                    self.run(index, batch)
        return moments


@contextmanager
def forwards_of(modules: Iterable[nn.Module], forwards: list) -> Iterator[None]:
    """While this is open, these modules do something else."""
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module, forward in zip(modules, forwards):
            module.forward = forward
        yield
    finally:
        for module, forward in zip(modules, before):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


@contextmanager
def recording(linear: nn.Linear, stop: bool = False) -> Iterator[Moments]:
    """Sum the moments of what a layer reads while this is open; stop: end the pass there."""
    moments = Moments(linear.in_features, linear.weight.device)

    def reads(module, args, kwargs):
        moments.add(args[0] if args else kwargs["input"])
        if stop:
            raise Reached

    handle = linear.register_forward_pre_hook(reads, with_kwargs=True)
    try:
        yield moments
    finally:
        handle.remove()


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1 and not module._modules
