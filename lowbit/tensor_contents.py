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
    if qt.perm is not None:
        expected = torch.arange(k, dtype=torch.int32, device=qt.device)
        if not torch.equal(qt.perm.sort().values, expected):
            raise FormatError(f"{name}.perm: expected a permutation of 0..{k - 1}, got repeated or outside numbers")
