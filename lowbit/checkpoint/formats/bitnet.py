"""BitNet b1.58 checkpoints of transformers: weights of -1, 0 and 1.

Layout (github.com/huggingface/transformers, integrations/bitnet.py): ``weight`` uint8 ``[N/4, K]``, bits 2i and 2i+1 of
its row r hold the value of row ``i * N/4 + r`` plus 1; ``weight_scale`` one number, which divides ("bitlinear") or
multiplies ("autobitlinear").
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .base import Format, expect, setting


class BitNet(Format):
    """``quant_method: "bitnet"``. Its layers also round activations to int8; lowbit multiplies them as they are."""

    name = "bitnet"
    primaries = ("weight",)
    required = ("weight_scale",)

    def __init__(self, config: Mapping):
        super().__init__(config)
        setting(config, "linear_class", str, "bitlinear", choices=("bitlinear", "autobitlinear"))
        if setting(config, "quantization_mode", str, "offline", choices=("offline", "online")) == "online":
            raise FormatError("quantization_mode must be offline, got online: its weights are floats")
        if config.get("use_rms_norm"):
            raise FormatError("use_rms_norm must be false, got true: a norm inside a layer is no part of its weight")

    def is_primary(self, key: str, keys: Mapping[str, None]) -> bool:
        return f"{key}_scale" in keys

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        """weight, weight_scale -> int2 with one scale, in fp32."""
        packed = expect(tensors, "weight", torch.uint8, (None, None))
        scale = expect(tensors, "weight_scale", (torch.float32, torch.bfloat16, torch.float16)).float()
        if scale.numel() != 1 or float(scale) == 0:
            raise FormatError(f"weight_scale must be one number other than 0, got shape {tuple(scale.shape)}")
        plus_one = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)])
        bad = int((plus_one == 3).count_nonzero())
        if bad:
            raise FormatError(f"weight must hold 0, 1 and 2 (values plus 1), {bad} of {plus_one.numel()} are 3")
        if settings.get("linear_class", "bitlinear") == "bitlinear":
            scale = scale.reciprocal()
        n = plus_one.shape[0]
        return QuantTensor.from_codes(plus_one + 1, scale.reshape(1, 1).repeat(n, 1), dtype="int2", group_size=-1)
