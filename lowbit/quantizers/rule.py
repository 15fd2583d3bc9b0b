"""The scale rule and the rounding of one scheme: what every method chooses its codes with."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from ..errors import DeviceError, DtypeError, QuantizationError, SchemeError, ShapeError
from ..scheme import SCALE_TYPES, Scheme
from .scale_rounding import MOST_E4M3, rounded

_SCALE_OF_WEIGHT = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float16"}


@dataclass
class Found:
    """Scales and zeros fp32 ``[n, G]``, values of the type that stores them (zeros None when there are none).

    row_scales: the factors ``[n, 1]`` of the scales, or None.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    row_scales: torch.Tensor | None = None

    @property
    def steps(self) -> torch.Tensor:
        """What a value of the type is multiplied by, fp32 ``[n, G]``."""
        return self.scales if self.row_scales is None else self.scales * self.row_scales

    def replace(self, where: torch.Tensor, other: Found) -> None:
        """Take the groups of other where ``where``, bool ``[n, G]``, is true."""
        self.scales = torch.where(where, other.scales, self.scales)
        if self.zeros is not None:
            self.zeros = torch.where(where, other.zeros, self.zeros)


class Rule:
    """The scale rule and the rounding of one scheme. Weights come as fp32 ``[n, G, g]``: n rows of G groups of g.

    Where scales have a factor for each row, only the rule that :meth:`for_rows` gives knows the scales of these rows.
    """

    #: The factors of the rows at hand, fp32 ``[n, 1]``.
    row_scales: torch.Tensor | None = None

    def __init__(self, scheme: Scheme):
        self.scheme, self.weight, self.zero_kind = scheme, scheme.weight, scheme.zero_kind
        self.stored = getattr(torch, scheme.scale_type)
        if (self.weight.kind == "uint") == (self.zero_kind == "none"):
            wanted = "'zero' or 'min'" if self.weight.kind == "uint" else "'none'"
            raise SchemeError(f"{self.weight} is quantized with zero_kind {wanted}, got {self.zero_kind!r}")

    @classmethod
    def make(cls, weight: torch.Tensor, dtype, group_size: int, zero_kind: str | None, scale_dtype) -> Rule:
        """The rule for a weight: the scale type is the weight's, float16 for float32, unless scale_dtype names one."""
        if scale_dtype is None:
            scale_type = _SCALE_OF_WEIGHT[weight.dtype]
        elif isinstance(scale_dtype, torch.dtype):
            scale_type = str(scale_dtype).removeprefix("torch.")
        else:
            raise DtypeError(f"scale_dtype must be a torch.dtype ({', '.join(SCALE_TYPES)}), got {scale_dtype!r}")
        return cls(Scheme.make(dtype, group_size, zero_kind, scale_type))

    def for_rows(self, parts: list[torch.Tensor]) -> Rule:
        """The rule for some rows, of which these are all the groups (:func:`grouped`)."""
        if not self.scheme.has_row_scales:
            return self
        largest = torch.cat([self._exact(w) for w in parts], dim=1).amax(1, keepdim=True)
        made = copy.copy(self)
        # Why not below the smallest normal number: the factor would lose digits, as would all that it multiplies.
        made.row_scales = (largest / largest.new_tensor(MOST_E4M3)).clamp_(min=torch.finfo(torch.float32).tiny)
        made.row_scales[largest == 0] = 1
        return made

    def _exact(self, w: torch.Tensor, ratio: float | torch.Tensor = 1.0) -> torch.Tensor:
        """The scale of each group before it is rounded, fp32 ``[n, G]``."""
        wtype = self.weight
        # Why a tensor: on CUDA a division by a number is a product with its reciprocal, which rounds twice.
        top = w.new_tensor(wtype.max_value)
        if wtype.kind == "int" and wtype.bits == 1:
            # Why float64: the sum of a long row, rounded in fp32, could move the mean to a neighbour.
            return w.abs().mean(-1, dtype=torch.float64).float()
        if wtype.kind == "int":
            return torch.maximum(w.amax(-1) * ratio / top, w.amin(-1) * ratio / -(top + 1))
        if wtype.kind == "float":
            return w.abs().amax(-1) * ratio / top
        return (w.amax(-1).clamp(min=0) * ratio - w.amin(-1).clamp(max=0) * ratio) / top

    def scales(self, w: torch.Tensor, ratio: float | torch.Tensor = 1.0) -> Found:
        """The stored scales for the range of w, shrunk by ratio (a number or ``[n, G]``)."""
        wtype, zeros = self.weight, None
        # The mean of int1 reaches no largest weight: the scale nearest to it is the best one.
        scales = self.round_steps(self._exact(w, ratio), nearest=wtype.name == "int1")
        if wtype.kind == "uint":
            low = w.amin(-1).clamp(max=0) * ratio
            zeros = low if self.zero_kind == "min" else (-low / divisor(scales)).round_().clamp_(0, wtype.max_value)
            # Why: with scale 0 the whole group is read as its zero, which then has to be 0 like the weights.
            zeros = self.round_zeros(torch.where(scales == 0, 0, zeros))
        return Found(scales, zeros, self.row_scales)

    def round_steps(self, steps: torch.Tensor, nearest: bool = False) -> torch.Tensor:
        """The scales to store, fp32, for steps ``[n, G]``: without the factor of the row, rounded to their type."""
        return rounded(steps if self.row_scales is None else steps / self.row_scales, self.stored, nearest)

    def round_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        """Zeros as they are stored, fp32."""
        return rounded(zeros, self.stored)

    def positions(self, w: torch.Tensor, found: Found) -> torch.Tensor:
        """Where w lies on the axis of the type's values, before rounding: fp32 like w."""
        divide_by = divisor(found.steps).unsqueeze(-1)
        if found.zeros is None:
            return w / divide_by
        zeros = found.zeros.unsqueeze(-1)
        return (w - zeros) / divide_by if self.zero_kind == "min" else (w / divide_by).add_(zeros)

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

    def read(self, values: torch.Tensor, found: Found) -> torch.Tensor:
        """The weights, fp32 ``[n, G, g]``, that values of the type stand for."""
        steps = found.steps.unsqueeze(-1)
        if found.zeros is None:
            return values * steps
        zeros = found.zeros.unsqueeze(-1)
        return values * steps + zeros if self.zero_kind == "min" else (values - zeros) * steps

    def error(self, w: torch.Tensor, found: Found) -> torch.Tensor:
        """What rounding with stored scales changes, fp32 ``[n, G, g]``: the weight as read back, less w."""
        return self.read(self.values(self.positions(w, found), w), found).sub_(w)

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


def divisor(steps: torch.Tensor) -> torch.Tensor:
    """Steps to divide by, fp32: one of 0 becomes infinity, so that everything lies at position 0."""
    return torch.where(steps == 0, torch.inf, steps)


def grouped(w: torch.Tensor, group_size: int) -> list[torch.Tensor]:
    """Rows ``[n, K]`` as ``[n, G, g]``, and the short last group, if there is one, as ``[n, 1, rest]``."""
    k = w.shape[1]
    size = k if group_size == -1 else min(group_size, k)
    whole = k // size * size
    parts = [w[:, :whole].contiguous().view(len(w), -1, size)]
    if whole < k:
        parts.append(w[:, whole:].contiguous().unsqueeze(1))
    return parts


def checked_weight(weight) -> torch.Tensor:
    """The weight, detached. Raises DtypeError, ShapeError, DeviceError, or QuantizationError for NaN and infinity."""
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


def expect_finite(weight: torch.Tensor) -> None:
    """Raises QuantizationError for NaN or infinity."""
    bad = weight.numel() - int(weight.isfinite().count_nonzero())
    if bad:
        raise QuantizationError(f"a weight must be finite, {bad} of {weight.numel()} values are NaN or infinite")
