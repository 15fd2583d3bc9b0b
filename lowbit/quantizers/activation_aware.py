"""AWQ: scales of input channels that protect what large activations meet, and clipping judged by the output.

Source: Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan and Han, "AWQ: Activation-aware Weight Quantization for LLM
Compression and Acceleration" (2023). Both searches read second moments in place of stored tokens: they give the same
mean squared change of a layer's output in less memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dtypes import WeightType
from ..errors import QuantizationError, SchemeError, ShapeError
from ..tensor import QuantTensor
from .data_free import assemble, quantize
from .methods import clip_span, rtn, search_clip
from .moments import checked_moments, output_error
from .rule import Found, Rule, checked_weight, expect_finite

_LEAST = 1e-4  # the smallest mean |x| that a scale is made from, in units of the largest
_SPAN = 0.5  # clip ratios down to half, as in the paper's code, or lower where few bits can gain by it


def awq_scales(
    weights: torch.Tensor | Sequence[torch.Tensor],
    mean_abs: torch.Tensor,
    moments: torch.Tensor,
    dtype: str | WeightType | Sequence[str | WeightType] = "int4",
    *,
    group_size: int | Sequence[int] = 128,
    zero_kind: str | None | Sequence[str | None] = None,
    steps: int = 20,
) -> torch.Tensor:
    """The scale of each input channel, fp32 ``[K]``, for weights ``[N, K]`` that read the same x.

    mean_abs: the mean of |x| over tokens, ``[K]``; moments: the second moments of x, ``[K, K]``. dtype, group_size and
    zero_kind hold for all weights, or are lists with one entry for each. Tried are s = mean_abs^a for ``steps`` values
    of a in 0 .. 1, brought to sqrt(max s * min s) = 1; chosen is the one with the least sum of output errors when
    ``W * s`` is rounded to nearest. a = 0, so s = 1 everywhere, is among them: the result is never worse by this
    measure than no scales.

    What the caller does with it: quantize ``W * s`` (columns times s) in place of W, and divide x by s, most simply by
    dividing the gains of the norm before, or the rows of the linear layer before, by s. Raises as
    :func:`lowbit.quantize` does, and ShapeError or QuantizationError for data that do not fit.
    """
    weights = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    if not weights:
        raise ShapeError("weights must hold at least one weight [N, K], got none")
    if not isinstance(steps, int) or steps < 1:
        raise SchemeError(f"steps must be a whole number from 1, got {steps!r}")
    options = _each(len(weights), dtype=dtype, group_size=group_size, zero_kind=zero_kind)
    weights = [checked_weight(weight) for weight in weights]
    for weight in weights:
        expect_finite(weight)
        moments = checked_moments(moments, weight)
    k = weights[0].shape[1]
    if tuple(mean_abs.shape) != (k,):
        raise ShapeError(f"mean_abs must have shape ({k},), got {tuple(mean_abs.shape)}")
    if not bool(mean_abs.isfinite().all()) or bool((mean_abs < 0).any()):
        raise QuantizationError("mean_abs must be finite and not negative, got NaN, infinity or a number below 0")
    size = mean_abs.to(weights[0].device, torch.float32)
    top = float(size.max())
    size = (size / top).clamp_(min=_LEAST) if top > 0 else torch.ones_like(size)

    best = torch.ones_like(size)
    least = None
    for step in range(steps):
        s = size.pow(step / steps)
        s = s / (s.max() * s.min()).sqrt()
        error = 0.0
        for weight, option in zip(weights, options):
            scaled = weight.float() * s
            read = quantize(scaled, method="rtn", scale_dtype=torch.float32, **option).dequantize() / s
            error += float(output_error(read - weight.float(), moments))
        if least is None or error < least:
            best, least = s, error
    return best


def _each(count: int, **options) -> list[dict]:
    """One dict of options a weight, from options for all or lists of them."""
    lists = {}
    for name, value in options.items():
        lists[name] = list(value) if isinstance(value, list | tuple) else [value] * count
        if len(lists[name]) != count:
            raise ShapeError(f"{name} must have one entry for each of {count} weights, got {len(lists[name])}")
    return [{name: value[i] for name, value in lists.items()} for i in range(count)]


def clip(
    weight: torch.Tensor,
    moments: torch.Tensor,
    dtype: str | WeightType = "int4",
    *,
    group_size: int = 128,
    zero_kind: str | None = None,
    scale_dtype: torch.dtype | None = None,
) -> QuantTensor:
    """Quantize a weight ``[N, K]`` with the range of every group clipped where the output gains by it.

    moments: second moments of x, ``[K, K]``; of them only the blocks of one group are read. The error of a group is
    d M d^T, its change d of the weight against its block M: the mean squared change that the group alone makes to the
    output. It is never larger than without clipping (method "rtn"), but sums of groups may hide or add to each other.
    Other options and errors: :func:`lowbit.quantize` and :func:`lowbit.quantizers.gptq`.
    """
    weight = checked_weight(weight)
    rule = Rule.make(weight, dtype, group_size, zero_kind, scale_dtype)
    expect_finite(weight)
    moments = checked_moments(moments, weight)
    k = weight.shape[1]
    size = k if group_size == -1 else group_size

    def find(rule: Rule, w: torch.Tensor, columns: slice) -> Found:
        if rule.weight.name == "int1":
            return rtn(rule, w)
        # [G, g, g]: the blocks of these groups; the short last group comes alone.
        starts = [g * size for g in range(columns.start, columns.stop)]
        blocks = torch.stack([moments[a : a + w.shape[-1], a : a + w.shape[-1]] for a in starts])

        def error(found: Found) -> torch.Tensor:
            lost = rule.error(w, found).transpose(0, 1)
            return (torch.bmm(lost, blocks) * lost).sum(-1).T.clamp_(min=0)

        return search_clip(rule, w, error, max(_SPAN, clip_span(rule, w.shape[-1])))

    return assemble(rule, weight, find)
