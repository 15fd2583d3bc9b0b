"""HQQ checkpoints in safetensors.

Layout (github.com/mobiusml/hqq, hqq/core/quantize.py and bitpack.py): the weight, reshaped to rows of group_size
(axis 1) or to columns of it (axis 0); ``scale`` and ``zero`` float, one a row (column); ``W = (q - zero) * scale``.
``W_q`` holds 8 / b planes of rows in a byte, the first in the highest bits; 3 bits: 10 in an int32, from bit 27 down;
5, 6 and 8 bits: a byte each. What describes them lies beside as tensors: text as its character codes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError, InexactError
from ...tensor import QuantTensor
from .base import Format, expect
from .fields import flat_blocks

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: Packing -> (bits of a field, fields of a word, type of a word).
_PACKINGS = {
    "8bit_u8": (8, 1, torch.uint8),
    "4bit_u8": (4, 2, torch.uint8),
    "3bit_32": (3, 10, torch.int32),
    "2bit_u8": (2, 4, torch.uint8),
    "1bit_u8": (1, 8, torch.uint8),
}


class Hqq(Format):
    """``quant_method: "hqq"``. Exact for axis 1; with axis 0 a group runs over rows, which the canonical form lacks."""

    name = "hqq"
    primaries = ("W_q",)
    required = ("scale", "zero", "shape", "nbits", "axis", "packing")
    optional = (
        *("group_size", "view_as_float", "unpack_view_dtype", "quant_zero", "quant_scale", "compute_dtype"),
        *("channel_wise", "optimize", "round_zero", "encoded_state_dict", "stores_quant_config", "offload_meta"),
    )

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        """W_q, scale, zero and what describes them -> uint codes with a float zero."""
        if _number(tensors, "quant_zero", 0) or _number(tensors, "quant_scale", 0):
            raise FormatError("quant_zero and quant_scale must be false, got true: quantized scales are not read")
        n, k = (int(d) for d in expect(tensors, "shape", (torch.int32, torch.int64), (2,)).tolist())
        axis, size = _number(tensors, "axis"), _number(tensors, "group_size", k)
        if n < 1 or k < 1 or axis not in (0, 1) or size < 1 or n * k % size:
            raise FormatError(
                f"expected axis 0 or 1 and groups that divide a shape of N and K, got axis {axis}, {size} and {n, k}"
            )
        grid = (n * k // size, size) if axis == 1 else (size, n * k // size)
        if axis == 0 and "group_size" not in tensors:
            grid = (n, k)
        bits, codes = _unpack(tensors, grid)
        along = (grid[0], 1) if axis == 1 else (1, grid[1])
        scales = expect(tensors, "scale", _FLOATS, along)
        zeros = expect(tensors, "zero", scales.dtype, along)

        def dequantize():
            return ((codes.float() - zeros.float()) * scales.float()).view(n, k)

        if axis == 0:
            raise InexactError("groups of axis 0 run over rows, expected axis 1", dequantize)
        group, held, stored = flat_blocks(n, k, size, scales.flatten(), zeros.flatten(), dequantize)
        return QuantTensor.from_codes(codes.view(n, k), held, stored, dtype=f"uint{bits}", group_size=group)


def _unpack(tensors: Mapping[str, torch.Tensor], grid: tuple[int, int]) -> tuple[int, torch.Tensor]:
    """``(bits, codes uint8 of shape grid)``."""
    packing = expect(tensors, "packing", torch.uint8, (None,))
    name = packing.cpu().numpy().tobytes().decode("ascii", "replace")
    if name not in _PACKINGS:
        raise FormatError(f"packing must be one of {', '.join(_PACKINGS)}, got {name!r:.50}")
    bits, fields, word = _PACKINGS[name]
    words = tensors["W_q"]
    if _number(tensors, "view_as_float", 0):
        words = words.contiguous().view(word)
    words = expect({"W_q": words}, "W_q", word, (-(-grid[0] // fields), grid[1]))
    if fields == 1:
        codes = words
    else:
        top = bits * (fields - 1)
        planes = [(words >> (top - bits * i)) & ((1 << bits) - 1) for i in range(fields)]
        codes = torch.cat(planes).to(torch.uint8)[: grid[0]]
    stated = _number(tensors, "nbits")
    # Why: 5 and 6 bits lie in bytes of 8, and 1.58 bits in fields of 2.
    return (stated if name == "8bit_u8" and stated in (5, 6, 7) else bits), codes.contiguous()


def _number(tensors: Mapping[str, torch.Tensor], role: str, default: int | None = None) -> int:
    """A number that is stored as a tensor of one."""
    if role not in tensors and default is not None:
        return default
    held = expect(tensors, role, (torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32))
    if held.numel() != 1:
        raise FormatError(f"{role} must be one number, got shape {tuple(held.shape)}")
    return int(held)
