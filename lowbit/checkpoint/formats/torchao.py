"""torchao checkpoints in safetensors: Int4Tensor, Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor.

Layout (github.com/pytorch/ao, torchao/prototype/safetensors and quantization/quantize_/workflows): the parts of a
weight are ``NAME._weight_qdata``, ``_scale``, ``_zero_point``; the file's metadata has JSON under ``NAME.weight``:
``_type``, and in ``_data`` ``block_size``. Int4Tensor: ``qdata`` ``[N, K/2]``, numbers -8..7, the even k in the low
half; ``scale`` and ``zero_point`` ``[K/g, N]``, ``W = q * scale + zero_point``. The others: ``qdata`` ``[N, K]``,
``scale`` and ``zero_point`` ``[N, K/g]``, ``W = (q - zero_point) * scale``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from ..safetensors_file import parse_json
from .base import EMPTY, Format, Layer, expect, setting
from .fields import from_int8, nibbles, regroup, spread_blocks
from .fp8 import float8

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class TorchAo(Format):
    """``quant_method: "torchao"``. Weights tiled for one device or with factors of activations are refused."""

    name = "torchao"
    primaries = ("qdata",)
    required = ("scale",)
    optional = ("zero_point", "act_pre_scale", "act_quant_scale", "act_quant_zero_point", "act_scale")
    joint = "._weight_"
    _about: Mapping = EMPTY

    def layers(self, keys: Iterable[str], metadata: Mapping[str, str] = EMPTY) -> list[Layer]:
        self._about = metadata
        return super().layers(keys, metadata)

    def settings(self, name: str) -> Mapping:
        """Type and block size of a layer, from the file's metadata."""
        about = self._about.get(f"{name}.weight")
        if about is None:
            raise FormatError(f"{name}: expected its type in the file's metadata under '{name}.weight', got none")
        held = parse_json(about, f"{name}.weight")
        data = held.get("_data") if isinstance(held, dict) else None
        if not isinstance(data, dict) or held.get("_type") not in tuple(_DECODERS):
            got = held.get("_type") if isinstance(held, dict) else held
            raise FormatError(f"{name}: its type must be one of {', '.join(_DECODERS)}, got {got!r:.100}")
        return {**data, "_type": held["_type"]}

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        if "act_pre_scale" in tensors:
            raise FormatError("act_pre_scale: expected none, got one; a factor of activations is no part of a weight")
        return _DECODERS[settings["_type"]](tensors, settings)


def _block(settings: Mapping, n: int, k: int) -> tuple[int, int]:
    """``block_size``: rows and columns that share a scale."""
    size = setting(settings, "block_size", list)
    if len(size) != 2 or not all(type(i) is int and i >= 1 for i in size):
        raise FormatError(f"block_size must be two whole numbers from 1, got {size!r:.100}")
    return min(size[0], n), min(size[1], k)


def _int4(tensors: Mapping, settings: Mapping) -> QuantTensor:
    packed = expect(tensors, "qdata", (torch.uint8, torch.int8), (None, None)).contiguous().view(torch.uint8)
    n, k = packed.shape[0], 2 * packed.shape[1]
    rows, size = _block(settings, n, k)
    if rows != 1:
        raise FormatError(f"block_size of Int4Tensor must have one row, got {rows}")
    groups = -(-k // size)
    scales = expect(tensors, "scale", _FLOATS, (groups, n)).t()
    mins = expect(tensors, "zero_point", scales.dtype, (groups, n)).t()
    codes = nibbles(packed) ^ 8

    def dequantize():
        of_input = torch.arange(k, device=codes.device) // size
        return (codes.float() - 8) * scales.float()[:, of_input] + mins.float()[:, of_input]

    group, held, stored = regroup(k, size if size < k else -1, scales, mins, dequantize)
    return QuantTensor.from_codes(codes, held, stored, dtype="int4", group_size=group, zero_kind="min")


def _integers(tensors: Mapping, settings: Mapping) -> QuantTensor:
    numbers = expect(tensors, "qdata", torch.int8, (None, None))
    n, k = numbers.shape
    rows, size = _block(settings, n, k)
    scales, size = spread_blocks(expect(tensors, "scale", _FLOATS), n, k, rows, size)
    bits = _bits(settings)
    codes, points = from_int8(numbers, bits), None
    if "zero_point" in tensors:
        points, _ = spread_blocks(expect(tensors, "zero_point", (torch.int8, torch.int32, *_FLOATS)), n, k, rows, size)
        points = points.to(scales.dtype) + (1 << (bits - 1)) if bool((points != 0).any()) else None

    def dequantize():
        of_input = torch.arange(k, device=codes.device) // size
        offset = 1 << (bits - 1) if points is None else points.float()[:, of_input]
        return (codes.float() - offset) * scales.float()[:, of_input]

    group, held, stored = regroup(k, size if size < k else -1, scales, points, dequantize)
    dtype = f"{'int' if points is None else 'uint'}{bits}"
    return QuantTensor.from_codes(codes, held, stored, dtype=dtype, group_size=group)


def _bits(settings: Mapping) -> int:
    """Bits of ``target_dtype``, 8 where there is none."""
    target = settings.get("target_dtype", "int8")
    target = target.get("_data") if isinstance(target, Mapping) else target
    name = str(target).removeprefix("torch.")
    if name not in [f"int{bits}" for bits in range(2, 9)]:
        raise FormatError(f"target_dtype must be one of int2 to int8, got {target!r:.100}")
    return int(name.removeprefix("int"))


def _float8(tensors: Mapping, settings: Mapping) -> QuantTensor:
    weight = expect(tensors, "qdata", (torch.float8_e4m3fn, torch.float8_e5m2), (None, None))
    n, k = weight.shape
    rows, size = _block(settings, n, k)
    scales, size = spread_blocks(expect(tensors, "scale", _FLOATS), n, k, rows, size)
    return float8(weight, scales, None if size >= k else (1, size))


_DECODERS = {
    "Int4Tensor": _int4,
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "Float8Tensor": _float8,
}
