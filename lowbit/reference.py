"""What every number of lowbit should be: slow, obvious, and sharing no code with the fast paths.

Bits are read one by one, values follow from the definition of the type, products are sums in float64 (numpy, on the
host). Only the fields of a QuantTensor are used, none of its methods.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .dtypes import WeightType, weight_type
from .errors import SchemeError, ShapeError


def read_codes(stream: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """Codes uint8 ``[N, k]`` of a bit stream uint8 ``[N, ceil(k*bits/8)]``: code j is bits j*bits .. (j+1)*bits-1."""
    rows = np.unpackbits(stream.cpu().numpy(), axis=1, bitorder="little")
    codes = np.zeros((rows.shape[0], k), dtype=np.uint8)
    for j in range(k):
        for i in range(bits):
            codes[:, j] += rows[:, j * bits + i] << i
    return torch.from_numpy(codes)


def decode(codes: torch.Tensor, dtype: WeightType | str) -> torch.Tensor:
    """The values, float64, of codes (any shape, one a byte), from the definition of the type."""
    wtype = weight_type(dtype)
    table = np.array([_value(code, wtype) for code in range(2**wtype.bits)], dtype=np.float64)
    return torch.from_numpy(table[codes.cpu().numpy()])


def _value(code: int, wtype: WeightType) -> float:
    if wtype.kind == "uint":
        return float(code)
    if wtype.kind == "int":
        return float(2 * code - 1) if wtype.bits == 1 else float(code - 2 ** (wtype.bits - 1))
    # A float: its bits from the top are the sign, the exponent, the mantissa.
    text = format(code, f"0{wtype.bits}b")
    sign = -1.0 if text[0] == "1" else 1.0
    exponent, mantissa = int(text[1 : 1 + wtype.exponent], 2), int(text[1 + wtype.exponent :], 2)
    if wtype.name == "float8_e4m3" and text[1:] == "1111111":
        return math.nan
    if wtype.name == "float8_e5m2" and text[1:6] == "11111":
        return math.nan if mantissa else sign * math.inf
    bias = 2 ** (wtype.exponent - 1) - 1
    fraction = mantissa / 2**wtype.mantissa
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias)
    return sign * math.ldexp(1 + fraction, exponent - bias)


def read_scales(qt) -> np.ndarray:
    """The scales ``[N, G]`` of a QuantTensor in float64, the factors of its rows included."""
    scales = qt.scales.cpu()
    if scales.dtype == torch.float8_e8m0fnu:  # a byte e means 2^(e - 127), 255 NaN (OCP microscaling formats, v1.0)
        exponents = scales.view(torch.uint8).numpy().astype(np.float64) - 127
        values = np.where(exponents == 128, np.nan, np.exp2(exponents))
    elif scales.dtype == torch.float8_e4m3fn:
        values = decode(scales.view(torch.uint8), "float8_e4m3").numpy()
    else:
        values = scales.double().numpy()
    return values if qt.row_scales is None else values * qt.row_scales.cpu().double().numpy()


def dequantize(qt, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The weight ``[N, K]`` of a QuantTensor, computed in float64 on the host and rounded once to dtype."""
    n, k = qt.shape
    codes = read_codes(qt.codes, qt.dtype.bits, k)
    if qt.codebook is None:
        values = decode(codes, qt.dtype).numpy()
    else:
        values = qt.codebook.cpu().double().numpy()[codes.numpy()]
    scales = read_scales(qt)
    zeros = None if qt.zeros is None else qt.zeros.cpu().double().numpy()
    size = k if qt.group_size == -1 else qt.group_size
    stored = np.empty((n, k), dtype=np.float64)
    for j in range(k):
        group = j // size
        if qt.zero_kind == "none":
            stored[:, j] = scales[:, group] * values[:, j]
        elif qt.zero_kind == "zero":
            stored[:, j] = scales[:, group] * (values[:, j] - zeros[:, group])
        else:
            stored[:, j] = scales[:, group] * values[:, j] + zeros[:, group]
    weight = stored
    if qt.perm is not None:
        weight = np.empty_like(stored)
        for j, column in enumerate(qt.perm.tolist()):
            weight[:, column] = stored[:, j]
    return torch.from_numpy(weight).to(dtype)


def matmul(x: torch.Tensor, qt, bias=None, act: str | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``x @ W.T + bias`` for x ``[..., K]``, bias ``[N]`` or None: ``[..., N]``, in float64, rounded once to dtype.

    act: None multiplies x as it is. "int8" first quantizes each token (row of x) in fp32: s = max |x| / 127, then
    round-half-even(x / s) kept in -127..127 (all 0 where s is 0), and the product is s times that of the integers.
    """
    if x.shape[-1] != qt.shape[1]:
        raise ShapeError(f"x must have {qt.shape[1]} columns, got shape {tuple(x.shape)}")
    rows = x.detach().cpu().reshape(-1, x.shape[-1])
    factor = np.ones((rows.shape[0], 1))
    if act is None:
        rows = rows.double().numpy()
    elif act == "int8":
        rows, scale = quantize_rows(rows)
        factor = scale.astype(np.float64)
    else:
        raise SchemeError(f"act must be None or 'int8', got {act!r}")
    y = factor * (rows.astype(np.float64) @ dequantize(qt).numpy().T)
    if bias is not None:
        y = y + bias.detach().cpu().double().numpy()
    return torch.from_numpy(y).to(dtype).reshape(*x.shape[:-1], qt.shape[0])


def quantize_rows(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """int8 quantization of each row of x ``[M, K]``: whole numbers ``[M, K]`` in -127..127, fp32 scales ``[M, 1]``."""
    x = x.detach().cpu().float().numpy()
    numbers, scales = np.zeros(x.shape, dtype=np.float32), np.zeros((len(x), 1), dtype=np.float32)
    for m, row in enumerate(x):
        scale = np.abs(row).max(initial=0) / np.float32(127)
        if scale > 0:
            numbers[m] = np.clip(np.round(row / scale), -127, 127)
        scales[m] = scale
    return numbers, scales
