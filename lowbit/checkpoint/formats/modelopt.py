"""ModelOpt checkpoints (github.com/NVIDIA/Model-Optimizer): NVFP4 and FP8.

NVFP4: ``weight`` uint8 ``[N, K/2]``, E2M1, the even k in the low half; ``weight_scale`` float8_e4m3fn ``[N, K/16]``,
times ``weight_scale_2`` float32, one number. FP8: ``weight`` float8_e4m3fn ``[N, K]``, ``weight_scale`` float32, one
number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .base import Format, expect, setting
from .compressed_tensors_floats import small_float
from .fp8 import float8


class ModelOpt(Format):
    """``quant_method: "modelopt"``, or an hf_quant_config.json."""

    name = "modelopt"
    primaries = ("weight",)
    required = ("weight_scale",)
    optional = ("weight_scale_2", "input_scale")

    def __init__(self, config: Mapping):
        super().__init__(config)
        setting(config, "quant_algo", str, choices=("NVFP4", "FP8"))

    def is_primary(self, key: str, keys: Mapping[str, None]) -> bool:
        return f"{key}_scale" in keys

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        """weight, weight_scale, weight_scale_2 -> float4_e2m1 in groups of 16 with row_scales, or float8."""
        if settings["quant_algo"] == "FP8":
            weight = expect(tensors, "weight", torch.float8_e4m3fn, (None, None))
            return float8(weight, expect(tensors, "weight_scale", torch.float32), None)
        packed = expect(tensors, "weight", torch.uint8, (None, None))
        scales = expect(tensors, "weight_scale", torch.float8_e4m3fn, (packed.shape[0], -(-packed.shape[1] // 8)))
        total = expect(tensors, "weight_scale_2", torch.float32)
        if total.numel() != 1:
            raise FormatError(f"weight_scale_2 must be one number, got shape {tuple(total.shape)}")
        return small_float(packed, scales, "float4_e2m1", 16, total)
