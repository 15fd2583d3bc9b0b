"""GPTQ: codes chosen column by column, the error of each made good in the columns that are still to come."""

from __future__ import annotations

import torch

from ..dtypes import WeightType
from ..errors import QuantizationError, SchemeError
from ..tensor import QuantTensor
from .data_free import data_free
from .moments import checked_moments
from .rule import Found, Rule, checked_weight, expect_finite, grouped
from .scale_rounding import as_stored

_MOST_DAMPING = 1e4  # in units of the mean of the diagonal: beyond it nothing but rounding is left


def gptq(
    weight: torch.Tensor,
    moments: torch.Tensor,
    dtype: str | WeightType = "int4",
    *,
    group_size: int = 128,
    zero_kind: str | None = None,
    scale_dtype: torch.dtype | None = None,
    grid: str = "mse",
    damping: float = 0.01,
    act_order: bool = True,
    block: int = 128,
) -> QuantTensor:
    """Quantize a weight ``[N, K]`` so that its output on calibration data changes least.

    Source: Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
    Pre-trained Transformers" (2022), with its lazy updates of blocks of columns.

    moments: x^T x summed or averaged over tokens, float ``[K, K]``, on the weight's device (a factor does not matter).
    dtype, group_size, zero_kind, scale_dtype: as in :func:`lowbit.quantize`, every weight type. grid: the method that
    fixes the scales of all groups from the original weight, before any code is chosen. act_order: choose codes in the
    order of falling diagonal of the moments, equal ones from left to right. Since the groups are fixed, columns stay
    where they are and the result has no ``perm``. damping: added to the diagonal, in units of its mean; ten times more
    whenever the factorization fails. A column without moments is rounded to nearest and changes no other. block:
    columns between two updates of all that follow; speed only.

    Runs on the weight's device, the factorization in float64; about N*K*K + K*K*K operations, and K*K numbers of
    float64 three times. No random numbers. Raises as :func:`lowbit.quantize`, and ShapeError, DtypeError or
    QuantizationError for moments of another shape or type or that are not finite.
    """
    weight = checked_weight(weight)
    rule = Rule.make(weight, dtype, group_size, zero_kind, scale_dtype)
    find = data_free(grid)
    if not isinstance(block, int) or block < 1:
        raise SchemeError(f"block must be a whole number from 1, got {block!r}")
    if not damping > 0:
        raise SchemeError(f"damping must be above 0, got {damping!r}")
    expect_finite(weight)
    moments = checked_moments(moments, weight)

    w = weight.float()
    parts = grouped(w, group_size)
    rule = rule.for_rows(parts)
    parts = [find(rule, part) for part in parts]
    scales = torch.cat([part.scales for part in parts], dim=1)
    zeros = None if parts[0].zeros is None else torch.cat([part.zeros for part in parts], dim=1)
    found = Found(scales, zeros, rule.row_scales)
    order = torch.arange(w.shape[1], device=w.device)
    if act_order:
        order = moments.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(moments[order][:, order], damping)
    group = torch.zeros_like(order) if group_size == -1 else order // group_size
    values = _solve(rule, w[:, order], factor, found, group.tolist(), block)
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    codes[:, order] = rule.codes(values)
    scales, zeros = (None if t is None else as_stored(t, rule.stored) for t in (scales, zeros))
    options = {"dtype": rule.weight, "group_size": group_size, "zero_kind": rule.zero_kind}
    return QuantTensor.from_codes(codes, scales, zeros, row_scales=rule.row_scales, **options)


def _solve(rule: Rule, w: torch.Tensor, factor: torch.Tensor, found: Found, group: list[int], block: int):
    """The values, fp32 ``[N, K]``, chosen for the columns of w from left to right; w is overwritten."""
    n, k = w.shape
    values = torch.empty(k, n, device=w.device)
    for begin in range(0, k, block):
        end = min(begin + block, k)
        now = w[:, begin:end].T.contiguous()  # a column of w is a row here, which memory likes
        errors = torch.empty_like(now)
        for i, j in enumerate(range(begin, end)):
            g = slice(group[j], group[j] + 1)
            here = Found(found.scales[:, g], None if found.zeros is None else found.zeros[:, g], found.row_scales)
            column = now[i].view(n, 1, 1)
            chosen = rule.values(rule.positions(column, here), column)
            values[j] = chosen.view(n)
            errors[i] = (column - rule.read(chosen, here)).view(n) / factor[j, j]
            now[i + 1 :].addr_(factor[j, j + 1 : end], errors[i], alpha=-1)
        w[:, end:].addmm_(errors.T, factor[begin:end, end:], alpha=-1)
    return values.T.contiguous()


def inverse_factor(moments: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper triangular U, fp32 ``[K, K]``, with U^T U = (moments + damping)^-1.

    Raises QuantizationError when no damping makes the moments positive definite.
    """
    damped = moments.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    dead = diagonal == 0
    if bool(dead.any()):
        # Why: sums of squares are 0 only where every x is, so all of the row and column must be 0 too.
        damped[dead], damped[:, dead] = 0, 0
        diagonal[dead] = 1
    mean, added = float(moments.diagonal()[~dead].double().mean()) if not bool(dead.all()) else 1.0, 0.0
    while damping <= _MOST_DAMPING:
        diagonal += damping * mean - added
        added = damping * mean
        # Why flipped: with the columns reversed, the lower factor of H is the upper factor R of H = R R^T, and U = R^-1
        # is what GPTQ reads. No inverse of H is formed, which would lose twice the digits.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not int(failed):
            upper = lower.flip(0, 1)
            del lower
            # Why transposed: LAPACK then solves in place, in the order of memory that it reads.
            inverse = torch.eye(len(upper), dtype=torch.float64, device=upper.device).T
            torch.linalg.solve_triangular(upper, inverse, upper=True, out=inverse)
            del upper
            inverse = inverse.float()
            if bool(inverse.isfinite().all()) and bool((inverse.diagonal() > 0).all()):
                return inverse
        damping *= 10
    raise QuantizationError("moments must be a sum of x x^T, got a matrix that no damping makes positive definite")
