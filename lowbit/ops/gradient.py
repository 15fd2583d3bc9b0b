"""The product with gradients: ``dX = dY @ W`` and ``dbias = sum(dY)``, with W as the kernels read it.

It has an op of its own because an autograd formula costs every call microseconds. With ``act="int8"`` the rounding of x
counts as the identity (a straight-through estimate): Bengio, Leonard, Courville, arXiv:1308.3432.
"""

from __future__ import annotations

import torch

from ..dtypes import WEIGHT_TYPES
from ..pack import PackedWeight
from ..scheme import ZERO_KINDS, Scheme
from .schema import _LIBRARY, FLOAT_IDS, type_name

#: Most bytes that the float rows of a weight take at a time.
_SCRATCH_BYTES = 64 << 20
_TILE_ROWS = 16


def float_rows(codes, scales, zeros, n, k, weight, group_size, zero_kind, dtype=torch.float32):
    """Yields ``(first row, rows [r, K] as floats)`` of a weight in the CPU layout, some rows at a time."""
    scheme = Scheme(WEIGHT_TYPES[weight], group_size, ZERO_KINDS[zero_kind], type_name(scales.dtype))
    step = max(1, _SCRATCH_BYTES // (4 * k * _TILE_ROWS))
    for block in range(0, codes.shape[0], step):
        part = [None if t is None else t[block : block + step] for t in (codes, scales, zeros)]
        first = block * _TILE_ROWS
        shape = (min(step * _TILE_ROWS, n - first), k)
        yield first, PackedWeight(*part, None, scheme=scheme, shape=shape, layout="cpu").dequantize(dtype)


def _matmul_grad(x, codes, scales, zeros, bias, n, k, weight, group_size, zero_kind, act):
    out = x.new_empty((*x.shape[:-1], n))
    torch.ops.lowbit.matmul_out(x, codes, scales, zeros, bias, n, k, weight, group_size, zero_kind, act, out)
    return out


def _matmul_grad_x(dy, codes, scales, zeros, n, k, weight, group_size, zero_kind):
    dy_rows = dy.reshape(-1, n)
    dx = torch.zeros(dy_rows.shape[0], k, dtype=torch.float32, device=dy.device)
    for first, rows in float_rows(codes, scales, zeros, n, k, weight, group_size, zero_kind):
        dx.addmm_(dy_rows[:, first : first + rows.shape[0]].float(), rows)
    return dx.to(dy.dtype).view(*dy.shape[:-1], k)


_LIBRARY.impl("matmul_grad", _matmul_grad, "CPU")
_LIBRARY.impl("matmul_grad_x", _matmul_grad_x, "CPU")


def _save_product(ctx, inputs, output):
    x, codes, scales, zeros, bias, *scheme, _act = inputs
    ctx.save_for_backward(codes, scales, zeros)
    ctx.scheme = tuple(scheme)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _product_backward(ctx, dy):
    codes, scales, zeros = ctx.saved_tensors
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.lowbit.matmul_grad_x(dy, codes, scales, zeros, *ctx.scheme)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, None, None, None, dbias, None, None, None, None, None, None


def _save_gradient(ctx, inputs, output):
    dy, codes, scales, zeros, *scheme = inputs
    ctx.save_for_backward(codes, scales, zeros)
    ctx.scheme = tuple(scheme)


def _gradient_backward(ctx, ddx):
    # The gradient is linear in dy: the gradient of (dy -> dy @ W) is the product itself.
    codes, scales, zeros = ctx.saved_tensors
    act = FLOAT_IDS[ddx.dtype]
    ddy = torch.ops.lowbit.matmul_grad(ddx.contiguous(), codes, scales, zeros, None, *ctx.scheme, act)
    return ddy, None, None, None, None, None, None, None, None


torch.library.register_autograd("lowbit::matmul_grad", _product_backward, setup_context=_save_product, lib=_LIBRARY)
torch.library.register_autograd("lowbit::matmul_grad_x", _gradient_backward, setup_context=_save_gradient, lib=_LIBRARY)
