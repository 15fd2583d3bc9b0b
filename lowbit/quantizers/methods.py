"""Methods that need no data: ``rtn`` (round to nearest), ``mse`` (clip where it pays), ``hqq`` (half-quadratic).

A method takes a Rule and weights fp32 ``[n, G, g]`` and finds the stored scales and zeros of every group.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..errors import QuantizationError
from .rule import Found, Rule, divisor

_COARSE = 12  # clip ratios tried at equal distances between 1 and the lowest that can pay
_FINE = (-2 / 3, -1 / 3, 1 / 3, 2 / 3)  # then these, in coarse steps around the best
# Why: a gain below this could be rounding of the fp32 sums; then the unclipped scale stays.
_GAIN = 1 - 1e-4
#: The norm of hqq, its first weight of the split, by how much that grows, and how often.
_P, _BETA, _GROWTH, _ITERATIONS = 0.7, 10.0, 1.01, 20


def rtn(rule: Rule, w: torch.Tensor) -> Found:
    """The scale that reaches the largest weight. Raises QuantizationError when it overflows its type."""
    found = rule.scales(w)
    for what, stored in (("scales", found.scales), ("zeros", found.zeros)):
        bad = 0 if stored is None else stored.numel() - int(stored.isfinite().count_nonzero())
        if bad:
            name, top = rule.scheme.scale_type, w.abs().max().item()
            raise QuantizationError(
                f"{bad} {what} overflow {name} (largest weight {top:.3g}); pass a wider scale_dtype, torch.float32"
            )
    return found


def mse(rule: Rule, w: torch.Tensor) -> Found:
    """The clip ratio of least squared error per group.

    The grid ends where clipping cannot pay: rounding costs at most g * s^2 / 4, clipping the largest weight alone
    ((1 - ratio) * max|w|)^2.
    """
    return search_clip(rule, w, lambda found: _squared_error(rule, w, found), clip_span(rule, w.shape[-1]))


def clip_span(rule: Rule, size: int) -> float:
    """How far under 1 a clip ratio can lower the squared error of a group of this size."""
    wtype = rule.weight
    levels = {"int": wtype.max_value, "uint": wtype.max_value / 2, "float": 2.0**wtype.mantissa}[wtype.kind]
    return min(0.8, math.sqrt(size) / (2 * levels))


def search_clip(rule: Rule, w: torch.Tensor, error: Callable[[Found], torch.Tensor], span: float) -> Found:
    """The clip ratio in 1 - span .. 1 of least error (``[n, G]`` of a Found): a coarse grid, then a finer one."""
    best, wtype = rtn(rule, w), rule.weight
    if wtype.kind == "int" and wtype.bits == 1:
        return best  # the mean is the least squared error already
    step = span / _COARSE
    least = error(best)
    ratio = torch.ones_like(least)

    def attempt(candidate) -> None:
        found = rule.scales(w, candidate)
        now = error(found)
        better = now < least * _GAIN
        torch.where(better, now, least, out=least)
        torch.where(better, torch.as_tensor(candidate, dtype=ratio.dtype, device=ratio.device), ratio, out=ratio)
        best.replace(better, found)

    for i in range(1, _COARSE + 1):
        attempt(1 - i * step)
    centre = ratio.clone()
    for distance in _FINE:
        attempt((centre + distance * step).clamp_(max=1))
    return best


def _squared_error(rule: Rule, w: torch.Tensor, found: Found) -> torch.Tensor:
    """The squared error ``[n, G]`` of w under stored scales, fp32; summed in units of the scale."""
    x = rule.positions(w, found)
    lost = rule.values(x, w).sub_(x).square_().sum(-1) * found.scales.float().square()
    return torch.where(found.scales == 0, w.square().sum(-1), lost)


def hqq(rule: Rule, w: torch.Tensor) -> Found:
    """Half-quadratic quantization: least sum of |error|^0.7, which lets a few weights be far off and the rest be near.

    Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023). The error is split
    into a sparse part, found by shrinking, and a rest of least squares, in turns. Types with zeros move their zero, as
    in the paper, and it becomes a number with a fraction; symmetric types have none and move their scale. Every group
    starts from the range of rtn and from that of mse, and keeps the best that was seen, judged by what is stored: in
    that norm no group is worse than under rtn or mse.
    """
    best, least = rtn(rule, w), None
    for found in (best, mse(rule, w)):
        beta = _BETA
        for i in range(_ITERATIONS + 1):
            values = rule.values(rule.positions(w, found), w)
            lost = w - rule.read(values, found)
            # Why in steps: then beta means the same for weights of any size.
            unit = found.scales.float()
            unit = torch.where(unit == 0, 1, unit).unsqueeze(-1)
            size = lost.abs().div_(unit)
            power = size.pow(_P)
            now = power.sum(-1).mul_(unit.squeeze(-1).pow(_P))
            if least is None:
                best, least = Found(found.scales, found.zeros), now
            else:
                better = now < least * _GAIN
                least = torch.where(better, now, least)
                best.replace(better, found)
            if i < _ITERATIONS:
                # The generalized soft threshold of the paper: what of the error is taken for sparse.
                kept = (size - power.div_(size.clamp(min=1e-8)).div_(beta)).clamp_(min=0).mul_(unit)
                found = _refit(rule, w - kept.copysign_(lost), values, found)
                beta *= _GROWTH
    return best


def _refit(rule: Rule, target: torch.Tensor, values: torch.Tensor, found: Found) -> Found:
    """Least squares: the zeros, or the scales of a symmetric type, for which these values come nearest to target."""
    scales, zeros = found.scales.float(), found.zeros
    if zeros is None:
        norm = values.square().sum(-1)
        scales = torch.where(norm == 0, scales, (values * target).sum(-1) / norm.clamp(min=1e-30))
        # Why: a refit scale may overflow or turn round in its type; such a group keeps what it had.
        stored = scales.to(rule.stored)
        return Found(torch.where(stored.isfinite() & (stored > 0), stored, found.scales), None)
    if rule.zero_kind == "min":
        moved = (target - values * scales.unsqueeze(-1)).mean(-1)
    else:
        moved = (values - target / divisor(scales).unsqueeze(-1)).mean(-1)
    moved = moved.to(rule.stored)
    return Found(found.scales, torch.where(moved.isfinite() & (scales != 0), moved, zeros))


METHODS: dict[str, Callable[[Rule, torch.Tensor], Found]] = {"rtn": rtn, "mse": mse, "hqq": hqq}
