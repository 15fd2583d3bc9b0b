"""Rotation by a block Hadamard matrix with random signs: spreads outliers of a channel over its block, exactly undone.

Source of the idea: Tseng, Chee, Sun, Kuleshov and De Sa, "QuIP#" (2024); Ashkboos, Mohtashami, Croci, Li, Cameron,
Jaggi, Alistarh, Hoefler and Hensman, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024). The matrices are
Sylvester's: H_1 = 1, H_2b = [[H_b, H_b], [H_b, -H_b]].

R = diag(signs) * blockdiag(H_b, H_b, ...) / sqrt(b) is orthogonal, so ``(x R) (W R)^T = x W^T`` for x ``[..., K]``.
What the caller must do: store ``rotate_weight(W, r)`` quantized in place of W, and multiply it with
``rotate_activations(x, r)``: at run time, or folded into whatever makes x. The signs come from ``r.seed`` alone, so
(K, block, seed) is all that has to be kept. A layer that is split along K keeps its rotation only if the cuts fall
between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import DtypeError, SchemeError, ShapeError


@dataclass(frozen=True)
class Rotation:
    """A block Hadamard rotation of k channels; made and checked by :func:`block_hadamard`."""

    k: int
    block: int
    seed: int

    def signs(self, device="cpu") -> torch.Tensor:
        """+1 or -1 for each channel, int8 ``[k]``; the same on every device."""
        # Why this generator: its stream never changes between versions, and a stored weight depends on it.
        bits = np.random.RandomState(self.seed).randint(0, 2, self.k)
        return torch.from_numpy(bits.astype(np.int8) * 2 - 1).to(device)


def block_hadamard(k: int, block: int | None = None, *, seed: int = 0) -> Rotation:
    """The rotation of k channels in blocks, a power of two that divides k: by default the largest one.

    seed: a whole number in 0 .. 2^32 - 1. Raises ShapeError for a block that is no power of two or does not divide k,
    SchemeError for another seed.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ShapeError(f"k must be a whole number from 1, got {k!r}")
    largest = k & -k
    block = largest if block is None else block
    if isinstance(block, bool) or not isinstance(block, int) or block < 1 or block & (block - 1) or k % block:
        raise ShapeError(f"block must be a power of two that divides {k}, at most {largest}, got {block!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise SchemeError(f"seed must be a whole number in 0 .. 2^32 - 1, got {seed!r}")
    return Rotation(k, block, seed)


def rotate_weight(weight: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """``W R`` for a weight ``[N, K]``, in its float type (arithmetic in fp32 at least): what is quantized."""
    return _transform(_signed(weight, rotation), rotation)


def rotate_activations(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """``x R`` for x ``[..., K]``, in its float type: what the rotated weight is multiplied with.

    For one token as a column this is R^T x, and (W R)(R^T x) = W x.
    """
    return _transform(_signed(x, rotation), rotation)


def unrotate_weight(rotated: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """``V R^T`` for V ``[N, K]``: the weight that :func:`rotate_weight` was given, up to rounding."""
    return _signed(_transform(_checked(rotated, rotation), rotation), rotation)


def _checked(tensor: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        got = str(tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise DtypeError(f"expected a float tensor to rotate, got {got.removeprefix('torch.')}")
    if tensor.dim() < 1 or tensor.shape[-1] != rotation.k:
        raise ShapeError(f"expected {rotation.k} columns to rotate, got shape {tuple(tensor.shape)}")
    return tensor


def _signed(tensor: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    return _checked(tensor, rotation) * rotation.signs(tensor.device).to(tensor.dtype)


def _transform(tensor: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Each block times H / sqrt(block), which is symmetric and its own inverse: log2(block) rounds of sums."""
    work = tensor if tensor.dtype == torch.float64 else tensor.float()
    part = work.reshape(-1, rotation.block)
    half = 1
    while half < rotation.block:
        pairs = part.view(len(part), rotation.block // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        part = torch.stack((first + second, first - second), dim=2).view(len(part), rotation.block)
        half *= 2
    return (part * rotation.block**-0.5).view(work.shape).to(tensor.dtype)
