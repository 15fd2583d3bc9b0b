"""From a float weight to a QuantTensor: the methods ``rtn`` (round to nearest) and ``mse`` (clip where it pays).

Both choose codes against the scale as it is stored, rounded to its type, so what they minimize is what is read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .dtypes import WeightType
from .errors import DeviceError, DtypeError, QuantizationError, SchemeError, ShapeError, nearest
from .scheme import SCALE_TYPES, Scheme
from .tensor import QuantTensor, row_chunks, stream_bytes

_SCALE_OF_WEIGHT = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float16"}
_COARSE = 12  # clip ratios tried at equal distances between 1 and the lowest that can pay
_FINE = (-2 / 3, -1 / 3, 1 / 3, 2 / 3)  # then these, in coarse steps around the best
# Why: a gain below this could be rounding of the fp32 sums; then the unclipped scale stays.
_GAIN = 1 - 1e-4


def quantize(
    weight: torch.Tensor,
    dtype: str | WeightType = "int4",
    *,
    group_size: int = 128,
    method: str = "mse",
    zero_kind: str | None = None,
    scale_dtype: torch.dtype | None = None,
) -> QuantTensor:
    """Quantize a weight ``[N, K]`` of float16, bfloat16 or float32, on any device; the result lies on the same device.

    dtype: the weight type or its name. group_size: 16, 32, 64, 128, 256, or -1 for the whole row; the last group of a
    row may be short. method: "rtn" rounds to nearest with the scale that reaches the largest weight; "mse" also tries
    smaller scales in every group and keeps one where the squared error falls. zero_kind: for uint types "zero" (the
    default, W = s*(v - zero)) or "min" (W = s*v + zero); int and float types are symmetric, "none". scale_dtype: by
    default the weight's type, float16 for a float32 weight.

    The scales of rtn: int b >= 2: max(max w / (2^(b-1)-1), -min w / 2^(b-1)); int1: mean |w|, code = w >= 0; uint: the
    range, widened to hold 0, over 2^b-1, with zero = round(-min / s) kept in 0..2^b-1, or min itself; floats: max |w|
    over the type's largest value. A group of zeros, or one whose scale is too small for its type, has scale 0.
    Rounding is half to even; no code means -0.

    Raises DtypeError, ShapeError or SchemeError for what cannot be asked, QuantizationError for NaN or infinity in the
    weight and for scales that overflow their type.
    """
    weight = _checked_weight(weight)
    if scale_dtype is None:
        scale_type = _SCALE_OF_WEIGHT[weight.dtype]
    elif isinstance(scale_dtype, torch.dtype):
        scale_type = str(scale_dtype).removeprefix("torch.")
    else:
        raise DtypeError(f"scale_dtype must be a torch.dtype ({', '.join(SCALE_TYPES)}), got {scale_dtype!r}")
    rule = _Rule(Scheme.make(dtype, group_size, zero_kind, scale_type))
    if method not in METHODS:
        raise SchemeError(f"no quantization method is called {method!r}; did you mean {nearest(method, METHODS)}?")
    bad = weight.numel() - int(weight.isfinite().count_nonzero())
    if bad:
        raise QuantizationError(f"a weight must be finite, {bad} of {weight.numel()} values are NaN or infinite")

    (n, k), bits = weight.shape, rule.weight.bits
    groups = (n, rule.scheme.groups(k))
    codes = torch.empty(n, stream_bytes(k, bits), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(groups, dtype=rule.stored, device=weight.device)
    zeros = None if rule.zero_kind == "none" else torch.empty_like(scales)
    for rows in row_chunks(n, k, weight.device):
        part, at = [], 0
        for w in _grouped(weight[rows].float(), group_size):
            found = METHODS[method](rule, w)
            part.append(rule.codes(rule.values(rule.positions(w, found), w)).flatten(1))
            columns = slice(at, at + w.shape[1])
            at = columns.stop
            scales[rows, columns] = found.scales
            if zeros is not None:
                zeros[rows, columns] = found.zeros
        codes[rows] = QuantTensor.pack_codes(torch.cat(part, dim=1), bits)
    return QuantTensor(
        codes, scales, zeros, dtype=rule.weight, shape=(n, k), group_size=group_size, zero_kind=rule.zero_kind
    )


@dataclass
class _Found:
    """Scales and zeros ``[n, G]`` as stored (zeros None when there are none)."""

    scales: torch.Tensor
    zeros: torch.Tensor | None


class _Rule:
    """The scale rule and the rounding of one scheme. Weights come as fp32 ``[n, G, g]``: n rows of G groups of g."""

    def __init__(self, scheme: Scheme):
        self.scheme, self.weight, self.zero_kind = scheme, scheme.weight, scheme.zero_kind
        self.stored = getattr(torch, scheme.scale_type)
        if (self.weight.kind == "uint") == (self.zero_kind == "none"):
            wanted = "'zero' or 'min'" if self.weight.kind == "uint" else "'none'"
            raise SchemeError(f"{self.weight} is quantized with zero_kind {wanted}, got {self.zero_kind!r}")

    def scales(self, w: torch.Tensor, ratio: float | torch.Tensor = 1.0) -> _Found:
        """The stored scales for the range of w, shrunk by ratio (a number or ``[n, G]``)."""
        wtype, zeros = self.weight, None
        # Why a tensor: on CUDA a division by a number is a product with its reciprocal, which rounds twice.
        top = w.new_tensor(wtype.max_value)
        if wtype.kind == "int" and wtype.bits == 1:
            # Why float64: the sum of a long row, rounded in fp32, could move the mean to a neighbour.
            scales = w.abs().mean(-1, dtype=torch.float64).float()
        elif wtype.kind == "int":
            scales = torch.maximum(w.amax(-1) * ratio / top, w.amin(-1) * ratio / -(top + 1))
        elif wtype.kind == "float":
            scales = w.abs().amax(-1) * ratio / top
        else:
            low = w.amin(-1).clamp(max=0) * ratio
            scales = (w.amax(-1).clamp(min=0) * ratio - low) / top
        scales = scales.to(self.stored)
        if wtype.kind == "uint":
            zeros = low if self.zero_kind == "min" else (-low / _divisor(scales)).round_().clamp_(0, wtype.max_value)
            # Why: with scale 0 the whole group is read as its zero, which then has to be 0 like the weights.
            zeros = torch.where(scales == 0, 0, zeros).to(self.stored)
        return _Found(scales, zeros)

    def positions(self, w: torch.Tensor, found: _Found) -> torch.Tensor:
        """Where w lies on the axis of the type's values, before rounding: fp32 like w."""
        divisor = _divisor(found.scales).unsqueeze(-1)
        if found.zeros is None:
            return w / divisor
        zeros = found.zeros.float().unsqueeze(-1)
        return (w - zeros) / divisor if self.zero_kind == "min" else (w / divisor).add_(zeros)

    def values(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The values of the type next to positions x, fp32; ties go to the even code, beyond the ends to the end."""
        wtype, top = self.weight, self.weight.max_value
        if wtype.kind == "uint":
            return x.round().clamp_(0, top)
        if wtype.kind == "int":
            return (w >= 0).to(w.dtype).mul_(2).sub_(1) if wtype.bits == 1 else x.round().clamp_(-top - 1, top)
        x = x.clamp(-top, top)
        # The distance of neighbouring values is the power of two at or below |x|, not under the smallest normal one,
        # over 2^mantissa: keep only the exponent bits of the fp32 number.
        power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
        smallest = 2.0 ** (2 - (1 << (wtype.exponent - 1)))
        step = power.clamp_(min=smallest).mul_(2.0**-wtype.mantissa)
        return x.div_(step).round_().mul_(step)

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """The uint8 codes of values of the type."""
        wtype = self.weight
        if wtype.kind == "uint":
            return values.to(torch.uint8)
        if wtype.kind == "int":
            return (values > 0).to(torch.uint8) if wtype.bits == 1 else (values + (wtype.max_value + 1)).to(torch.uint8)
        half = 1 << (wtype.bits - 1)
        positive = [v for code, v in enumerate(wtype.values[:half]) if code not in wtype.invalid_codes]
        table = torch.tensor(positive, dtype=torch.float32, device=values.device)
        codes = torch.bucketize(values.abs(), table, out_int32=True)
        return (codes + half * (values < 0)).to(torch.uint8)


def _rtn(rule: _Rule, w: torch.Tensor) -> _Found:
    found = rule.scales(w)
    for what, stored in (("scales", found.scales), ("zeros", found.zeros)):
        bad = 0 if stored is None else stored.numel() - int(stored.isfinite().count_nonzero())
        if bad:
            name, top = rule.scheme.scale_type, w.abs().max().item()
            raise QuantizationError(
                f"{bad} {what} overflow {name} (largest weight {top:.3g}); pass a wider scale_dtype, torch.float32"
            )
    return found


def _mse(rule: _Rule, w: torch.Tensor) -> _Found:
    """The clip ratio of least squared error per group: a coarse grid, then a finer one around its best.

    The grid ends where clipping cannot pay: rounding costs at most g * s^2 / 4, clipping the largest weight alone
    ((1 - ratio) * max|w|)^2.
    """
    best, wtype = _rtn(rule, w), rule.weight
    if wtype.kind == "int" and wtype.bits == 1:
        return best  # the mean is the least squared error already
    levels = {"int": wtype.max_value, "uint": wtype.max_value / 2, "float": 2.0**wtype.mantissa}[wtype.kind]
    step = min(0.8, math.sqrt(w.shape[-1]) / (2 * levels)) / _COARSE
    least = _squared_error(rule, w, best)
    ratio = torch.ones_like(least)

    def attempt(candidate) -> None:
        found = rule.scales(w, candidate)
        error = _squared_error(rule, w, found)
        better = error < least * _GAIN
        torch.where(better, error, least, out=least)
        torch.where(better, torch.as_tensor(candidate, dtype=ratio.dtype, device=ratio.device), ratio, out=ratio)
        best.scales = torch.where(better, found.scales, best.scales)
        if best.zeros is not None:
            best.zeros = torch.where(better, found.zeros, best.zeros)

    for i in range(1, _COARSE + 1):
        attempt(1 - i * step)
    centre = ratio.clone()
    for distance in _FINE:
        attempt((centre + distance * step).clamp_(max=1))
    return best


def _squared_error(rule: _Rule, w: torch.Tensor, found: _Found) -> torch.Tensor:
    """The squared error ``[n, G]`` of w under stored scales, fp32; summed in units of the scale."""
    x = rule.positions(w, found)
    lost = rule.values(x, w).sub_(x).square_().sum(-1) * found.scales.float().square()
    return torch.where(found.scales == 0, w.square().sum(-1), lost)


METHODS: dict[str, Callable[[_Rule, torch.Tensor], _Found]] = {"rtn": _rtn, "mse": _mse}


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Scales to divide by, fp32: a scale of 0 becomes infinity, so that everything lies at position 0."""
    return torch.where(scales == 0, torch.inf, scales.float())


def _grouped(w: torch.Tensor, group_size: int) -> list[torch.Tensor]:
    """Rows ``[n, K]`` as ``[n, G, g]``, and the short last group, if there is one, as ``[n, 1, rest]``."""
    k = w.shape[1]
    size = k if group_size == -1 else min(group_size, k)
    whole = k // size * size
    parts = [w[:, :whole].contiguous().view(len(w), -1, size)]
    if whole < k:
        parts.append(w[:, whole:].contiguous().unsqueeze(1))
    return parts


def _checked_weight(weight) -> torch.Tensor:
    if not isinstance(weight, torch.Tensor):
        raise DtypeError(f"weight must be a torch.Tensor, got {type(weight).__name__}")
    if weight.dtype not in _SCALE_OF_WEIGHT or weight.layout != torch.strided:
        got = str(weight.dtype) if weight.layout == torch.strided else str(weight.layout)
        got = got.removeprefix("torch.")
        raise DtypeError(f"weight must be a dense float16, bfloat16 or float32 tensor, got {got}")
    if weight.dim() != 2 or weight.numel() == 0:
        raise ShapeError(f"weight must have shape [N, K] with N and K at least 1, got {tuple(weight.shape)}")
    if weight.is_meta:
        raise DeviceError("weight must hold data, got a tensor on the meta device; load it first")
    return weight.detach()
