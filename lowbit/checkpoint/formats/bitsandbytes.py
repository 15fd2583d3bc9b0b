"""bitsandbytes checkpoints: nf4, fp4 and LLM.int8().

Layout (github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/functional.py, QuantState). 4 bits: ``weight``
holds N*K/2 bytes (of any type), row after row, the high half of a byte first; blocks of ``blocksize`` weights run over
the flat weight; ``weight.absmax``, a scale a block, float32, or nested: uint8 indices into ``weight.nested_quant_map``,
times ``weight.nested_absmax`` a block of ``nested_blocksize``, plus ``nested_offset``; ``weight.quant_map`` float32
``[16]``, the value of each code; ``weight.quant_state.bitsandbytes__nf4`` (or fp4), JSON.
``W = quant_map[code] * absmax``. 8 bits: ``weight`` int8 ``[N, K]``, ``SCB`` float32 ``[N]``, and
``W = weight * SCB / 127``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from ..safetensors_file import parse_json
from .base import EMPTY, Format, Layer, expect, group_setting, setting
from .fields import flat_blocks, from_int8, nibbles

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)


class BitsAndBytes(Format):
    """``quant_method: "bitsandbytes"``. nf4 and fp4 become uint4 codes with a codebook."""

    name = "bitsandbytes"
    primaries = ("weight",)
    optional = ("SCB", "weight_format", "weight.absmax", "weight.quant_map", *_NESTED, *_STATES)

    def is_primary(self, key: str, keys: Mapping[str, None]) -> bool:
        return f"{key}.absmax" in keys or f"{key.removesuffix('weight')}SCB" in keys

    def layers(self, keys: Iterable[str], metadata: Mapping[str, str] = EMPTY) -> list[Layer]:
        layers = super().layers(keys, metadata)
        for layer in layers:
            if "SCB" not in layer.tensors and not any(state in layer.tensors for state in _STATES):
                raise FormatError(f"{layer.name}: expected {' or '.join(_STATES)}, got none")
        return layers

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        return _int8(tensors) if "SCB" in tensors else _four_bits(tensors)


def _int8(tensors: Mapping[str, torch.Tensor]) -> QuantTensor:
    weight = expect(tensors, "weight", torch.int8, (None, None))
    n, k = weight.shape
    scales = expect(tensors, "SCB", torch.float32, (n,)).view(n, 1)
    order = tensors.get("weight_format")
    if order is not None and order.numel() and int(order.flatten()[0]) != 0:
        raise FormatError(f"weight_format must be 0, rows one after the other, got {int(order.flatten()[0])}")
    # Why a tensor: on CUDA a division by a number is a product with its reciprocal, which rounds twice.
    scales = scales / torch.tensor(127.0, device=scales.device)
    return QuantTensor(from_int8(weight), scales, dtype="int8", shape=(n, k), group_size=-1)


def _four_bits(tensors: Mapping[str, torch.Tensor]) -> QuantTensor:
    role = next(role for role in _STATES if role in tensors)
    text = expect(tensors, role, torch.uint8, (None,)).cpu().numpy().tobytes()
    state = parse_json(text, role)
    if not isinstance(state, dict):
        raise FormatError(f"{role} must be a JSON object, got {type(state).__name__}")
    kind = setting(state, "quant_type", str, choices=("nf4", "fp4"))
    if not role.endswith(kind):
        raise FormatError(f"{role} must be of its own type, got quant_type {kind!r}")
    size, shape = group_setting(state, "blocksize"), setting(state, "shape", list)
    if size < 1 or len(shape) != 2 or not all(type(d) is int and d >= 1 for d in shape):
        raise FormatError(f"{role} must have a blocksize from 1 and a shape of N and K, got {size} and {shape!r:.100}")
    n, k = shape
    weight = expect(tensors, "weight", _STORAGE).contiguous().flatten().view(torch.uint8)
    if len(weight) != -(-n * k // 2):
        raise FormatError(f"weight of shape {n} x {k} takes {-(-n * k // 2)} bytes, got {len(weight)}")
    book = expect(tensors, "weight.quant_map", torch.float32, (16,))
    scales = _scales(tensors, state, -(-n * k // size))
    codes = nibbles(weight, high_first=True)[: n * k].view(n, k)

    def dequantize():
        block = torch.arange(n * k, device=codes.device) // size
        return book[codes.long()] * scales[block].view(n, k)

    group, held, _ = flat_blocks(n, k, size, scales, None, dequantize)
    return QuantTensor.from_codes(codes, held, dtype="uint4", group_size=group, codebook=book)


def _scales(tensors: Mapping[str, torch.Tensor], state: Mapping, blocks: int) -> torch.Tensor:
    """The scale of each block, float32, un-nested like the library does it."""
    absmax = expect(tensors, "weight.absmax", (torch.float32, torch.uint8), (blocks,))
    if absmax.dtype == torch.float32:
        return absmax
    size, offset = group_setting(state, "nested_blocksize"), setting(state, "nested_offset", (float, int))
    table = expect(tensors, "weight.nested_quant_map", torch.float32, (256,))
    if size < 1:
        raise FormatError(f"nested_blocksize must be a whole number from 1, got {size}")
    outer = expect(tensors, "weight.nested_absmax", torch.float32, (-(-blocks // size),))
    return table[absmax.long()] * outer.repeat_interleave(min(size, blocks))[:blocks] + offset
