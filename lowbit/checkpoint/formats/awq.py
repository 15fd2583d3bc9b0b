"""AWQ checkpoints of version "gemm": 4 bits.

Layout (github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py): ``qweight`` int32 ``[K, N/8]``, ``qzeros`` int32
``[G, N/8]``, ``scales`` ``[G, N]``; nibble i of a word, from the lowest, belongs to output ``8*word + ORDER[i]``.
``W[n, k] = scales[g, n] * (q[k, n] - z[g, n])``. The factors of AWQ are folded into other layers already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .base import Format, expect, group_setting, setting
from .fields import regroup

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Awq(Format):
    """``quant_method: "awq"``, or an old quant_config.json with ``w_bit`` and ``q_group_size``."""

    name = "awq"
    primaries = ("qweight",)
    required = ("scales",)
    optional = ("qzeros",)

    def __init__(self, config: Mapping):
        super().__init__(config)
        for new, old in (("bits", "w_bit"), ("group_size", "q_group_size")):
            self.config.setdefault(new, config.get(old))
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise FormatError(f"version of AWQ must be gemm, got {version!r:.100}; it is laid out for one kernel")
        setting(self.config, "bits", int, choices=(4,))
        group_setting(self.config)

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        """qweight, scales, qzeros -> uint4 with a zero; without qzeros (``zero_point: false``) int4."""
        has_zeros = setting(settings, "zero_point", bool, True)
        if has_zeros and "qzeros" not in tensors:
            raise FormatError("zero_point says that there are zeros, expected qzeros, got none")
        scales = expect(tensors, "scales", _FLOATS, (None, None))
        groups, n = scales.shape
        if n % 8:
            raise FormatError(f"scales must have a multiple of 8 columns, got {n}")
        words = expect(tensors, "qweight", torch.int32, (None, n // 8))
        k = words.shape[0]
        size = group_setting(settings)
        reach = k if size == -1 else size
        if groups != -(-k // reach):
            raise FormatError(f"scales of {k} inputs in groups of {reach} have {-(-k // reach)} rows, got {groups}")
        codes, zeros = _columns(words).t(), None
        if "qzeros" in tensors:
            zeros = _columns(expect(tensors, "qzeros", torch.int32, (groups, n // 8))).t()
            if not has_zeros:
                if int((zeros != 8).count_nonzero()):
                    raise FormatError("zero_point is false, so every zero must be 8, got others")
                zeros = None

        def dequantize():
            of_input = torch.arange(k, device=codes.device) // reach
            offset = 8 if zeros is None else zeros.float()[:, of_input]
            return (codes.float() - offset) * scales.t().float()[:, of_input]

        stored = None if zeros is None else zeros.to(scales.dtype)
        group, held, stored = regroup(k, size, scales.t(), stored, dequantize)
        dtype = "int4" if stored is None else "uint4"
        return QuantTensor.from_codes(codes.contiguous(), held, stored, dtype=dtype, group_size=group)


def _columns(words: torch.Tensor) -> torch.Tensor:
    """Codes uint8 ``[R, N]`` of words int32 ``[R, N/8]``."""
    place = torch.tensor([ORDER.index(column) for column in range(8)], dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> (4 * place)) & 15).flatten(1).to(torch.uint8)
