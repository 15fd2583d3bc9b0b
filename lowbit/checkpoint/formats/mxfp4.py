"""MXFP4 checkpoints of GPT-OSS: the experts of a layer, stacked.

Layout (github.com/openai/gpt-oss, gpt_oss/torch/weights.py): ``NAME_blocks`` uint8 ``[E, N, K/32, 16]``, E2M1, the even
k in the low half of a byte; ``NAME_scales`` uint8 ``[E, N, K/32]``, ``2^(e - 127)``. Rows of ``gate_up_proj`` take
turns: even ones are gate, odd ones up; they keep that order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .base import Format, Layer, expect, setting
from .fields import powers_of_two


class Mxfp4(Format):
    """``quant_method: "mxfp4"``. Each expert is a layer: ``experts.gate_up_proj`` -> ``experts.3.gate_up_proj``.

    How many there are stands in config.json, which find needs as a whole.
    """

    name = "mxfp4"
    primaries = ("blocks",)
    required = ("scales",)
    joint = "_"

    def split(self, layer: Layer) -> list[Layer]:
        count = setting(self.config, "num_experts", int)
        if not 1 <= count <= 1 << 16:
            raise FormatError(f"num_local_experts must be from 1 to {1 << 16}, got {count}")
        owner, _, part = layer.name.rpartition(".")
        each = ({"expert": i, "experts": count} for i in range(count))
        return [Layer(f"{owner}.{s['expert']}.{part}", layer.tensors, s) for s in each]

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        """blocks, scales of all experts -> float4_e2m1 of one, groups of 32."""
        expert, experts = settings["expert"], settings["experts"]
        blocks = expect(tensors, "blocks", torch.uint8, (experts, None, None, 16))
        _, n, groups, _ = blocks.shape
        scales = powers_of_two(expect(tensors, "scales", torch.uint8, (experts, n, groups))[expert])
        codes = blocks[expert].reshape(n, groups * 16)
        return QuantTensor(codes, scales, dtype="float4_e2m1", shape=(n, groups * 32), group_size=32)
