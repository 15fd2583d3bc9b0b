"""Scales of 8 bits as floats of 16 bits that have all their values, and back: both ways exact.

float8_e8m0fnu holds powers of two, 2^(e - 127) (OCP Microscaling Formats v1.0, 5.4.1), and becomes bfloat16;
float8_e4m3fn becomes float16.
"""

from __future__ import annotations

import torch


def widen(scales: torch.Tensor) -> torch.Tensor:
    """Scales of 8 bits without NaN, any shape, as bfloat16 or float16 (scheme.WIDER_SCALES)."""
    if scales.dtype == torch.float8_e4m3fn:
        return scales.to(torch.float16)
    exponents = scales.view(torch.uint8).to(torch.int16)
    # The exponent stands where that of a bfloat16 does; 2^-127 is subnormal.
    return torch.where(exponents == 0, 0x40, exponents << 7).view(torch.bfloat16)


def narrow(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What :func:`widen` was given; dtype: the type that it had."""
    if dtype == torch.float8_e4m3fn:
        return scales.to(dtype)
    return (scales.view(torch.int16) >> 7).to(torch.uint8).view(dtype)
