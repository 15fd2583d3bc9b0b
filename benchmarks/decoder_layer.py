"""One decoder layer of a language model as a chain of dependent products, each fed by the kernel before it.

There is no residual and no context: attention over the token itself alone is v, once for each head that shares it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._inductor.config
from torch.nn import functional

_EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer with grouped queries. parts: rows of each product's weight by what they make; inputs: its K."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    head: int = 128

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        kv = self.kv_heads * self.head
        return {
            "qkv": (self.heads * self.head, kv, kv),
            "o": (self.hidden,),
            "gate_up": (self.inner, self.inner),
            "down": (self.hidden,),
        }

    @property
    def inputs(self) -> dict[str, int]:
        attended = self.heads * self.head
        return {"qkv": self.hidden, "o": attended, "gate_up": self.hidden, "down": self.inner}

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each product."""
        return {name: (sum(rows), self.inputs[name]) for name, rows in self.parts.items()}

    @property
    def weights(self) -> int:
        """How many weights a layer has."""
        return sum(n * k for n, k in self.products.values())


#: Llama 3 of 8 and 70 billion parameters, and one for dry runs.
SHAPES = {
    "8b": Shape(4096, 32, 8, 14336),
    "70b": Shape(8192, 64, 8, 28672),
    "tiny": Shape(256, 2, 1, 512),
}

#: ``multiply(name, x)``: the products called name, one tensor for each part of its rows.
Multiply = Callable[[str, torch.Tensor], "tuple[torch.Tensor, ...]"]


def norm(x: torch.Tensor) -> torch.Tensor:
    """RMS norm of each row, its weight of ones left out."""
    return functional.rms_norm(x, x.shape[-1:], eps=_EPS)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


@dataclass(frozen=True)
class Small:
    """The kernels between the products: of every side the same. how: one each by torch's compiler, or why not."""

    norm: Callable = norm
    silu_mul: Callable = silu_mul
    how: str = "torch"

    @classmethod
    def best(cls, device: str, dynamic: bool = False) -> Small:
        """One kernel each where torch can compile here; dynamic: the same for any number of rows. With the variable
        TORCHINDUCTOR_ENABLE_PDL=1 torch makes programmatic launches of them."""
        if device == "cpu":
            return cls(how="torch, dry run")
        # Why: there is one for each number of rows and stride; past the default of 8 torch would give up.
        torch._dynamo.config.recompile_limit = 64
        options = {"fullgraph": True, "dynamic": dynamic}
        early = getattr(torch._inductor.config.triton, "enable_pdl", False)
        how = "compiled, with programmatic launches" if early else "compiled"
        made = cls(torch.compile(norm, **options), torch.compile(silu_mul, **options), how)
        x = torch.zeros(1, 64, dtype=torch.float16, device=device)
        try:
            with torch.inference_mode():
                made.silu_mul(made.norm(x), x)
        except Exception as why:  # Why so wide: a compiler is missing in as many ways as there are machines.
            return cls(how=f"torch, it cannot compile here ({type(why).__name__})")
        return made


def step(shape: Shape, x: torch.Tensor, multiply: Multiply, small: Small) -> torch.Tensor:
    """x ``[M, hidden]`` -> ``[M, hidden]``, in any type."""
    _, _, v = multiply("qkv", small.norm(x))
    by_head = v.unflatten(-1, (shape.kv_heads, 1, shape.head))
    attended = by_head.expand(-1, -1, shape.heads // shape.kv_heads, -1).reshape(len(x), -1)
    (o,) = multiply("o", attended)
    gate, up = multiply("gate_up", small.norm(o))
    (y,) = multiply("down", small.silu_mul(gate, up))
    return y
