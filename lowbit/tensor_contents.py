"""What the tensors of a quantized weight have to hold; errors name the tensor, what was expected and what came."""

from __future__ import annotations

import torch

from . import bit_stream
from .bit_stream import row_chunks
from .errors import FormatError


def expect_contents(qt, name: str) -> None:
    """Raises FormatError for what :meth:`lowbit.tensor.QuantTensor.validate` refuses."""
    (n, k), wtype = qt.shape, qt.dtype
    used = k * wtype.bits % 8
    if used:
        bad = int((qt.codes[:, -1] >> used).count_nonzero())
        if bad:
            raise FormatError(f"{name}.qweight: bits behind a row's last code must be 0, in {bad} rows some are set")
    for field in ("scales", "zeros", "codebook", "row_scales"):
        value = getattr(qt, field)
        if value is not None:
            # Why float: torch does not ask numbers of 8 bits.
            wide = value.float() if value.element_size() == 1 else value
            bad = value.numel() - int(wide.isfinite().count_nonzero())
            if bad:
                count = f"{bad} of {value.numel()}"
                raise FormatError(f"{name}.{field}: expected finite numbers, {count} are NaN or infinite")
    if wtype.invalid_codes and qt.codebook is None:
        legal = torch.tensor([code not in wtype.invalid_codes for code in range(1 << wtype.bits)], device=qt.device)
        for rows in row_chunks(n, k, qt.device):
            codes = bit_stream.unpack(qt.codes[rows], wtype.bits, k)
            bad = codes.numel() - int(legal[codes.int()].count_nonzero())
            if bad:
                raise FormatError(f"{name}.qweight: {bad} codes mean NaN or infinity in {wtype}, expected none")
    expect_perm(qt.perm, name)


def expect_perm(perm: torch.Tensor | None, name: str) -> None:
    """Raises FormatError unless perm, if there is one, holds each of its indices once."""
    if perm is not None and not is_permutation(perm):
        last = len(perm) - 1
        raise FormatError(f"{name}.perm: expected a permutation of 0..{last}, got repeated or outside numbers")


def is_permutation(perm: torch.Tensor) -> bool:
    """Whether an int32 perm holds each of its indices once. Reading it waits for the device."""
    expected = torch.arange(len(perm), dtype=torch.int32, device=perm.device)
    return torch.equal(perm.sort().values, expected)


def has_values(tensor: torch.Tensor | None) -> bool:
    """Whether there is a tensor whose numbers can be read."""
    # Why the types: fake tensors have no values.
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
