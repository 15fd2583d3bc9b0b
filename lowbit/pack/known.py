"""What ops are told of a weight beside its tensors, and what is found out for that when it is packed."""

from __future__ import annotations

import torch

from ..dtypes import weight_id
from ..scheme import EVEN_SCALES, WHOLE_ZEROS, ZERO_KINDS, Scheme
from ..tensor_contents import has_values

#: The largest number of fp16 is 65504: what a scale may be, in units, when a code of 2^-24 is brought to it.
_MOST = 65504 / 65536 * 2.0**-8
#: The least root mean square of all values, and of those of a row, in units. Below 2^-14 fp16 has fewer digits: there
#: rounding costs 2.8e-4 of a value, 5.6e-4 at 2^-15; what it costs larger ones is 2.1e-4. Why no less of a row: then
#: what takes the offset away has fewer digits too, by an error that all values of a group have in common.
_LEAST, _LEAST_OF_ROW = 2.0**-14, 2.0**-15
#: The exponents of units for integers of 1 to 8 bits: the first, unless scales are too large for that, and how many.
#: Why no smaller ones: layers of a model that is compiled once are told the same of, if they can be; with 4 bits the
#: first is for scales of 0.0009 to 0.125, 0.0004 in some rows.
_FIRST, _UNITS = (5, 5, 5, 5, 5, 5, 4, 4), 9


def op_numbers(
    scheme: Scheme,
    shape: tuple[int, int],
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> tuple[int, ...]:
    """What the product ops take after the tensors: n, k, id of the weight type, group size, id of the zero kind.

    scales, zeros: those of the weight, packed, for kernels that are faster where all zeros are whole numbers (as from
    GPTQ and AWQ; the zero kind is WHOLE_ZEROS then), or scales are even (EVEN_SCALES and more). Reading them waits for
    the device, so this is for when a weight is packed.
    """
    kind = ZERO_KINDS.index(scheme.zero_kind)
    if _are_whole(scheme, zeros):
        kind = WHOLE_ZEROS
    elif (unit := _even_unit(scheme, scales)) is not None:
        kind = EVEN_SCALES + unit
    return (*shape, weight_id(scheme.weight), scheme.group_size, kind)


def _are_whole(scheme: Scheme, zeros: torch.Tensor | None) -> bool:
    if scheme.zero_kind != "zero" or scheme.weight.kind != "uint" or not has_values(zeros):
        return False
    values = zeros.detach().float()
    # Why 2^bits too: GPTQ's oldest format has zeros that are one more than a code.
    return bool(((values == values.round()) & (values >= 0) & (values <= 2**scheme.weight.bits)).all())


def _even_unit(scheme: Scheme, scales: torch.Tensor | None) -> int | None:
    """The exponent of the unit in which fp16 holds all values of a weight of integers without zeros, and none with so
    few digits that it counts; None where there is none. scales: ``[N/16, G, 16]``.
    """
    # Why not all: kernels for short groups, floats and codebooks do not ask, others read scales as pairs of fp16.
    if scheme.zero_kind != "none" or scheme.weight.kind != "int" or 0 < scheme.group_size < 128:
        return None
    if scheme.held_scales("nvidia") != "float16" or not has_values(scales) or scales.numel() == 0:
        return None
    values = scheme.weight.values
    step = values[1] - values[0]
    # The root mean square of values without scale. Why half: that of all codes, but groups are mostly normal; of 1 bit
    # so that the offset keeps its digits.
    typical = (sum(v * v for v in values) / len(values)) ** 0.5 * 0.5
    found = scales.detach().float()
    rows = found.square().mean(1)
    least = torch.where(rows > 0, rows, torch.inf).min()  # a row of zeros has nothing to lose
    whole = torch.where(rows > 0, rows, least).mean()  # nor do rows that only fill the last block
    most, least, whole = torch.stack([found.abs().max(), least.sqrt(), whole.sqrt()]).tolist()
    first = _FIRST[scheme.weight.bits - 1]
    for unit in range(first, first + _UNITS):
        if most * step <= _MOST * 2.0**unit:  # not so of NaN
            enough = whole * typical >= _LEAST * 2.0**unit and least * typical >= _LEAST_OF_ROW * 2.0**unit
            return unit if enough else None
    return None
