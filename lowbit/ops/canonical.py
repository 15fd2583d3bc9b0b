"""Products with a weight in canonical form, which no kernel reads: torch dequantizes it, some rows at a time."""

from __future__ import annotations

import torch

from ..tensor import QuantTensor
from .schema import check_bias, check_x


def product_by_rows(x: torch.Tensor, qt: QuantTensor, bias: torch.Tensor | None, scratch: int) -> torch.Tensor:
    """``x @ qt.dequantize().T + bias`` with torch operations, in x's type; gradients reach x and bias.

    x: ``[..., K]``; bias: ``[N]`` or None; scratch: most bytes of float rows at a time.
    Raises DtypeError, ShapeError or DeviceError.
    """
    n, k = qt.shape
    check_x(x, k, qt.device)
    if bias is not None:
        check_bias(bias, n, qt.device)
    step = max(1, scratch // (4 * k))
    parts = []
    for first in range(0, n, step):
        rows = slice(first, first + step)
        w = rows_of(qt, rows).dequantize(x.dtype)
        parts.append(torch.nn.functional.linear(x, w, None if bias is None else bias[rows].to(x.dtype)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def rows_of(qt: QuantTensor, rows: slice) -> QuantTensor:
    """Some rows of a weight, without a copy."""
    *held, row_scales = [None if t is None else t[rows] for t in (qt.codes, qt.scales, qt.zeros, qt.row_scales)]
    options = {"dtype": qt.dtype, "group_size": qt.group_size, "zero_kind": qt.zero_kind}
    shape = (held[0].shape[0], qt.shape[1])
    return QuantTensor(*held, shape=shape, perm=qt.perm, codebook=qt.codebook, row_scales=row_scales, **options)
