"""FP8 checkpoints: ``quant_method`` "fp8" (DeepSeek-V3 and its like) and "fbgemm_fp8".

Layout (github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py, weight_dequant): ``weight`` float8_e4m3fn ``[N, K]``;
in blocks (``weight_block_size``) ``weight_scale_inv`` float32 ``[N/rows up, K/columns up]``, and despite that name
``W = weight * weight_scale_inv``. Without blocks ``weight_scale``, one number or one a row. Scales of powers of two
come as float8_e8m0fnu or uint8 exponents, and stay float8_e8m0fnu.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .base import Format, expect, setting
from .fields import for_each_row, powers_of_two, regroup, spread_blocks

_TYPES = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
_ROLES = ("weight_scale_inv", "weight_scale", "scale")


class Fp8(Format):
    """``quant_method: "fp8"`` and ``"fbgemm_fp8"``. Scales of activations are no part of a weight: they are dropped."""

    name = "fp8"
    primaries = ("weight",)
    optional = (*_ROLES, "activation_scale", "input_scale", "input_scale_ub")

    def __init__(self, config: Mapping):
        super().__init__(config)
        _blocks(config)

    @classmethod
    def claims(cls, config: Mapping) -> bool:
        return config.get("quant_method") in ("fp8", "fbgemm_fp8")

    def is_primary(self, key: str, keys: Mapping[str, None]) -> bool:
        return any(f"{key.removesuffix('weight')}{role}" in keys for role in _ROLES)

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        """weight and weight_scale_inv, weight_scale or scale -> float8 codes as they are."""
        role = next((role for role in _ROLES if role in tensors), None)
        if role is None:
            raise FormatError(f"expected one of {', '.join(_ROLES)} beside weight, got none")
        weight = expect(tensors, "weight", tuple(_TYPES), (None, None))
        scales = expect(tensors, role, _SCALES)
        return float8(weight, scales, _blocks(settings))


def float8(weight: torch.Tensor, scales: torch.Tensor, blocks: tuple[int, int] | None) -> QuantTensor:
    """A float8 weight ``[N, K]`` with one scale, one a row, or one a block of (rows, columns)."""
    n, k = weight.shape
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = powers_of_two(scales)
    if scales.numel() == 1 and (blocks is None or scales.dim() < 2):
        scales, size = for_each_row(scales, n), -1
    elif blocks is None:
        if tuple(scales.shape) not in ((n,), (n, 1)):
            raise FormatError(f"scales must have shape ({n}, 1), or one number, got {tuple(scales.shape)}")
        scales, size = scales.reshape(n, 1), -1
    else:
        scales, size = spread_blocks(scales, n, k, *blocks)

    def dequantize():
        of_input = torch.zeros(k, dtype=torch.long) if size == -1 else torch.arange(k) // size
        return weight.float() * scales.float()[:, of_input.to(scales.device)]

    group, held, _ = regroup(k, size, scales, None, dequantize)
    codes = weight.contiguous().view(torch.uint8)
    return QuantTensor(codes, held, dtype=_TYPES[weight.dtype], shape=(n, k), group_size=group)


def _blocks(settings: Mapping) -> tuple[int, int] | None:
    """``weight_block_size``: (rows, columns) of a block, or None."""
    size = setting(settings, "weight_block_size", list, None)
    if size is not None and (len(size) != 2 or not all(type(i) is int and i >= 1 for i in size)):
        raise FormatError(f"weight_block_size must be two whole numbers from 1, got {size!r:.100}")
    return None if size is None else tuple(size)
