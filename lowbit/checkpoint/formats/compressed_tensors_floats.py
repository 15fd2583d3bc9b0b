"""The layouts of compressed-tensors that hold floats (github.com/vllm-project/compressed-tensors, compressors/), each
to a QuantTensor with the scales of the file.

- mxfp8-quantized: ``weight`` float8_e4m3fn ``[N, K]``, exponents uint8 ``[N, K/32]`` as ``weight_scale``.
- nvfp4-pack-quantized: ``weight_packed`` uint8 ``[N, K/2]``, E2M1, the even k in the low half; ``weight_scale``
  float8_e4m3fn ``[N, K/16]``, divided by ``weight_global_scale`` float32 [1].
- mxfp4-pack-quantized: the same with exponents uint8 ``[N, K/32]``; mxfp6-pack-quantized: E2M3, four codes in three
  bytes from the lowest bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .base import expect, setting
from .fields import for_each_row, powers_of_two
from .fp8 import float8


def check_float(settings: Mapping, bits: int) -> None:
    """Refuse settings of a weight that are not those of a float of so many bits."""
    setting(settings, "type", str, choices=("float",))
    setting(settings, "num_bits", int, choices=(bits,))
    if not setting(settings, "symmetric", bool, True):
        raise FormatError("weights of type float are symmetric, got symmetric = false")


def mxfp8(tensors: Mapping, settings: Mapping) -> QuantTensor:
    """weight float8_e4m3fn and exponents -> float8_e4m3, groups of 32."""
    weight = expect(tensors, "weight", torch.float8_e4m3fn, (None, None))
    check_float(settings, 8)
    exponents = expect(tensors, "weight_scale", torch.uint8, (weight.shape[0], -(-weight.shape[1] // 32)))
    return float8(weight, powers_of_two(exponents), (1, 32))


def nvfp4(tensors: Mapping, settings: Mapping) -> QuantTensor:
    """weight_packed, weight_scale, weight_global_scale -> float4_e2m1, groups of 16, scales as they are.

    row_scales are 1 / weight_global_scale in float32: a weight is off ``code * scale / global`` by at most 2^-24 of
    itself. vLLM hands its weight-only kernels the same number; the library's own decoder rounds scale / global instead,
    and is off by as much.
    """
    check_float(settings, 4)
    total = expect(tensors, "weight_global_scale", torch.float32)
    # Why these ends: beyond them the reciprocal is subnormal or infinite.
    if total.numel() != 1 or not 2.0**-126 <= float(total) <= 2.0**126:
        raise FormatError(f"weight_global_scale must be one number from 2^-126 to 2^126, got {_numbers(total)}")
    packed = expect(tensors, "weight_packed", torch.uint8, (None, None))
    scales = expect(tensors, "weight_scale", torch.float8_e4m3fn, (packed.shape[0], -(-packed.shape[1] // 8)))
    return small_float(packed, scales, "float4_e2m1", 16, 1 / total)


def _numbers(tensor: torch.Tensor) -> str:
    return f"{float(tensor)}" if tensor.numel() == 1 else f"shape {tuple(tensor.shape)}"


def mxfp(name: str, bits: int):
    """The decoder of packed floats with exponents: weight_packed, weight_scale -> the type called name."""

    def decode(tensors: Mapping, settings: Mapping) -> QuantTensor:
        check_float(settings, bits)
        packed = expect(tensors, "weight_packed", torch.uint8, (None, None))
        k = packed.shape[1] * 8 // bits
        exponents = expect(tensors, "weight_scale", torch.uint8, (packed.shape[0], -(-k // 32)))
        return small_float(packed, powers_of_two(exponents), name, 32)

    return decode


def small_float(
    packed: torch.Tensor, scales: torch.Tensor, name: str, size: int, factor: torch.Tensor | None = None
) -> QuantTensor:
    """Floats of 4 or 6 bits whose bytes ``[N, K*b/8]`` are the bit stream of the canonical form already.

    factor: one float32 number that multiplies all scales, which are float8_e4m3fn then.
    """
    bits = 6 if "6" in name else 4
    n, k = packed.shape[0], packed.shape[1] * 8 // bits
    if k * bits != packed.shape[1] * 8:
        raise FormatError(f"weight_packed of {bits} bits must have a multiple of 3 bytes a row, got {packed.shape[1]}")
    row_scales = None if factor is None else for_each_row(factor, n)
    return QuantTensor(packed, scales, dtype=name, shape=(n, k), group_size=size, row_scales=row_scales)
