"""QuantTensor, the canonical, device-free form of a quantized weight: what files hold and ``pack_weight`` reads.

The form is specified in docs/format.md. In short, for a weight ``[N, K]`` of b-bit codes in groups of g along K:

    codes   uint8 [N, ceil(K*b/8)]   row by row a dense little-endian bit stream: code k is bits k*b .. k*b+b-1
    scales  [N, ceil(K/g)]           float16, bfloat16, float32, or of 8 bits: float8_e8m0fnu, float8_e4m3fn
    zeros   like scales, or None     W = s*v (none), s*(v - zero) (zero), s*v + zero (min)
    perm    int32 [K], or None       stored column j is column perm[j] of the weight (x is gathered: x[..., perm])
    codebook  [2**b], or None        the value of each code, in place of the type's own
    row_scales  float32 [N, 1]       with scales of float8_e4m3fn, else None: W = row_scale * s*v
"""

from __future__ import annotations

import os

import torch

from . import bit_stream
from .bit_stream import row_chunks, stream_bytes
from .dtypes import kernel_type, weight_type
from .errors import DeviceError, DtypeError, FormatError, SchemeError
from .scheme import Scheme, Schemed
from .tensor_checks import checked_device, checked_path, checked_shape, expect, expect_float, expect_scales, type_of
from .tensor_contents import expect_contents

#: The tensors, in the order in which everything that holds a weight has them.
FIELDS = ("codes", "scales", "zeros", "perm", "codebook", "row_scales")
#: Their names in files and layers.
NAMES = ("qweight", *FIELDS[1:])
#: Those that have a row for each row of the weight.
BY_ROW = ("codes", "scales", "zeros", "row_scales")


class QuantTensor(Schemed):
    """A quantized weight in canonical form.

    codes: uint8 ``[N, ceil(K*bits/8)]`` bit stream; scales, zeros: ``[N, ceil(K/group_size)]`` (one column for the
    whole row, -1) of one float type; dtype: a weight type or its name; shape: ``(N, K)``, both at least 1; zero_kind:
    "none", "zero" or "min", by default what the type needs; perm: int32 ``[K]``; codebook: float ``[2**bits]``, only
    with uint types; row_scales: float32 ``[N, 1]``, with scales of float8_e4m3fn and only with them. Scales of 8 bits
    go without zeros. All tensors are on one device; they are kept without a copy when contiguous.

    Raises DtypeError, ShapeError, DeviceError or SchemeError. Contents are judged by :meth:`validate`, not here.
    """

    def __init__(
        self,
        codes,
        scales,
        zeros=None,
        *,
        dtype,
        shape,
        group_size=128,
        zero_kind=None,
        perm=None,
        codebook=None,
        row_scales=None,
    ):
        wtype = weight_type(dtype)
        n, k = self.shape = checked_shape(shape)
        tensors = dict(zip(FIELDS, (codes, scales, zeros, perm, codebook, row_scales), strict=True))
        for field, value in tensors.items():
            if value is None and field not in ("codes", "scales"):
                continue
            if not isinstance(value, torch.Tensor):
                raise DtypeError(f"{field} must be a torch.Tensor, got {type(value).__name__}")
            if value.device != codes.device:
                raise DeviceError(f"{field} must be on the device of codes, {codes.device}, got {value.device}")
        expect_scales(scales)
        if zero_kind is None and codebook is not None and zeros is None:
            zero_kind = "none"
        self.scheme = Scheme.make(wtype, group_size, zero_kind, type_of(scales))
        if (zeros is None) != (self.scheme.zero_kind == "none"):
            wanted = "no zeros" if zeros is not None else "zeros of the scales' type and shape"
            raise SchemeError(f"zero_kind {self.scheme.zero_kind!r} of {wtype} goes with {wanted}")
        if (row_scales is None) == self.scheme.has_row_scales:
            wanted = "row_scales" if row_scales is None else "no row_scales"
            raise SchemeError(f"scales of {self.scheme.scale_type} go with {wanted}")
        kernel_type(wtype, codebook is not None)  # a codebook goes with uint types alone
        groups = self.scheme.groups(k)
        expect("codes", codes, (n, stream_bytes(k, wtype.bits)), torch.uint8)
        expect("scales", scales, (n, groups), scales.dtype)
        expect("zeros", zeros, (n, groups), scales.dtype)
        expect("perm", perm, (k,), torch.int32)
        expect("row_scales", row_scales, (n, 1), torch.float32)
        if codebook is not None:
            expect_float("codebook", codebook)
            expect("codebook", codebook, (1 << wtype.bits,), codebook.dtype)
        for field, value in tensors.items():
            setattr(self, field, None if value is None else value.detach().contiguous())

    #: Codes, one a byte, to a bit stream and back: for users, lowbit itself asks bit_stream.
    pack_codes, unpack_codes = staticmethod(bit_stream.pack), staticmethod(bit_stream.unpack)

    @classmethod
    def from_codes(cls, codes, scales, zeros=None, *, dtype, **options) -> QuantTensor:
        """A QuantTensor of codes uint8 ``[N, K]``, one a byte; options: those of QuantTensor but for the shape.

        Raises SchemeError for a code of 2**bits or more.
        """
        wtype = weight_type(dtype)
        stream = bit_stream.pack(codes, wtype.bits)
        return cls(stream, scales, zeros, dtype=wtype, shape=tuple(codes.shape), **options)

    def unpack(self) -> torch.Tensor:
        """The codes, one a byte: uint8 ``[N, K]``, in stored order (``perm`` is not applied)."""
        return bit_stream.unpack(self.codes, self.dtype.bits, self.shape[1])

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight ``[N, K]`` for which ``x @ W.T`` is the product: columns in the caller's order, ``perm`` undone.

        dtype: a float type, by default that of the scales (bfloat16 for float8_e8m0fnu, float32 for float8_e4m3fn).
        Arithmetic is fp32 (float64 if asked for float64), rounded once to dtype.
        """
        dtype = getattr(torch, self.scheme.float_type) if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise DtypeError(f"expected a floating-point torch.dtype such as torch.float16, got {dtype}")
        (n, k), wtype = self.shape, self.dtype
        work = torch.float64 if dtype == torch.float64 else torch.float32
        values = wtype.values if self.codebook is None else self.codebook
        table = torch.as_tensor(values, dtype=work, device=self.device)
        out = torch.empty(n, k, dtype=dtype, device=self.device)
        perm = None if self.perm is None else self.perm.long()
        for rows in row_chunks(n, k, self.device):
            codes = bit_stream.unpack(self.codes[rows], wtype.bits, k)
            part = table.index_select(0, codes.flatten().int()).view(codes.shape)
            scales = self.scales[rows].to(work)
            if self.row_scales is not None:
                scales = scales * self.row_scales[rows].to(work)
            scales = self._spread(scales)
            zeros = None if self.zeros is None else self._spread(self.zeros[rows].to(work))
            if self.zero_kind == "zero":
                part = part - zeros
            part = part * scales
            if self.zero_kind == "min":
                part = part + zeros
            if perm is None:
                out[rows] = part.to(dtype)
            else:
                out[rows] = torch.empty_like(part).index_copy_(1, perm, part).to(dtype)
        return out

    def _spread(self, per_group: torch.Tensor) -> torch.Tensor:
        """``[n, G]`` to ``[n, K]``, or to ``[n, 1]`` when a row is one group."""
        if per_group.shape[1] == 1:
            return per_group
        return per_group.repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]

    def validate(self, name: str = "weight") -> QuantTensor:
        """Judge the contents and return self. Raises FormatError that names the tensor.

        Refused: bits set behind the last code of a row, NaN or infinity among scales, zeros or a codebook, codes that
        mean NaN or infinity, a perm that is not a permutation of 0..K-1.
        """
        expect_contents(self, name)
        return self

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.numel() * t.element_size() for t in self._tensors().values())

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {field: value for field in FIELDS if (value := getattr(self, field)) is not None}

    def _map(self, change) -> QuantTensor:
        tensors = {field: change(value) for field, value in self._tensors().items()}
        options = {"dtype": self.dtype, "shape": self.shape, "group_size": self.group_size, "zero_kind": self.zero_kind}
        return QuantTensor(**tensors, **options)

    def to(self, device) -> QuantTensor:
        """The same weight on another device, meta too; no copy when it is there already.

        Raises DeviceError for a device that torch does not see.
        """
        device = checked_device(device)
        return self._map(lambda t: t.to(device))

    def cpu(self) -> QuantTensor:
        return self.to("cpu")

    def cuda(self) -> QuantTensor:
        return self.to("cuda")

    def clone(self) -> QuantTensor:
        return self._map(torch.clone)

    def __eq__(self, other) -> bool:
        """Every field, type and byte the same (so -0 differs from 0, and equal NaNs are equal); devices may differ."""
        if not isinstance(other, QuantTensor):
            return NotImplemented
        mine, theirs = self._tensors(), other._tensors()
        if self.scheme != other.scheme or self.shape != other.shape or mine.keys() != theirs.keys():
            return False
        return all(
            t.dtype == theirs[f].dtype and torch.equal(_as_integers(t), _as_integers(theirs[f].to(t.device)))
            for f, t in mine.items()
        )

    __hash__ = None

    def __getstate__(self):
        # Why bytes: of torch's tensors, floats of 8 bits don't come back out of a plain pickle.
        return {**self.__dict__, "scales": as_bytes(self.scales)}

    def __setstate__(self, state):
        self.__dict__.update({"row_scales": None, **state})  # pickles from before there were any lack them
        self.scales = self.scales.view(getattr(torch, self.scheme.scale_type))

    def __repr__(self) -> str:
        extra = "".join(f", {field}" for field in FIELDS[3:] if getattr(self, field) is not None)
        zeros = "" if self.zero_kind == "none" else f", zero_kind={self.zero_kind!r}"
        return (
            f"QuantTensor({self.dtype}, shape={self.shape}, group_size={self.group_size}{zeros}, "
            f"scales={self.scheme.scale_type}{extra}, device={str(self.device)!r}, nbytes={self.nbytes})"
        )

    def save(self, path, name: str = "weight") -> None:
        """Write one safetensors file of format 1 (docs/format.md), the tensors called ``<name>.qweight`` and so on.

        Raises DtypeError for a path that is none, FormatError for contents that :meth:`validate` refuses.
        """
        # Why here: files are a later room; only these two conveniences reach for it, and only when called.
        from .checkpoint.native import save

        save(checked_path(path), {name: self})

    @staticmethod
    def load(path, device="cpu") -> QuantTensor:
        """The one weight of a file written by :meth:`save`.

        Raises FormatError for any other content and for a folder, DtypeError for a path that is none, DeviceError for
        a device that torch does not see.
        """
        from .checkpoint.native import load

        if os.path.isdir(checked_path(path)):
            raise FormatError(f"{path}: expected a file written by QuantTensor.save, got a folder")
        weights = load(path, device=checked_device(device))
        if len(weights) != 1:
            raise FormatError(f"{path}: expected one weight, got {len(weights)}; use lowbit.checkpoint.native.load")
        return next(iter(weights.values()))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Floats of 8 bits as uint8, all else as it is. Why: few of torch's operations know floats of 8 bits."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as whole numbers of the same size: compares NaN and -0 by their bits, for any strides."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
