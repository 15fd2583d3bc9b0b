"""The experts of a mixture with quantized weights: every matrix is a :class:`~lowbit.nn.Linear` of its own."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ..nn import Linear
from .layers import Choice, count_of, empty_linear, parts_of

_WHOLE = ("gate_up_proj", "up_proj", "down_proj")


class _Experts:
    """What a quantized class of experts adds to the class it is made of; activation and gate are the old ones.

    The modules "0", "1", ... hold the matrices: gate_up_proj (or gate_proj and up_proj, or up_proj alone) and
    down_proj, [out, in]. Biases stay parameters of the module, [experts, out].
    """

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """hidden_states [tokens, hidden]; top_k_index, top_k_weights [tokens, chosen]: -> [tokens, hidden]."""
        tokens, hidden = hidden_states.shape[0], hidden_states.shape[-1]
        # Why float32: sums of 16-bit numbers would be rounded once an expert.
        out = torch.zeros(tokens, hidden, dtype=torch.float32, device=hidden_states.device)
        for index in top_k_index.unique().tolist():
            if index >= self.lowbit_experts:  # how some routers say "no expert"
                continue
            expert = getattr(self, str(index))
            token, place = torch.where(top_k_index == index)
            x = expert.down_proj(self.lowbit_middle(index, hidden_states[token]))
            if self.has_bias:
                x = x + self.down_proj_bias[index]
            out.index_add_(0, token, x.float() * top_k_weights[token, place, None].float())
        return out.to(hidden_states.dtype)

    def lowbit_middle(self, index: int, x):
        """What the down projection of an expert reads, for its tokens x [tokens, hidden]."""
        expert = getattr(self, str(index))
        if not self.has_gate:
            made, bias = expert.up_proj(x), "up_proj_bias"
        else:
            fused = expert._modules.get("gate_up_proj")
            made = torch.cat([expert.gate_proj(x), expert.up_proj(x)], dim=-1) if fused is None else fused(x)
            bias = "gate_up_proj_bias"
        made = made + getattr(self, bias)[index] if self.has_bias else made
        return self._apply_gate(made) if self.has_gate else self.act_fn(made)

    def __reduce__(self):
        return _new, (type(self).__bases__[1],), self.__dict__.copy()

    def dequantize_(self, dtype: torch.dtype) -> None:
        """Become the module of float weights again, in place."""
        whole = {part: [] for part in parts_of(self.has_gate, "fused")}
        for index in range(self.lowbit_experts):
            expert = self._modules.pop(str(index))
            for part, parts in whole.items():
                held = [expert._modules[n] for n in ([part] if part in expert._modules else ["gate_proj", "up_proj"])]
                weight = torch.cat([layer.dequantize(dtype) for layer in held])
                parts.append(weight.T if self.is_transposed else weight)
        self.__class__ = type(self).__bases__[1]
        for part, parts in whole.items():
            setattr(self, part, nn.Parameter(torch.stack(parts).contiguous()))


@functools.cache
def _quantized(cls: type) -> type:
    return type(f"Lowbit{cls.__name__}", (_Experts, cls), {})


def _new(cls: type):
    return _quantized(cls).__new__(_quantized(cls))


def swap(name: str, choice: Choice, dtype: torch.dtype, layout: str) -> dict[str, Linear]:
    """Turn a module of experts into a quantized one, in place, with empty layers on meta; returns them by full name."""
    module = choice.module
    count = count_of(module)
    made = {full: empty_linear(choice, full, dtype) for full in choice.matrices}
    for index in range(count):
        expert = nn.Module()
        for part in parts_of(module.has_gate, layout):
            expert.add_module(part, made[f"{name}.{index}.{part}"])
        module.add_module(str(index), expert)
    for part in _WHOLE:
        module._parameters.pop(part, None)
    module.lowbit_experts = count
    module._is_hf_initialized = True  # Why: transformers' random start would look for the weights that are gone
    module.__class__ = _quantized(type(module))
    return made


def matrix(module: nn.Module, whole: torch.Tensor, index: int, part: str) -> torch.Tensor:
    """The float weight [N, K] of a part of one expert; whole: the 3-D parameter of the module that holds it."""
    weight = whole[index].T if module.is_transposed else whole[index]
    if part == "gate_proj":
        weight = weight[: len(weight) // 2]
    elif part == "up_proj" and module.has_gate:
        weight = weight[len(weight) // 2 :]
    return weight.contiguous()
