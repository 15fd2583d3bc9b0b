"""What one side of the comparison is: a weight, prepared as often as needed, and a product with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

LEAST_COPIES = 3


class Unavailable(Exception):
    """Why a side can't run here; the reason is printed and recorded."""


@dataclass(frozen=True)
class Problem:
    """One weight: ``weight`` fp32 ``[N, K]``; ``rows``: the outputs that are checked (all of them would take long)."""

    weight: torch.Tensor
    rows: torch.Tensor

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    @staticmethod
    def make(n: int, k: int) -> Problem:
        """A Gaussian weight of standard deviation 0.02, always the same."""
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 31 + k)) * 0.02
        return Problem(weight, torch.linspace(0, n - 1, min(n, 256)).long().unique())


class Side:
    """A product to time. ``name`` is "<family> <form>"; x and y have the type ``act``; ``bits`` a weight, with scales.

    Life: ``open`` (makes the copies), then for each x ``bind`` gives the call to time, then ``close``.
    """

    family = ""
    #: "<name> <version>" of a library that Python's package list does not know.
    version = ""
    #: The library makes its kernel at the first call of each copy, so every copy is called once before timing.
    warms_each_copy = False

    def __init__(self, form: str, bits: float, act: torch.dtype = torch.float32):
        self.name = f"{self.family} {form}"
        self.bits = bits
        self.act = act

    def bytes(self, problem: Problem) -> int:
        """Bytes of one copy, scales included."""
        return math.ceil(self.bits * problem.n * problem.k / 8)

    def copies(self, problem: Problem, rotate_mb: int) -> int:
        """How many copies make ``rotate_mb``, and never fewer than three."""
        return max(LEAST_COPIES, math.ceil(rotate_mb * 1e6 / self.bytes(problem)))

    def open(self, problem: Problem, copies: int, threads: int) -> None:
        """Prepare the copies. Raises Unavailable with the reason."""
        raise NotImplementedError

    def bind(self, x: torch.Tensor) -> Callable[[int], object]:
        """The call to time, copy number -> something that ``read`` understands; everything else is done before."""
        raise NotImplementedError

    def read(self, result) -> torch.Tensor:
        """y ``[M, N]`` from what the call returned."""
        return result

    def dequantized(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Copy 0 as this side understands it, float64 ``[len(rows), K]``; None when it can't be said."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the copies."""
        raise NotImplementedError


def nrmse(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor) -> float:
    """Error of y ``[M, N]`` in the checked rows against float64, as a share of the right answer's norm."""
    right = x.double() @ weight.T
    return float((y[:, rows].double() - right).norm() / right.norm())


def group_codes(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric round to nearest: codes int32 ``[N, K]`` in -2^(b-1)..2^(b-1)-1 and fp32 scales ``[N, K/group]``."""
    grouped = weight.unflatten(1, (-1, group))
    top = 2 ** (bits - 1) - 1
    scales = (grouped.abs().amax(-1) / top).clamp_min(1e-12)
    codes = (grouped / scales[..., None]).round().clamp(-top - 1, top).to(torch.int32)
    return codes.flatten(1), scales
