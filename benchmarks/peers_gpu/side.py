"""What one side of the comparison is: a weight, copied as often as needed, and a product with each copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lowbit.dtypes import WeightType, kernel_type, weight_type

#: Rows of the weight that are multiplied in float64 at a time.
_EXACT_ROWS = 8192


class Unavailable(Exception):
    """Why a side can't run here; the reason is printed and recorded."""


@dataclass
class Problem:
    """One weight fp16 [N, K] on the device; ``copies(bytes)`` says how often a side shall hold it."""

    weight: torch.Tensor
    copies: Callable[[int], int]
    kept: dict = field(default_factory=dict)  # what a side wants to find again when it is opened for another x

    @classmethod
    def make(cls, n: int, k: int, device: str, copies: Callable[[int], int]) -> Problem:
        """A Gaussian weight, always the same, whose products are of the size of x."""
        generator = torch.Generator(device=device).manual_seed(n * 31 + k)
        return cls((torch.randn(n, k, generator=generator, device=device) / k**0.5).half(), copies)

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1]


@dataclass
class Ready:
    """A side that is ready to be timed.

    calls: one a copy, x [M, K] -> y [M, N]; nbytes: what one product reads of its copy; reference: the weight [N, K] as
    this side understands it, or None; prepare: called once for each x before it is timed.
    """

    calls: list[Callable[[torch.Tensor], torch.Tensor]]
    nbytes: int
    reference: torch.Tensor | None
    prepare: Callable[[torch.Tensor], None] = lambda x: None


def timed_type(name: str) -> WeightType:
    """The weight type of a name: of lowbit's, or "codebook4" and others, whose codes a table gives values to."""
    return kernel_type(name) if name.startswith("codebook") else weight_type(name)


class Side:
    """A product to time: ``family`` with weights of ``dtype`` (a name of lowbit's, or None) and x of ``act``."""

    family = ""
    #: Whether errors are held against lowbit's bounds; a peer's are only recorded.
    judged = False
    #: Whether it quantizes for itself: its reference is the float weight then.
    own_quantizer = False

    def __init__(self, dtype: str | None, act: str, group: int, variant: str | None = None):
        self.dtype, self.act, self.group, self.variant = dtype, act, group, variant
        self.bits = 16 if dtype is None else timed_type(dtype).bits
        self.name = " ".join(part for part in (self.family, dtype, variant) if part)

    @property
    def x_type(self) -> torch.dtype:
        return getattr(torch, self.act)

    def serves(self, m: int) -> bool:
        """Whether M rows of x are timed."""
        return True

    def open(self, problem: Problem) -> Ready:
        """Make the copies. Raises Unavailable with the reason."""
        raise NotImplementedError


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in float64."""
    wide = x.double()
    return torch.cat([wide @ part.double().T for part in weight.split(_EXACT_ROWS)], dim=1)


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """||y - exact|| / ||exact||"""
    return ((y.double() - exact).norm() / exact.norm()).item()


def symmetric_codes(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to nearest for peers without a quantizer of their own: codes int32 [N, K] from 0, fp16 scales [N, K/group],
    and the weight they mean, fp32 [N, K]; value = scale * (code - 2^(bits-1))."""
    grouped, half = weight.float().unflatten(1, (-1, group)), 2 ** (bits - 1)
    scales = (grouped.abs().amax(-1, keepdim=True) / (half - 1)).clamp_min(1e-6).half()
    codes = (grouped / scales.float()).round().clamp(-half, half - 1)
    meant = (codes * scales.float()).flatten(1)
    return (codes + half).int().flatten(1), scales.squeeze(-1), meant
