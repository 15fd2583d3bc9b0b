"""How a scale is rounded to the type that stores it, and what lies next to it there.

Numbers come and go as fp32 that hold values of the type: torch does little with floats of 8 bits. The bytes of both
types of 8 bits, but for NaN, stand in the order of their values.
"""

from __future__ import annotations

import torch

#: The largest scale of float8_e4m3fn, to which the largest one of a row is brought.
MOST_E4M3 = torch.finfo(torch.float8_e4m3fn).max
_LAST_BYTE = {torch.float8_e8m0fnu: 254, torch.float8_e4m3fn: 126}
#: How many scales of a type lie between a number and its double.
PER_OCTAVE = {torch.float8_e8m0fnu: 1, torch.float8_e4m3fn: 8}


def rounded(scales: torch.Tensor, stored: torch.dtype, nearest: bool = False) -> torch.Tensor:
    """The value of type ``stored`` for each scale, fp32; infinite beyond the end of the type.

    To the nearest, half to even; but to float8_e8m0fnu up, unless ``nearest``: to the power of two at or above the
    scale, from 2^-127 on. So no weight is clipped. (OCP Microscaling Formats v1.0, section 6.3, divides the power of
    two at or below max |w| by the one at or below the type's largest value: the same scale, or half of it, which
    clips.) float8_e4m3fn ends at 448; factors of rows see to it that no more than rounding goes beyond.
    """
    if stored == torch.float8_e4m3fn:
        # Why clamped: only newer versions of torch do it. Why + 0: -0 has a byte of its own, behind that of 448.
        return scales.clamp(0, MOST_E4M3).add_(0.0).to(stored).float()
    if stored != torch.float8_e8m0fnu:
        return scales.to(stored).float()
    # Nearest is up from two thirds: halfway between p and 2p lies 1.5 p.
    bits = (scales * (2 / 3) if nearest else scales).view(torch.int32)
    up = (bits + 0x7FFFFF) & 0x7F800000  # the exponent alone, one more where the mantissa was not 0
    # The bits of 2^-127, the smallest scale, which fp32 has as a subnormal number.
    return torch.where(bits <= 0x400000, 0x400000, up).view(torch.float32)


def as_stored(scales: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Values that the type has, as that type."""
    if stored != torch.float8_e8m0fnu:
        return scales.to(stored)
    return (scales.view(torch.int32) >> 23).to(torch.uint8).view(stored)


def neighbours(scales: torch.Tensor, stored: torch.dtype, distance: int) -> torch.Tensor:
    """The values of a type of 8 bits so many places above (below 0: below) those given, the last one at its ends."""
    places = as_stored(scales, stored).view(torch.uint8).int()
    places = (places + distance).clamp_(0, _LAST_BYTE[stored])
    if stored == torch.float8_e8m0fnu:
        return torch.where(places == 0, 0x400000, places << 23).view(torch.float32)
    return places.to(torch.uint8).view(stored).float()
