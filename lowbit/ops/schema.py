"""The ops of lowbit: their schemas and their fakes, defined once, in Python; the bindings.cpp of csrc/ and csrc/cuda/
register the kernels.

Why not in C++: a second definition from a second library would crash the process, and a fake in C++ would fix the batch
size of a compiled graph. Outputs are made by the caller (``out``), so that out of memory stays torch's own error.
"""

from __future__ import annotations

import torch

from ..dtypes import ACT_TYPES, WEIGHT_TYPES, kernel_type
from ..errors import DeviceError, DtypeError, SchemeError, ShapeError
from ..pack.layout import LAYOUTS, codes_shape, padded_shape
from ..scheme import OP_ZERO_KINDS, SCALE_TYPES, WHOLE_ROW, WIDER_SCALES, why_not

_LIBRARY = torch.library.Library("lowbit", "DEF")
# Why exact strides: a compiled graph may pad what it hands on, and the kernels read dense rows.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
_WEIGHT = "Tensor codes, Tensor scales, Tensor? zeros"
_SCHEME = "int n, int k, int weight, int group_size, int zero_kind"
# What only some weights have: fp32 [2**bits] of a uint type; fp32 [N, 1], a factor of all scales of a row. Why last and
# with defaults: programs that were exported without them still load.
_EXTRAS = "Tensor? codebook=None, Tensor? row_scales=None"

_SCHEMAS = (
    # x [..., K], out [..., N], dense or two-dimensional with adjacent columns; the weight's tensors in the layout of
    # their device; ids are indices into the lists of dtypes.py and scheme.py.
    f"matmul_out(Tensor x, {_WEIGHT}, Tensor? bias, {_SCHEME}, int act, Tensor(a!) out, {_EXTRAS}) -> ()",
    # The same product with a gradient to x and bias, and the gradient to x: dy [..., N] -> [..., K].
    f"matmul_grad(Tensor x, {_WEIGHT}, Tensor? bias, {_SCHEME}, int act, {_EXTRAS}) -> Tensor",
    f"matmul_grad_x(Tensor dy, {_WEIGHT}, {_SCHEME}, {_EXTRAS}) -> Tensor",
    # Rows row_begin .. row_begin + len(out) - 1 of a weight as floats, out [rows, K]; CUDA alone.
    f"dequantize_out({_WEIGHT}, {_SCHEME}, int row_begin, Tensor(a!) out, {_EXTRAS}) -> ()",
    # Between the canonical bit stream and a layout, both in memory; layout is an index into pack.layout.LAYOUTS.
    "pack_codes(Tensor codes, int n, int k, int bits, int layout, Tensor(a!) out) -> ()",
    "unpack_codes(Tensor packed, int n, int k, int bits, int layout, Tensor(a!) out) -> ()",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema, tags=_TAGS)

#: Types that x and bias may have, each with its id as an activation type.
FLOAT_IDS = {getattr(torch, act.name): i for i, act in enumerate(ACT_TYPES) if not act.on_the_fly}
#: Activation types that ``act=`` may ask for, with their ids.
QUANTIZED_IDS = {act.name: i for i, act in enumerate(ACT_TYPES) if act.on_the_fly}
_A_CODEBOOK = kernel_type("codebook1")
#: Types that scales have in each layout.
_SCALE_DTYPES = {
    layout: tuple(getattr(torch, name) for name in SCALE_TYPES if layout == "cpu" or name not in WIDER_SCALES)
    for layout in LAYOUTS
}


def type_name(dtype: torch.dtype) -> str:
    """``float16`` for torch.float16."""
    return str(dtype).removeprefix("torch.")


def check_x(x: torch.Tensor, k: int, device: torch.device) -> int:
    """Judge x [..., K]; its id as an activation type. Raises DtypeError, ShapeError or DeviceError."""
    number = FLOAT_IDS.get(x.dtype)
    if number is None:
        expected = ", ".join(type_name(t) for t in FLOAT_IDS)
        raise DtypeError(f"x must be one of {expected}, got {type_name(x.dtype)}; convert it with x.to(torch.float16)")
    shape = x.shape
    if not shape or shape[-1] != k:
        raise ShapeError(f"x must end in {k} values, the K of the weight, got shape {tuple(shape)}")
    if x.device != device:
        raise DeviceError(f"x must be on the device of the weight, {device}, got {x.device}; move one with .to()")
    return number


def check_act(act: str | None, device: str = "cpu", codebook: bool = False) -> None:
    """Judge ``act=``, for a type of device, and a weight with a codebook or without. Raises SchemeError."""
    if act is not None and (not isinstance(act, str) or act not in QUANTIZED_IDS):
        raise SchemeError(f"act must be None or {', '.join(map(repr, QUANTIZED_IDS))}, got {act!r}")
    if act is not None and codebook:
        raise SchemeError(why_not(_A_CODEBOOK, act))
    if act is not None and device == "cuda":
        raise SchemeError(f"act={act!r} has no CUDA kernels yet: act must be None there, or the weight on the CPU")


def check_bias(bias: torch.Tensor, n: int, device: torch.device) -> None:
    """Judge bias [N]. Raises DtypeError, ShapeError or DeviceError."""
    if not isinstance(bias, torch.Tensor):
        raise DtypeError(f"bias must be a torch.Tensor or None, got {type(bias).__name__}")
    if bias.dtype not in FLOAT_IDS:
        expected = ", ".join(type_name(t) for t in FLOAT_IDS)
        raise DtypeError(f"bias must be one of {expected}, got {type_name(bias.dtype)}")
    if bias.dim() != 1 or bias.shape[0] != n:
        raise ShapeError(f"bias must have shape ({n},), the N of the weight, got {tuple(bias.shape)}")
    if bias.device != device:
        raise DeviceError(f"bias must be on the device of the weight, {device}, got {bias.device}; move one with .to()")


def _check_weight(codes, scales, zeros, extras, n: int, k: int, weight: int, group_size: int, zero_kind: int) -> None:
    codebook, row_scales = extras
    if not 0 <= weight < len(WEIGHT_TYPES) or not 0 <= zero_kind < len(OP_ZERO_KINDS):
        raise SchemeError(f"weight and zero_kind must be ids of the lists, got {weight} and {zero_kind}")
    if (zeros is None) != (OP_ZERO_KINDS[zero_kind] == "none"):
        raise SchemeError(f"zeros go with zero kinds zero and min and only with them, got {OP_ZERO_KINDS[zero_kind]}")
    if codes.dtype != torch.uint8:
        raise DtypeError(f"codes must be uint8, got {type_name(codes.dtype)}")
    reason = why_not(WEIGHT_TYPES[weight], group_size=group_size)
    if reason or n < 1 or k < 1:
        raise SchemeError(reason or f"n and k must be at least 1, got {n} and {k}")
    layout, bits = "nvidia" if codes.device.type == "cuda" else "cpu", WEIGHT_TYPES[weight].bits
    blocks = padded_shape(layout, n, k, bits)[0] // 16
    groups = 1 if group_size == WHOLE_ROW else -(-k // group_size)
    _check_shape("codes", codes, codes_shape(layout, n, k, bits))
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None:
            if tensor.dtype not in _SCALE_DTYPES[layout] or tensor.dtype != scales.dtype:
                expected, got = ", ".join(map(type_name, _SCALE_DTYPES[layout])), type_name(tensor.dtype)
                raise DtypeError(f"{name} must be one of {expected}, scales and zeros alike, got {got}")
            _check_shape(name, tensor, (blocks, groups, 16))
            if tensor.device != codes.device:
                raise DeviceError(f"{name} must be on the device of codes, {codes.device}, got {tensor.device}")
    if codebook is not None:
        kernel_type(WEIGHT_TYPES[weight], codebook=True)
        if codebook.dtype != torch.float32:
            raise DtypeError(f"codebook must be float32, got {type_name(codebook.dtype)}")
        _check_shape("codebook", codebook, (1 << bits,))
        if codebook.device != codes.device:
            raise DeviceError(f"codebook must be on the device of codes, {codes.device}, got {codebook.device}")
    if row_scales is not None:
        if row_scales.dtype != torch.float32:
            raise DtypeError(f"row_scales must be float32, got {type_name(row_scales.dtype)}")
        _check_shape("row_scales", row_scales, (n, 1))
        if row_scales.device != codes.device:
            raise DeviceError(f"row_scales must be on the device of codes, {codes.device}, got {row_scales.device}")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def _check_product(x, codes, scales, zeros, bias, n, k, weight, group_size, zero_kind, act, extras) -> None:
    _check_weight(codes, scales, zeros, extras, n, k, weight, group_size, zero_kind)
    check_x(x, k, codes.device)
    if bias is not None:
        check_bias(bias, n, codes.device)
    if act != FLOAT_IDS[x.dtype] and act not in QUANTIZED_IDS.values():
        raise SchemeError(f"act must be the id of x's type, {FLOAT_IDS[x.dtype]}, or of int8, got {act}")
    if extras[0] is not None and act != FLOAT_IDS[x.dtype]:
        raise SchemeError(f"with a codebook act must be the id of x's type, {FLOAT_IDS[x.dtype]}, got {act}")
    if codes.device.type == "cuda" and act != FLOAT_IDS[x.dtype]:
        raise SchemeError(f"on CUDA act must be the id of x's type, {FLOAT_IDS[x.dtype]}, got {act}")


@torch.library.register_fake("lowbit::matmul_out", lib=_LIBRARY)
def _(x, codes, scales, zeros, bias, n, k, weight, group_size, zero_kind, act, out, codebook=None, row_scales=None):
    extras = (codebook, row_scales)
    _check_product(x, codes, scales, zeros, bias, n, k, weight, group_size, zero_kind, act, extras)
    if out.dtype != x.dtype:
        raise DtypeError(f"out must have the type of x, {type_name(x.dtype)}, got {type_name(out.dtype)}")
    _check_shape("out", out, (*x.shape[:-1], n))


@torch.library.register_fake("lowbit::matmul_grad", lib=_LIBRARY)
def _(x, codes, scales, zeros, bias, n, k, weight, group_size, zero_kind, act, codebook=None, row_scales=None):
    extras = (codebook, row_scales)
    _check_product(x, codes, scales, zeros, bias, n, k, weight, group_size, zero_kind, act, extras)
    return x.new_empty(*x.shape[:-1], n)


@torch.library.register_fake("lowbit::matmul_grad_x", lib=_LIBRARY)
def _(dy, codes, scales, zeros, n, k, weight, group_size, zero_kind, codebook=None, row_scales=None):
    _check_weight(codes, scales, zeros, (codebook, row_scales), n, k, weight, group_size, zero_kind)
    return dy.new_empty(*dy.shape[:-1], k)


@torch.library.register_fake("lowbit::dequantize_out", lib=_LIBRARY)
def _(codes, scales, zeros, n, k, weight, group_size, zero_kind, row_begin, out, codebook=None, row_scales=None):
    _check_weight(codes, scales, zeros, (codebook, row_scales), n, k, weight, group_size, zero_kind)
    if out.dim() != 2 or out.shape[1] != k or not 0 <= row_begin <= n - out.shape[0]:
        raise ShapeError(f"out must be rows of {k} inside the {n} of the weight, got {tuple(out.shape)} at {row_begin}")


@torch.library.register_fake("lowbit::pack_codes", lib=_LIBRARY)
def _(codes, n, k, bits, layout, out):
    return None


@torch.library.register_fake("lowbit::unpack_codes", lib=_LIBRARY)
def _(packed, n, k, bits, layout, out):
    return None
