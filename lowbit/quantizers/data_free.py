"""From a float weight alone to a QuantTensor.

All methods choose codes against the scale as it is stored, rounded to its type, so what they minimize is what is read
back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import bit_stream
from ..bit_stream import row_chunks, stream_bytes
from ..dtypes import WeightType
from ..errors import SchemeError, nearest
from ..tensor import QuantTensor
from .methods import METHODS
from .rule import Found, Rule, checked_weight, expect_finite, grouped

#: Methods that quantize_model offers and that need calibration data.
CALIBRATED = ("gptq", "awq")


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
    smaller scales in every group and keeps one where the squared error falls; "hqq" lowers the sum of |error|^0.7
    instead (half-quadratic quantization), and makes zeros with a fraction. zero_kind: for uint types "zero" (the
    default, W = s*(v - zero)) or "min" (W = s*v + zero); int and float types are symmetric, "none". scale_dtype: by
    default the weight's type, float16 for a float32 weight. Methods with calibration data ("gptq", "awq"):
    :func:`lowbit.quantize_model`, or :func:`lowbit.quantizers.gptq` for one weight.

    The scales of rtn: int b >= 2: max(max w / (2^(b-1)-1), -min w / 2^(b-1)); int1: mean |w|, code = w >= 0; uint: the
    range, widened to hold 0, over 2^b-1, with zero = round(-min / s) kept in 0..2^b-1, or min itself; floats: max |w|
    over the type's largest value. A group of zeros, or one whose scale is too small for its type, has scale 0.
    Rounding is half to even; no code means -0.

    Raises DtypeError, ShapeError or SchemeError for what cannot be asked, QuantizationError for NaN or infinity in the
    weight and for scales that overflow their type.
    """
    weight = checked_weight(weight)
    rule = Rule.make(weight, dtype, group_size, zero_kind, scale_dtype)
    find = data_free(method)
    expect_finite(weight)
    return assemble(rule, weight, lambda w, columns: find(rule, w))


def data_free(method: str) -> Callable[[Rule, torch.Tensor], Found]:
    """The method called so. Raises SchemeError for one that does not exist or that needs calibration data."""
    if method in CALIBRATED:
        raise SchemeError(
            f"method {method!r} needs calibration data; use lowbit.quantize_model(model, ..., method={method!r}, "
            "calibration=token_ids)"
        )
    if method not in METHODS:
        known = (*METHODS, *CALIBRATED)
        raise SchemeError(f"no quantization method is called {method!r}; did you mean {nearest(method, known)}?")
    return METHODS[method]


def assemble(rule: Rule, weight: torch.Tensor, find: Callable[[torch.Tensor, slice], Found]) -> QuantTensor:
    """The QuantTensor of a weight whose scales ``find`` finds: given fp32 ``[n, G, g]`` and its columns of groups.

    Some rows at a time, so that temporaries stay small.
    """
    (n, k), bits, group_size = weight.shape, rule.weight.bits, rule.scheme.group_size
    groups = (n, rule.scheme.groups(k))
    codes = torch.empty(n, stream_bytes(k, bits), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(groups, dtype=rule.stored, device=weight.device)
    zeros = None if rule.zero_kind == "none" else torch.empty_like(scales)
    for rows in row_chunks(n, k, weight.device):
        part, at = [], 0
        for w in grouped(weight[rows].float(), group_size):
            columns = slice(at, at + w.shape[1])
            at = columns.stop
            found = find(w, columns)
            part.append(rule.codes(rule.values(rule.positions(w, found), w)).flatten(1))
            scales[rows, columns] = found.scales
            if zeros is not None:
                zeros[rows, columns] = found.zeros
        codes[rows] = bit_stream.pack(torch.cat(part, dim=1), bits)
    return QuantTensor(
        codes, scales, zeros, dtype=rule.weight, shape=(n, k), group_size=group_size, zero_kind=rule.zero_kind
    )
