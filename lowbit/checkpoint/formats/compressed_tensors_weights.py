"""The layouts of compressed-tensors (github.com/vllm-project/compressed-tensors, compressors/), each to a QuantTensor:
those of integers, and the list of all. Floats that have a layout of their own are in compressed_tensors_floats.py.

Whole numbers q of b bits stand as codes q + 2^(b-1); ``W = scale * (q - zero_point)``.

- pack-quantized: ``weight_packed`` int32 ``[N, words]`` along K, ``weight_shape`` [2] = N, K; ``weight_zero_point``
  int32 ``[words, G]``, packed along N. From 0.18 a row is one bit stream; before, a word holds 32 // b whole codes.
- int-quantized, float-quantized, naive-quantized: ``weight`` int8 or float8_e4m3fn ``[N, K]``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .base import expect, group_setting, setting
from .compressed_tensors_floats import check_float, mxfp, mxfp8, nvfp4
from .fields import (
    dense_codes,
    for_each_row,
    from_int8,
    group_order,
    padded_codes,
    regroup,
    spread_blocks,
)
from .fp8 import float8

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def scales_of(tensors: Mapping, settings: Mapping, n: int, k: int) -> tuple[torch.Tensor, int]:
    """``(scales [N, G], group size)`` of a weight's strategy."""
    scales = expect(tensors, "weight_scale", _FLOATS)
    strategy = setting(settings, "strategy", str, choices=("tensor", "channel", "group", "block"))
    if strategy == "block":
        block = setting(settings, "block_structure", list)
        if len(block) != 2 or not all(type(i) is int and i >= 1 for i in block):
            raise FormatError(f"block_structure must be two whole numbers from 1, got {block!r:.100}")
        return spread_blocks(scales, n, k, *block)
    if strategy == "tensor":
        if scales.numel() != 1:
            raise FormatError(f"weight_scale of strategy tensor is one number, got shape {tuple(scales.shape)}")
        return for_each_row(scales, n), -1
    if strategy == "channel" and tuple(scales.shape) == (n,):
        scales = scales.view(n, 1)
    size = group_setting(settings) if strategy == "group" else -1
    groups = 1 if size == -1 else -(-k // size)
    return expect({"weight_scale": scales}, "weight_scale", _FLOATS, (n, groups)), size


def _zeros(tensors: Mapping, settings: Mapping, scales: torch.Tensor, unpack) -> torch.Tensor | None:
    """Zeros uint8 ``[N, G]`` on the axis of the codes; unpack: of packed words. None for a symmetric weight."""
    if setting(settings, "symmetric", bool, True):
        return None
    points = expect(tensors, "weight_zero_point", (torch.int8, torch.int32))
    if points.dtype == torch.int32:
        return unpack(points)
    rows, groups = scales.shape
    if tuple(points.shape) == (rows,) or points.numel() == 1:
        points = points.reshape(-1, 1).expand(rows, 1)
    return from_int8(
        expect({"weight_zero_point": points}, "weight_zero_point", torch.int8, (rows, groups)), _bits(settings)
    )


def _bits(settings: Mapping) -> int:
    if settings.get("type", "int") != "int":
        raise FormatError(f"weights of {settings['format']} have type int, got {settings['type']!r:.100}")
    return setting(settings, "num_bits", int, choices=range(2, 9))


def _integers(tensors: Mapping, settings: Mapping, codes: torch.Tensor, unpack) -> QuantTensor:
    """Codes uint8 ``[N, K]`` with the scales, zero points and order of the layer."""
    (n, k), bits = codes.shape, _bits(settings)
    scales, size = scales_of(tensors, settings, n, k)
    zeros = _zeros(tensors, settings, scales, unpack)
    reach = k if size == -1 else size
    of_input = straight = torch.arange(k, device=codes.device) // reach
    if "weight_g_idx" in tensors:
        given = expect(tensors, "weight_g_idx", (torch.int32, torch.int64), (k,)).long()
        of_input = straight if bool((given == -1).all()) else given

    def dequantize():
        offset = 1 << (bits - 1) if zeros is None else zeros.float()[:, of_input]
        return (codes.float() - offset) * scales.float()[:, of_input]

    perm = group_order(of_input, straight, scales.shape[1], dequantize)
    stored = None if zeros is None else zeros.to(scales.dtype)
    group, held, stored = regroup(k, size, scales, stored, dequantize)
    ordered = codes if perm is None else codes[:, perm.long()]
    dtype = f"{'int' if zeros is None else 'uint'}{bits}"
    return QuantTensor.from_codes(ordered, held, stored, dtype=dtype, group_size=group, perm=perm)


def pack_quantized(tensors: Mapping, settings: Mapping) -> QuantTensor:
    """weight_packed, weight_scale, weight_shape, weight_zero_point, weight_g_idx -> int, or uint with a zero."""
    bits = _bits(settings)
    shape = expect(tensors, "weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    n, k = shape
    packed = expect(tensors, "weight_packed", torch.int32, (None, None))
    widths = _widths(k, bits)
    if n != packed.shape[0] or k < 1 or packed.shape[1] not in widths.values():
        wanted = " or ".join(map(str, dict.fromkeys((n, width) for width in widths.values())))
        raise FormatError(
            f"weight_packed of {bits} bits and shape {shape} must have shape {wanted}, got {tuple(packed.shape)}"
        )
    points, fits = tensors.get("weight_zero_point"), [way for way in widths if widths[way] == packed.shape[1]]
    if len(fits) > 1 and points is not None and points.dim() == 2:
        fits = [way for way in fits if _widths(n, bits)[way] == points.shape[0]] or fits
    way = fits[0] if len(fits) == 1 or k * bits <= 32 else _way_of_version(settings)
    unpack_row = dense_codes if way == "dense" else padded_codes

    def unpack(words):
        groups = tensors["weight_scale"].shape[-1] if tensors["weight_scale"].dim() == 2 else 1
        words = expect({"weight_zero_point": words}, "weight_zero_point", torch.int32, (_widths(n, bits)[way], groups))
        return unpack_row(words.t(), bits, n).t()

    return _integers(tensors, settings, unpack_row(packed, bits, k), unpack)


def _widths(count: int, bits: int) -> dict[str, int]:
    """How many words hold count codes: from 0.18, and before where that is another layout."""
    dense, padded = {"dense": -(-count * bits // 32)}, {"padded": -(-count // (32 // bits))}
    return dense if 32 % bits == 0 else {**dense, **padded}


def _way_of_version(settings: Mapping) -> str:
    # Why: a few widths fit both layouts; then only the version of the writer tells.
    text = str(settings.get("version") or "")
    numbers = text.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        raise FormatError(
            f"weight_packed fits two layouts: expected the version of compressed-tensors, got {text!r:.50}"
        )
    return "dense" if tuple(map(int, numbers)) >= (0, 18) else "padded"


def plain(tensors: Mapping, settings: Mapping) -> QuantTensor:
    """weight int8 or float8 and weight_scale -> int (or uint with a zero), or float8."""
    weight = expect(tensors, "weight", (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2), (None, None))
    if weight.dtype == torch.int8:
        return _integers(tensors, settings, from_int8(weight, _bits(settings)), _no_words)
    check_float(settings, 8)
    scales, size = scales_of(tensors, settings, *weight.shape)
    return float8(weight, scales, None if size == -1 else (1, size))


def _no_words(points):
    raise FormatError("weight_zero_point must be int8 beside a weight of int8, got int32")


#: Layout -> how a layer's tensors are read.
DECODERS = {
    "pack-quantized": pack_quantized,
    "int-quantized": plain,
    "float-quantized": plain,
    "naive-quantized": plain,
    "nvfp4-pack-quantized": nvfp4,
    "mxfp4-pack-quantized": mxfp("float4_e2m1", 4),
    "mxfp6-pack-quantized": mxfp("float6_e2m3", 6),
    "mxfp8-quantized": mxfp8,
}
