"""The product with gradients: ``dX = dY @ W`` and ``dbias = sum(dY)``, with W as the kernels read it.

It has an op of its own because an autograd formula costs every call microseconds. With ``act="int8"`` the rounding of x
counts as the identity (a straight-through estimate): Bengio, Leonard, Courville, arXiv:1308.3432.
"""

from __future__ import annotations

import torch

from ..dtypes import WEIGHT_TYPES
from ..pack import PackedWeight
from ..pack.packed import has_kernels
from ..scheme import FACTORED_SCALES, OP_ZERO_KINDS, Scheme
from .canonical import rows_of
from .schema import _LIBRARY, FLOAT_IDS, type_name

#: Most bytes that the float rows of a weight take at a time.
_SCRATCH_BYTES = 64 << 20
_TILE_ROWS = 16


def float_rows(
    codes, scales, zeros, n, k, weight, group_size, zero_kind, codebook=None, row_scales=None, dtype=torch.float32
):
    """Yields ``(first row, rows [r, K] as floats)`` of a weight in the layout of its device, some rows at a time. On
    CUDA the next rows may take the memory of those before.
    """
    stored = type_name(scales.dtype) if row_scales is None else FACTORED_SCALES
    scheme = Scheme(WEIGHT_TYPES[weight], group_size, OP_ZERO_KINDS[zero_kind], stored)
    step = max(1, _SCRATCH_BYTES // (dtype.itemsize * k * _TILE_ROWS)) * _TILE_ROWS
    parts = [slice(first, min(first + step, n)) for first in range(0, n, step)]
    options = {"scheme": scheme, "codebook": codebook}
    if codes.dim() == 3:  # layout cpu
        for rows in parts:
            blocks = slice(rows.start // _TILE_ROWS, -(-rows.stop // _TILE_ROWS))
            part = [None if t is None else t[blocks] for t in (codes, scales, zeros)]
            factors = None if row_scales is None else row_scales[rows]
            options |= {"shape": (rows.stop - rows.start, k), "row_scales": factors}
            yield rows.start, PackedWeight(*part, None, layout="cpu", **options).dequantize(dtype)
    elif has_kernels(codes.device):
        numbers = (n, k, weight, group_size, zero_kind)
        memory = torch.empty(min(step, n), k, dtype=dtype, device=codes.device)
        for rows in parts:
            part = memory[: rows.stop - rows.start]
            torch.ops.lowbit.dequantize_out(codes, scales, zeros, *numbers, rows.start, part, codebook, row_scales)
            yield rows.start, part
    else:
        options |= {"shape": (n, k), "row_scales": row_scales}
        whole = PackedWeight(codes, scales, zeros, None, layout="nvidia", **options).unpack()
        for rows in parts:
            yield rows.start, rows_of(whole, rows).dequantize(dtype)


def _matmul_grad(
    x, codes, scales, zeros, bias, n, k, weight, group_size, zero_kind, act, codebook=None, row_scales=None
):
    out = x.new_empty((*x.shape[:-1], n))
    numbers = (n, k, weight, group_size, zero_kind)
    if has_kernels(codes.device):
        torch.ops.lowbit.matmul_out(x, codes, scales, zeros, bias, *numbers, act, out, codebook, row_scales)
        return out
    for first, rows in float_rows(codes, scales, zeros, *numbers, codebook, row_scales, x.dtype):
        part = slice(first, first + rows.shape[0])
        out[..., part] = torch.nn.functional.linear(x, rows, None if bias is None else bias[part].to(x.dtype))
    return out


def _matmul_grad_x(dy, codes, scales, zeros, n, k, weight, group_size, zero_kind, codebook=None, row_scales=None):
    dy_rows = dy.reshape(-1, n)
    dx = torch.zeros(dy_rows.shape[0], k, dtype=torch.float32, device=dy.device)
    # Why: sums are fp32 on either device; a GPU multiplies 16-bit numbers much faster.
    wide = dy.device.type == "cpu" or dy.dtype == torch.float32
    dtype = torch.float32 if wide else dy.dtype
    numbers = (n, k, weight, group_size, zero_kind)
    for first, rows in float_rows(codes, scales, zeros, *numbers, codebook, row_scales, dtype):
        part = dy_rows[:, first : first + rows.shape[0]]
        if wide:
            dx.addmm_(part.float(), rows)
        elif rows.shape[0] == n or not len(part):
            return (part @ rows).view(*dy.shape[:-1], k)
        else:
            dx += torch.mm(part, rows, out_dtype=torch.float32)
    return dx.to(dy.dtype).view(*dy.shape[:-1], k)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("matmul_grad", _matmul_grad, _device)
    _LIBRARY.impl("matmul_grad_x", _matmul_grad_x, _device)


def _save_product(ctx, inputs, output):
    x, codes, scales, zeros, bias, *scheme, _act, codebook, row_scales = inputs
    ctx.save_for_backward(codes, scales, zeros, codebook, row_scales)
    ctx.scheme = tuple(scheme)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _product_backward(ctx, dy):
    *weight, codebook, row_scales = ctx.saved_tensors
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.lowbit.matmul_grad_x(dy, *weight, *ctx.scheme, codebook, row_scales)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, None, None, None, dbias, *[None] * 8


def _save_gradient(ctx, inputs, output):
    dy, codes, scales, zeros, *scheme, codebook, row_scales = inputs
    ctx.save_for_backward(codes, scales, zeros, codebook, row_scales)
    ctx.scheme = tuple(scheme)


def _gradient_backward(ctx, ddx):
    # The gradient is linear in dy: the gradient of (dy -> dy @ W) is the product itself.
    *weight, codebook, row_scales = ctx.saved_tensors
    act = FLOAT_IDS[ddx.dtype]
    ddy = torch.ops.lowbit.matmul_grad(ddx.contiguous(), *weight, None, *ctx.scheme, act, codebook, row_scales)
    return ddy, *[None] * 10


torch.library.register_autograd("lowbit::matmul_grad", _product_backward, setup_context=_save_product, lib=_LIBRARY)
torch.library.register_autograd("lowbit::matmul_grad_x", _gradient_backward, setup_context=_save_gradient, lib=_LIBRARY)
