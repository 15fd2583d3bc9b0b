"""The public product :func:`matmul`: judges its arguments, makes the output, calls one op."""

from __future__ import annotations

import warnings

import torch

from .. import extension
from ..errors import DeviceError, DtypeError, SchemeError, ShapeError
from ..pack import PackedWeight
from ..tensor import QuantTensor
from .schema import FLOAT_IDS, QUANTIZED_IDS, check_act, check_bias, check_x, type_name

extension.load()
# Why: looking an op up through torch.ops costs as much as calling it.
_matmul_out = torch.ops.lowbit.matmul_out.default
_matmul_grad = torch.ops.lowbit.matmul_grad.default
_FLOAT32 = FLOAT_IDS[torch.float32]


def matmul(
    x: torch.Tensor,
    pw: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    act: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``y = x @ dequant(pw).T + bias``, accumulated in fp32 and rounded once to x's type.

    x: ``[..., K]`` fp32, fp16 or bf16, on the weight's device; its last dimension is copied only when not adjacent in
    memory. bias: ``[N]`` of any of these types, added in fp32. act: None, or "int8" to quantize x per row to int8
    (scale amax/127, round half to even; on the CPU alone). out: ``[..., N]`` of x's type, written and returned; it may
    not overlap x, the bias or itself, nor want a gradient. Returns ``[..., N]``. Gradients reach x and bias (with
    act="int8" straight through); under autocast x is cast as for a linear. On CUDA, fp16 and bf16 run lowbit's own
    kernels; with fp32 x, some fp32 scales and most codebooks (docs/formats.md) the weight is expanded in pieces for
    torch's product, which follows torch's settings (TF32, reduced-precision sums).

    Raises DtypeError, ShapeError, DeviceError, or SchemeError for an act that does not exist here.
    """
    if not isinstance(pw, PackedWeight):
        raise _not_packed(pw)
    if not pw.native:
        _check_layout(pw)
    held = (pw.codes, pw.scales, pw.zeros, pw.perm, pw.codebook, pw.row_scales)
    return product(x, *held, bias, pw.numbers, act, out, pw.native)


def product(
    x, codes, scales, zeros, perm, codebook, row_scales, bias, numbers, act=None, out=None, native=True
) -> torch.Tensor:
    """:func:`matmul` for the tensors of a packed weight in the layout of their device, and its ``numbers``; with torch
    operations where it is not ``native``.
    """
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    n, k = numbers[:2]
    device = codes.device
    # Why not the type at once: it makes a string of it, which takes five times as long.
    kind = "cuda" if codes.is_cuda else device.type
    if out is None and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    act_number = check_x(x, k, device)
    if bias is not None:
        check_bias(bias, n, device)
        bias = bias.contiguous()
    if act_number == _FLOAT32 and kind == "cuda":
        _warn_float32()
    if act is not None:
        check_act(act, kind, codebook is not None)
        act_number = QUANTIZED_IDS[act]
    if perm is not None:
        x = x.index_select(-1, perm)
    # Dense, or two-dimensional with adjacent columns, is what the op reads.
    if not x.is_contiguous() and (x.dim() != 2 or x.stride(1) != 1):
        if x.layout is not torch.strided:
            raise DtypeError(f"x must be a dense tensor, got layout {type_name(x.layout)}; use x.to_dense()")
        x = x.contiguous()

    has_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    # Why not written in place: inductor leaves alone what reads float8_e8m0fnu, and so cannot lower an op that mutates.
    traced = kind != "cuda" and scales.dtype == torch.float8_e8m0fnu and torch.compiler.is_compiling()
    if has_grad or not native or traced:
        if out is None:
            return _matmul_grad(x, codes, scales, zeros, bias, *numbers, act_number, codebook, row_scales)
        if has_grad:
            raise SchemeError("out= goes without gradients, but x or bias requires one; detach it or leave out= away")
        _check_out(out, x, bias, n)
        return out.copy_(_matmul_grad(x, codes, scales, zeros, bias, *numbers, act_number, codebook, row_scales))
    if out is None:
        y = x.new_empty(*x.shape[:-1], n)  # Why no tuple: torch takes half as long to read numbers.
        _matmul_out(x, codes, scales, zeros, bias, *numbers, act_number, y, codebook, row_scales)
        return y
    _check_out(out, x, bias, n)
    in_place = out.is_contiguous() or (out.dim() == 2 and out.stride(1) == 1 and out.stride(0) >= n)
    y = out if in_place else x.new_empty(out.shape)
    _matmul_out(x, codes, scales, zeros, bias, *numbers, act_number, y, codebook, row_scales)
    return out if in_place else out.copy_(y)


def _check_out(out, x, bias, n: int) -> None:
    if not isinstance(out, torch.Tensor) or out.dtype != x.dtype:
        got = type_name(out.dtype) if isinstance(out, torch.Tensor) else type(out).__name__
        raise DtypeError(f"out must be a tensor of x's type, {type_name(x.dtype)}, got {got}")
    shape = (*x.shape[:-1], n)
    if out.shape != shape:
        raise ShapeError(f"out must have shape {shape}, got {tuple(out.shape)}")
    if out.device != x.device:
        raise DeviceError(f"out must be on the device of x, {x.device}, got {out.device}")
    if out.requires_grad and torch.is_grad_enabled():
        raise SchemeError("out= goes without gradients, but out requires one; use torch.no_grad() or leave out= away")
    if not out.is_contiguous() and _overlaps_itself(out):
        raise ShapeError(f"out must not overlap itself, got shape {tuple(out.shape)} and strides {out.stride()}")
    if torch.compiler.is_compiling():
        return  # tensors that are traced have no addresses
    for name, other in (("x", x), ("bias", bias)):
        if other is not None and _overlap(out, other):
            raise ShapeError(f"out must not share memory with {name}, got tensors that overlap; give another tensor")


def _overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two places of a tensor may be one: a step of a dimension is no longer than all shorter ones reach."""
    # Why no sort: torch.compile cannot sort sizes.
    wide = [(step, size) for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]
    for i, (step, _) in enumerate(wide):
        reach = sum((size - 1) * other for j, (other, size) in enumerate(wide) if j != i and other <= step)
        if step <= reach:
            return True
    return False


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share bytes; columns of one matrix side by side are seen to be apart."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (first_a, end_a), (first_b, end_b) = _span(a), _span(b)
    if end_a <= first_b or end_b <= first_a:
        return False
    if a.dim() == b.dim() == 2 and a.stride(0) == b.stride(0) and a.stride(1) == b.stride(1) == 1:
        apart = (first_b - first_a) // a.element_size() % a.stride(0)
        return not (apart >= a.shape[1] and apart + b.shape[1] <= a.stride(0))
    return True


def _span(t: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and that after its last."""
    first = t.data_ptr()
    if t.is_contiguous():
        return first, first + t.nbytes
    return first, first + t.element_size() * (1 + sum((d - 1) * s for d, s in zip(t.shape, t.stride(), strict=True)))


def _check_layout(pw: PackedWeight) -> None:
    if pw.layout != ("nvidia" if pw.device.type == "cuda" else "cpu"):
        expected = "a GPU" if pw.device.type == "cuda" else "the CPU"
        raise DeviceError(
            f"expected a weight packed for {expected}, got layout {pw.layout!r}; use pack_weight(qt, '{pw.device}')"
        )


_warned_float32 = False


def _warn_float32() -> None:
    global _warned_float32
    if not torch.compiler.is_compiling() and not _warned_float32:
        _warned_float32 = True
        warnings.warn(
            "x is float32: on CUDA the weight is expanded to float32 for every product, which is slow; use float16 or "
            "bfloat16 where they do",
            stacklevel=4,
        )


def _not_packed(pw) -> DtypeError:
    if isinstance(pw, QuantTensor):
        return DtypeError("expected a PackedWeight, got a QuantTensor; pack it once with lowbit.pack_weight(qt)")
    return DtypeError(f"expected a PackedWeight (lowbit.pack_weight makes one), got {type(pw).__name__}")
