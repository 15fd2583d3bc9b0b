"""Codes as dense bit streams, one a row of the weight, packed and unpacked a few rows at a time.

The stream is the ``codes`` of docs/format.md: little-endian, code k is bits k*b .. k*b+b-1 of its row.
"""

from __future__ import annotations

import torch

from .errors import SchemeError
from .tensor_checks import expect, expect_codes

# Why: weights a step on a CPU; four times as many, whose temporaries leave the cache, took 1.2 to 2 times as long.
_CHUNK = 1 << 17


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The bit stream uint8 ``[N, ceil(K*bits/8)]`` of codes uint8 ``[N, K]``, on their device."""
    expect_codes(codes, bits)
    n, k = codes.shape
    top = int(codes.amax()) if codes.numel() else 0
    if top >= 1 << bits:
        raise SchemeError(f"{bits}-bit codes are at most {(1 << bits) - 1}, got {top}")
    out = torch.empty(n, stream_bytes(k, bits), dtype=torch.uint8, device=codes.device)
    for rows in row_chunks(n, k, codes.device):
        part = codes[rows]
        if k % 8:
            part = torch.nn.functional.pad(part, (0, -k % 8))
        # Eight codes are exactly `bits` bytes: gather them in a 64-bit word, whose low bytes are the stream.
        part = part.reshape(part.shape[0], -1, 8).to(torch.int64)
        word = part[:, :, 0].clone()
        for i in range(1, 8):
            word |= part[:, :, i] << (bits * i)
        out[rows] = word.unsqueeze(-1).view(torch.uint8)[:, :, :bits].flatten(1)[:, : out.shape[1]]
    return out


def unpack(stream: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """The codes uint8 ``[N, k]`` of a bit stream uint8 ``[N, ceil(k*bits/8)]``, on its device."""
    expect_codes(stream, bits)
    n = stream.shape[0]
    expect("codes", stream, (n, stream_bytes(k, bits)), torch.uint8)
    out = torch.empty(n, k, dtype=torch.uint8, device=stream.device)
    shifts = torch.arange(0, 8 * bits, bits, device=stream.device)
    for rows in row_chunks(n, k, stream.device):
        part = stream[rows]
        if part.shape[1] % bits:
            part = torch.nn.functional.pad(part, (0, -part.shape[1] % bits))
        part = part.reshape(part.shape[0], -1, bits)
        word = torch.zeros(*part.shape[:2], 8, dtype=torch.uint8, device=part.device)
        word[:, :, :bits] = part
        # Why: the shift is arithmetic, but the mask takes off the copies of the sign bit.
        codes = (word.view(torch.int64) >> shifts) & ((1 << bits) - 1)
        out[rows] = codes.flatten(1)[:, :k].to(torch.uint8)
    return out


def stream_bytes(k: int, bits: int) -> int:
    """Bytes of one row's stream of k codes."""
    return (k * bits + 7) // 8


def row_chunks(n: int, k: int, device: torch.device):
    """Slices of rows that keep the temporaries of one step small: in the cache of a CPU core, or some MB on a GPU."""
    step = max(1, (_CHUNK if device.type == "cpu" else _CHUNK << 7) // max(k, 1))
    return (slice(start, start + step) for start in range(0, n, step))
