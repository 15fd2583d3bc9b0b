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
from .scale_rounding import as_stored

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
    default the weight's type, float16 for a float32 weight; also torch.float32, and for symmetric types
    torch.float8_e8m0fnu and torch.float8_e4m3fn: float4_e2m1 in groups of 32 with the first is shaped like MXFP4, in
    groups of 16 with the second like NVFP4. Methods with calibration data ("gptq", "awq"):
    :func:`lowbit.quantize_model`, or :func:`lowbit.quantizers.gptq` for one weight.

    The scales of rtn: int b >= 2: max(max w / (2^(b-1)-1), -min w / 2^(b-1)); int1: mean |w|, code = w >= 0; uint: the
    range, widened to hold 0, over 2^b-1, with zero = round(-min / s) kept in 0..2^b-1, or min itself; floats: max |w|
    over the type's largest value. A group of zeros, or one whose scale is too small for its type, has scale 0.
    Rounding is half to even; no code means -0.

    Scales of 8 bits, from these: float8_e8m0fnu takes the power of two at or above, so that nothing is clipped (of int1
    the nearest one), and has no 0: a group of zeros has 2^-127. OCP Microscaling Formats v1.0, section 6.3, rounds down
    instead: of float4_e2m1 a largest weight of 7 would be clipped to 6; "mse" tries that one too. float8_e4m3fn: each
    row has a factor, its largest scale / 448 (at least 2^-126; 1 for a row of zeros), and the rest is rounded to
    nearest, so that the largest weight of a group may be clipped by a sixteenth.

    Raises DtypeError, ShapeError or SchemeError for what cannot be asked, QuantizationError for NaN or infinity in the
    weight and for scales that overflow their type.
    """
    weight = checked_weight(weight)
    rule = Rule.make(weight, dtype, group_size, zero_kind, scale_dtype)
    find = data_free(method)
    expect_finite(weight)
    return assemble(rule, weight, lambda rule, w, columns: find(rule, w))


def data_free(method: str) -> Callable[[Rule, torch.Tensor], Found]:
    """The method called so. Raises SchemeError for one that does not exist or that needs calibration data."""
    if not isinstance(method, str):
        raise SchemeError(f"method must be the name of one, got {method!r}")
    if method in CALIBRATED:
        raise SchemeError(
            f"method {method!r} needs calibration data; use lowbit.quantize_model(model, ..., method={method!r}, "
            "calibration=token_ids)"
        )
    if method not in METHODS:
        known = (*METHODS, *CALIBRATED)
        raise SchemeError(f"no quantization method is called {method!r}; did you mean {nearest(method, known)}?")
    return METHODS[method]


def assemble(rule: Rule, weight: torch.Tensor, find: Callable[[Rule, torch.Tensor, slice], Found]) -> QuantTensor:
    """The QuantTensor of a weight whose scales ``find`` finds: given the rule for some rows, fp32 ``[n, G, g]`` of them
    and its columns of groups.

    Some rows at a time, so that temporaries stay small.
    """
    (n, k), bits, group_size = weight.shape, rule.weight.bits, rule.scheme.group_size
    groups, device = (n, rule.scheme.groups(k)), weight.device
    codes = torch.empty(n, stream_bytes(k, bits), dtype=torch.uint8, device=device)
    scales = torch.empty(groups, dtype=rule.stored, device=device)
    zeros = None if rule.zero_kind == "none" else torch.empty_like(scales)
    row_scales = torch.empty(n, 1, dtype=torch.float32, device=device) if rule.scheme.has_row_scales else None
    for rows in row_chunks(n, k, device):
        part, at = [], 0
        groups_of_rows = grouped(weight[rows].float(), group_size)
        here = rule.for_rows(groups_of_rows)
        for w in groups_of_rows:
            columns = slice(at, at + w.shape[1])
            at = columns.stop
            found = find(here, w, columns)
            part.append(rule.codes(rule.values(rule.positions(w, found), w)).flatten(1))
            scales[rows, columns] = as_stored(found.scales, rule.stored)
            if zeros is not None:
                zeros[rows, columns] = as_stored(found.zeros, rule.stored)
        codes[rows] = bit_stream.pack(torch.cat(part, dim=1), bits)
        if row_scales is not None:
            row_scales[rows] = here.row_scales
    options = {"dtype": rule.weight, "shape": (n, k), "group_size": group_size, "zero_kind": rule.zero_kind}
    return QuantTensor(codes, scales, zeros, row_scales=row_scales, **options)
