"""How others lay out codes and scales: words and nibbles into codes, blocks of any size into groups of a legal one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ... import bit_stream
from ...errors import FormatError, InexactError
from ...scheme import GROUP_SIZES, WHOLE_ROW
from ...tensor import as_bytes


def dense_codes(words: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """Codes uint8 ``[R, k]`` of whole-number words ``[R, W]`` that hold, row by row, one bit stream from the lowest bit
    of the first word; a code may straddle two words. Bits behind the last code are not looked at.
    """
    # Why: little-endian words of a stream that starts at the lowest bit are the bytes of the same stream.
    stream = words.flatten().view(torch.uint8).view(len(words), -1)[:, : bit_stream.stream_bytes(k, bits)]
    return bit_stream.unpack(stream, bits, k)


def planes_of(bits: int) -> list[int]:
    """The widths of the planes that a code is cut into, from its lowest bits on: those of 1, 2, 4 and 8 that add up."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def planar_codes(words: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """Codes uint8 ``[R, k]`` of int32 words ``[R, k*bits/32]`` in planes: every 32 codes fill ``bits`` words, first
    those of the plane with their lowest bits; no part of a code straddles two words. k: a multiple of 32.
    """
    blocks = words.reshape(-1, bits)
    codes, begin = torch.zeros(len(blocks), 32, dtype=torch.uint8, device=words.device), 0
    for width in planes_of(bits):
        # Why begin is the shift too: a plane of w bits takes w words.
        codes |= dense_codes(blocks[:, begin : begin + width].contiguous(), width, 32) << begin
        begin += width
    return codes.view(-1, k)


def padded_codes(words: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """Codes uint8 ``[R, k]`` of int32 words ``[R, W]`` of 32 // bits whole codes each, from the lowest bit."""
    shifts = torch.arange(32 // bits, device=words.device, dtype=torch.int32) * bits
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :k].to(torch.uint8)


def nibbles(data: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """The halves of each byte of uint8 ``[..., B]``, one after the other: uint8 ``[..., 2B]``."""
    low, high = data & 15, data >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def from_int8(values: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """The codes uint8 of type ``int<bits>`` of whole numbers int8 from -2^(b-1) to 2^(b-1)-1. Raises FormatError."""
    half = 1 << (bits - 1)
    if bits < 8 and values.numel() and (int(values.amin()) < -half or int(values.amax()) >= half):
        low, high = int(values.amin()), int(values.amax())
        raise FormatError(f"{bits}-bit numbers lie in {-half}..{half - 1}, got {low}..{high}")
    return (values.to(torch.int16) + half).to(torch.uint8)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0 scales, float8_e8m0fnu, of a uint8 (or float8_e8m0fnu) e: the same bytes, which mean 2^(e - 127).

    Raises FormatError for e = 255, which means NaN (OCP Microscaling Formats v1.0, 5.4.1).
    """
    e = exponents.view(torch.uint8)
    if e.numel() and int(e.amax()) == 255:
        raise FormatError(f"scales of powers of two must have exponents 0..254, {int((e == 255).sum())} are 255, NaN")
    return e.view(torch.float8_e8m0fnu)


def for_each_row(number: torch.Tensor, n: int) -> torch.Tensor:
    """One number, of any shape, as ``[n, 1]``."""
    return as_bytes(number).reshape(1, 1).expand(n, 1).contiguous().view(number.dtype)


def legal_group(size: int) -> int | None:
    """The largest group size of the canonical form whose groups never cross a border of blocks of size, or None."""
    fitting = [g for g in GROUP_SIZES if size % g == 0]
    return max(fitting, default=None)


def regroup(
    k: int, size: int, scales: torch.Tensor, zeros: torch.Tensor | None, dequantize: Callable[[], torch.Tensor]
) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """``(group size, scales, zeros)`` of the canonical form for groups of any size along K.

    scales, zeros: ``[N, ceil(k/size)]``. A size that the canonical form lacks becomes a smaller one that divides it,
    its scales repeated. dequantize: for the InexactError where there is none.
    """
    if size == WHOLE_ROW or size in GROUP_SIZES:
        return size, scales, zeros
    if size >= k:
        return WHOLE_ROW, scales, zeros
    group = legal_group(size)
    if group is None:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise InexactError(f"groups must be multiples of one of {sizes}, or the whole row, got {size}", dequantize)

    def repeat(t):
        if t is None:
            return None
        return as_bytes(t).repeat_interleave(size // group, dim=1)[:, : -(-k // group)].contiguous().view(t.dtype)

    return group, repeat(scales), repeat(zeros)


def flat_blocks(
    n: int, k: int, size: int, scales: torch.Tensor, zeros, dequantize: Callable[[], torch.Tensor]
) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """Like :func:`regroup` for blocks of size that run over the flat weight, N*K numbers: scales ``[N*K/size up]``.

    Exact where a group of the canonical form never crosses the border of a block.
    """
    if size % k == 0:
        starts, group = torch.arange(n, device=scales.device) * k, WHOLE_ROW
    else:
        group = legal_group(math.gcd(size, k))
        if group is None:
            message = f"blocks of {size} that run over rows of {k} cross the groups of the canonical form"
            raise InexactError(message, dequantize)
        starts = torch.arange(0, n * k, group, device=scales.device)
    block = (starts // size).view(n, -1)
    return group, scales[block], None if zeros is None else zeros[block]


def spread_blocks(scales: torch.Tensor, n: int, k: int, rows: int, columns: int) -> tuple[torch.Tensor, int]:
    """Scales of blocks of rows x columns, ``[N/rows up, K/columns up]``, as one for each row: ``[N, ...]``, group size.

    Raises FormatError for another shape.
    """
    expected = (-(-n // rows), -(-k // columns))
    if tuple(scales.shape) != expected:
        got = tuple(scales.shape)
        raise FormatError(f"scales of blocks {rows} x {columns} of a weight {n} x {k} have shape {expected}, got {got}")
    # Why not rows alone: a hostile number of them would be repeated before it is cut.
    spread = as_bytes(scales).repeat_interleave(min(rows, n), dim=0)[:n].contiguous()
    return spread.view(scales.dtype), min(columns, 1 << 40)


def group_order(
    of_input: torch.Tensor, straight: torch.Tensor, groups: int, dequantize: Callable[[], torch.Tensor]
) -> torch.Tensor | None:
    """The perm int32 ``[K]`` that brings the inputs of each group together, None where they lie so.

    of_input, straight: the group of each input ``[K]``, as given and as it would be in order. Raises FormatError.
    """
    low, high = int(of_input.amin()), int(of_input.amax())
    if low < 0 or high >= groups:
        raise FormatError(f"g_idx must lie in 0..{groups - 1}, the groups of scales, got {low}..{high}")
    if torch.equal(of_input, straight):
        return None
    perm = torch.argsort(of_input, stable=True)
    if not torch.equal(of_input[perm], straight):
        raise InexactError("g_idx must give every group the same number of inputs, got others", dequantize)
    return perm.to(torch.int32)
