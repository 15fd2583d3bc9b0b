"""Methods that need no data: ``rtn`` (round to nearest), ``mse`` (clip where it pays), ``hqq`` (half-quadratic).

A method takes a Rule and weights fp32 ``[n, G, g]`` and finds the stored scales and zeros of every group.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..errors import QuantizationError
from .rule import Found, Rule, divisor
from .scale_rounding import PER_OCTAVE, neighbours

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
            advice = "scale the weight down" if name == "float32" else "pass a wider scale_dtype, torch.float32"
            raise QuantizationError(f"{bad} {what} overflow {name} (largest weight {top:.3g}); {advice}")
    return found


def mse(rule: Rule, w: torch.Tensor) -> Found:
    """The clip ratio of least squared error per group, or the scale of least squared error where it has 8 bits.

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
    """The scales of least error (``[n, G]`` of a Found) among those of clip ratios in 1 - span .. 1."""
    best, wtype = rtn(rule, w), rule.weight
    if wtype.kind == "int" and wtype.bits == 1:
        return best  # the mean is the least squared error already
    least = error(best)
    if rule.stored in PER_OCTAVE:
        _search_neighbours(rule, best, least, error, span)
    else:
        _search_ratios(rule, w, best, least, error, span)
    return best


def _search_neighbours(rule: Rule, best: Found, least: torch.Tensor, error, span: float) -> None:
    """Scales of 8 bits are so few that all are tried: those that the range has, and those above, up to the double.

    Why above: a float8_e4m3fn may have been rounded down, and one with which the largest weight falls to a lower value
    of the type may suit the others better (of float4_e2m1 in groups of 16 it takes 7% off the squared error). From the
    double on, the values are some of those that there were. Why one below the range: it may have been rounded up.
    """
    start, octave = best.scales, PER_OCTAVE[rule.stored]
    for distance in range(octave - 1, math.floor(math.log2(1 - span) * octave) - 2, -1):
        found = Found(neighbours(start, rule.stored, distance), None, best.row_scales)
        now = error(found)
        better = now < least * _GAIN
        torch.where(better, now, least, out=least)
        best.replace(better, found)


def _search_ratios(rule: Rule, w: torch.Tensor, best: Found, least: torch.Tensor, error, span: float) -> None:
    """A coarse grid of clip ratios, then a finer one around the best."""
    step = span / _COARSE
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


def _squared_error(rule: Rule, w: torch.Tensor, found: Found) -> torch.Tensor:
    """The squared error ``[n, G]`` of w under stored scales, fp32; summed in units of the scale."""
    x = rule.positions(w, found)
    steps = found.steps
    lost = rule.values(x, w).sub_(x).square_().sum(-1) * steps.square()
    return torch.where(steps == 0, w.square().sum(-1), lost)


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
            unit = found.steps
            unit = torch.where(unit == 0, 1, unit).unsqueeze(-1)
            size = lost.abs().div_(unit)
            power = size.pow(_P)
            now = power.sum(-1).mul_(unit.squeeze(-1).pow(_P))
            if least is None:
                best, least = Found(found.scales, found.zeros, found.row_scales), now
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
    steps, zeros = found.steps, found.zeros
    if zeros is None:
        norm = values.square().sum(-1)
        steps = torch.where(norm == 0, steps, (values * target).sum(-1) / norm.clamp(min=1e-30))
        # Why: a refit scale may overflow or turn round in its type; such a group keeps what it had.
        scales = rule.round_steps(steps, nearest=True)
        usable = scales.isfinite() & (scales > 0) & (steps > 0)
        return Found(torch.where(usable, scales, found.scales), None, found.row_scales)
    if rule.zero_kind == "min":
        moved = (target - values * steps.unsqueeze(-1)).mean(-1)
    else:
        moved = (values - target / divisor(steps).unsqueeze(-1)).mean(-1)
    moved = rule.round_zeros(moved)
    return Found(found.scales, torch.where(moved.isfinite() & (steps != 0), moved, zeros))


METHODS: dict[str, Callable[[Rule, torch.Tensor], Found]] = {"rtn": rtn, "mse": mse, "hqq": hqq}
