"""GGUF weights (llama.cpp): each type of block to a QuantTensor, exactly.

Layouts (github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and gguf-py/gguf/quants.py); blocks run along a row.
Q4_0, Q5_0, Q8_0, Q3_K, Q6_K: ``W = d * s * (q - middle)``; Q4_1, Q5_1: ``W = d * q + m``; Q2_K, Q4_K, Q5_K:
``W = d * s * q - dmin * m``, with whole numbers s, m; IQ4_NL, IQ4_XS: a table of 16 values; MXFP4: E2M1 and
exponents; TQ2_0: -1, 0, 1. Products of fp16 and small whole numbers are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import FormatError, LowbitError
from ...tensor import QuantTensor
from .fields import powers_of_two
from .gguf_file import TYPES, GgufReader

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_SIZES = {name: (weights, size) for name, weights, size in TYPES.values()}


@dataclass
class Blocks:
    """Decoded blocks: codes uint8 ``[N, B, weights]``, scales float ``[N, B, groups]``, mins likewise or None."""

    codes: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None = None


def decode(data: torch.Tensor, kind: str, n: int, k: int) -> QuantTensor:
    """The weight ``[N, K]`` of a tensor's bytes, uint8, and its type, such as "Q4_K".

    Raises FormatError for a type that has no canonical form, and for another number of bytes.
    """
    if kind not in _DECODERS:
        raise FormatError(f"expected a type out of {', '.join(_DECODERS)}, got {kind!r}; it is read by no decoder yet")
    per_block, size = _SIZES[kind]
    if k % per_block or data.dtype != torch.uint8 or data.numel() != n * (k // per_block) * size:
        got = f"{data.numel()} bytes"
        raise FormatError(f"{kind} of shape {(n, k)} has blocks of {per_block} weights in {size} bytes, got {got}")
    dtype, group, read = _DECODERS[kind]
    blocks = read(data.reshape(n, k // per_block, size))
    scales = blocks.scales.flatten(1)
    return QuantTensor.from_codes(
        blocks.codes.flatten(1),
        scales,
        None if blocks.mins is None else blocks.mins.to(scales.dtype).flatten(1),
        dtype=dtype,
        group_size=group,
        zero_kind="none" if blocks.mins is None else "min",
        codebook=torch.tensor(_IQ4, dtype=torch.float32, device=data.device) if kind.startswith("IQ4") else None,
    )


class GgufFile(GgufReader):
    """An open GGUF file whose tensors become QuantTensors: ``metadata``, ``entries``, :meth:`weight`, :meth:`plain`."""

    def is_quantized(self, name: str) -> bool:
        return self.entries[name].type not in _PLAIN

    def weight(self, name: str) -> QuantTensor:
        """The quantized tensor called name, ``[N, K]``; all dimensions but the last are rows. Raises FormatError."""
        entry = self.entries[name]
        if len(entry.shape) < 2 or 0 in entry.shape:
            raise FormatError(f"{self.file}: {name}: a quantized weight must be [N, K], got shape {entry.shape}")
        *outer, k = entry.shape
        n = 1
        for size in outer:
            n *= size
        try:
            return decode(self.read(name), entry.type, n, k).validate(name)
        except LowbitError as error:
            raise FormatError(f"{self.file}: {name}: {error}") from None

    def plain(self, name: str) -> torch.Tensor:
        """The tensor called name, one that is not quantized."""
        entry = self.entries[name]
        if entry.type not in _PLAIN:
            raise FormatError(f"{self.file}: {name}: expected a tensor of floats or integers, got {entry.type}")
        return self.read(name).view(_PLAIN[entry.type]).reshape(entry.shape)


# ---- blocks: uint8 [N, blocks of a row, bytes of a block] -> Blocks ------------------------------------------------


def _half(data: torch.Tensor) -> torch.Tensor:
    """float16 out of two bytes: ``[N, B, 2*c]`` -> ``[N, B, c]``."""
    return data.contiguous().view(torch.float16)


def _halves(data: torch.Tensor, size: int) -> torch.Tensor:
    """Nibbles in runs: of every ``size`` bytes first the low halves, then the high ones; ``[N, B, 2 * bytes]``."""
    runs = data.unflatten(-1, (-1, 1, size))
    return torch.cat((runs & 15, runs >> 4), dim=-2).flatten(-3)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Bit i of four bytes: ``[N, B, 4]`` -> ``[N, B, 32]``."""
    place = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> place) & 1).flatten(-2)


def _quarters(data: torch.Tensor) -> torch.Tensor:
    """Two bits each in runs of 32 bytes: first bits 0-1 of all, then 2-3 ...; ``[N, B, 4 * bytes]``."""
    place = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=data.device).view(4, 1)
    return ((data.unflatten(-1, (-1, 1, 32)) >> place) & 3).flatten(-3)


def _q4_0(b: torch.Tensor) -> Blocks:
    return Blocks(_halves(b[..., 2:], 16), _half(b[..., :2]))


def _q4_1(b: torch.Tensor) -> Blocks:
    return Blocks(_halves(b[..., 4:], 16), _half(b[..., :2]), _half(b[..., 2:4]))


def _q5_0(b: torch.Tensor) -> Blocks:
    return Blocks(_halves(b[..., 6:], 16) | _fifth_bits(b[..., 2:6]) << 4, _half(b[..., :2]))


def _q5_1(b: torch.Tensor) -> Blocks:
    codes = _halves(b[..., 8:], 16) | _fifth_bits(b[..., 4:8]) << 4
    return Blocks(codes, _half(b[..., :2]), _half(b[..., 2:4]))


def _q8_0(b: torch.Tensor) -> Blocks:
    return Blocks(b[..., 2:] ^ 0x80, _half(b[..., :2]))  # two's complement + 128


def _q2_k(b: torch.Tensor) -> Blocks:
    both = b[..., :16]
    scales = _half(b[..., 80:82]).float() * (both & 15)
    return Blocks(_quarters(b[..., 16:80]), scales, -(_half(b[..., 82:84]).float() * (both >> 4)))


def _q3_k(b: torch.Tensor) -> Blocks:
    high, low, packed = b[..., :32], b[..., 32:96], b[..., 96:108]
    place = torch.arange(8, dtype=torch.uint8, device=b.device).view(8, 1)
    third = ((high.unsqueeze(-2) >> place) & 1).flatten(-2)
    # Scales of 6 bits: the low four in the halves of 8 bytes, the high two in the quarters of the next 4.
    nibbles = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), dim=-1)
    pairs = torch.cat([(packed[..., 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    factors = (nibbles | pairs << 4).to(torch.int8) - 32
    return Blocks(_quarters(low) | third << 2, _half(b[..., 108:110]).float() * factors)


def _k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and mins float32 ``[N, B, 8]`` of Q4_K and Q5_K: d, dmin, then 12 bytes of 6-bit numbers."""
    a, c, e = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    factors = torch.cat((a & 63, (e & 15) | (a >> 6) << 4), dim=-1)
    offsets = torch.cat((c & 63, (e >> 4) | (c >> 6) << 4), dim=-1)
    return _half(b[..., :2]).float() * factors, -(_half(b[..., 2:4]).float() * offsets)


def _q4_k(b: torch.Tensor) -> Blocks:
    return Blocks(_halves(b[..., 16:], 32), *_k_scales(b))


def _q5_k(b: torch.Tensor) -> Blocks:
    place = torch.arange(8, dtype=torch.uint8, device=b.device).view(8, 1)
    fifth = ((b[..., 16:48].unsqueeze(-2) >> place) & 1).flatten(-2)
    return Blocks(_halves(b[..., 48:], 32) | fifth << 4, *_k_scales(b))


def _q6_k(b: torch.Tensor) -> Blocks:
    low = b[..., :128].unflatten(-1, (2, 1, 64))
    codes = torch.cat((low & 15, low >> 4), dim=-2).flatten(-3) | _quarters(b[..., 128:192]) << 4
    factors = b[..., 192:208].contiguous().view(torch.int8)
    return Blocks(codes, _half(b[..., 208:210]).float() * factors)


def _iq4_xs(b: torch.Tensor) -> Blocks:
    high = b[..., 2:4].contiguous().view(torch.int16).to(torch.int32)
    place = torch.arange(0, 16, 2, dtype=torch.int32, device=b.device)
    low = torch.stack((b[..., 4:8] & 15, b[..., 4:8] >> 4), dim=-1).flatten(-2)
    factors = (low | ((high >> place) & 3) << 4) - 32
    return Blocks(_halves(b[..., 8:], 16), _half(b[..., :2]).float() * factors)


def _mxfp4(b: torch.Tensor) -> Blocks:
    return Blocks(_halves(b[..., 1:], 16), powers_of_two(b[..., :1].contiguous()))


def _tq2_0(b: torch.Tensor) -> Blocks:
    return Blocks(_quarters(b[..., :64]) + 1, _half(b[..., 64:66]))


#: Type -> weight type, group size, reader of its blocks.
_DECODERS: dict[str, tuple[str, int, Callable[[torch.Tensor], Blocks]]] = {
    "Q4_0": ("int4", 32, _q4_0),
    "Q4_1": ("uint4", 32, _q4_1),
    "Q5_0": ("int5", 32, _q5_0),
    "Q5_1": ("uint5", 32, _q5_1),
    "Q8_0": ("int8", 32, _q8_0),
    "Q2_K": ("uint2", 16, _q2_k),
    "Q3_K": ("int3", 16, _q3_k),
    "Q4_K": ("uint4", 32, _q4_k),
    "Q5_K": ("uint5", 32, _q5_k),
    "Q6_K": ("int6", 16, _q6_k),
    "IQ4_NL": ("uint4", 32, _q4_0),
    "IQ4_XS": ("uint4", 32, _iq4_xs),
    "MXFP4": ("float4_e2m1", 32, _mxfp4),
    "TQ2_0": ("int2", 256, _tq2_0),
}
