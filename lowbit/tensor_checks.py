"""What the tensors of a quantized weight have to be; errors name the field, what was expected and what came."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .errors import DeviceError, DtypeError, SchemeError, ShapeError
from .scheme import SCALE_TYPES, WIDER_SCALES

_SCALE_DTYPES = tuple(getattr(torch, name) for name in SCALE_TYPES)
_FLOATS = tuple(name for name in SCALE_TYPES if name not in WIDER_SCALES)


def checked_shape(shape) -> tuple[int, int]:
    """A tuple or list (N, K), as a tuple. Raises ShapeError."""
    if not isinstance(shape, (tuple, list)):
        raise ShapeError(f"shape must be a tuple (N, K), got {type(shape).__name__}")
    if len(shape) != 2 or not all(is_size(d) for d in shape):
        raise ShapeError(f"shape must be (N, K) of two whole numbers from 1, got {tuple(shape)}")
    return tuple(shape)


def is_size(number) -> bool:
    """Whether a number can be an N or a K."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def named_device(device) -> torch.device:
    """The device that a name, an index or a device means, whether it is here or not. Raises DeviceError."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"expected a device such as 'cpu' or 'cuda', got {device!r}") from error


def checked_device(device) -> torch.device:
    """A device on which torch makes tensors here, be it one without kernels or meta. Raises DeviceError."""
    device = named_device(device)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # Why both: torch built without CUDA asserts
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise DeviceError(f"expected a device that torch sees, got '{device}': {reason}") from error
    return device


def checked_path(path, argument: str = "path") -> Path:
    """The path that an argument names. Raises DtypeError."""
    if not isinstance(path, (str, os.PathLike)):
        raise DtypeError(f"{argument} must be a str or an os.PathLike, got {type(path).__name__}")
    return Path(path)


def expect_codes(codes, bits: int) -> None:
    """Judge codes of so many bits, one a byte or in a stream."""
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise SchemeError(f"bits must be 1 to 8, got {bits!r}")
    if not isinstance(codes, torch.Tensor) or codes.dtype != torch.uint8:
        raise DtypeError(f"codes must be a uint8 tensor, got {type_of(codes)}")
    if codes.dim() != 2:
        raise ShapeError(f"codes must have two dimensions, got shape {tuple(codes.shape)}")


def expect(field: str, value: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Judge type and shape of a tensor, where there is one."""
    if value is None:
        return
    if value.dtype != dtype:
        raise DtypeError(f"{field} must be {str(dtype).removeprefix('torch.')}, got {type_of(value)}")
    if tuple(value.shape) != shape:
        raise ShapeError(f"{field} must have shape {shape}, got {tuple(value.shape)}")


def expect_scales(value: torch.Tensor) -> None:
    """Judge the type of scales."""
    if value.dtype not in _SCALE_DTYPES:
        raise DtypeError(f"scales must be one of {', '.join(SCALE_TYPES)}, got {type_of(value)}")


def expect_float(field: str, value: torch.Tensor) -> None:
    """Judge the type of a codebook."""
    if type_of(value) not in _FLOATS:
        raise DtypeError(f"{field} must be one of {', '.join(_FLOATS)}, got {type_of(value)}")


def type_of(value) -> str:
    """``float16`` for a tensor of that type, ``list`` for a list."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else type(value).__name__
