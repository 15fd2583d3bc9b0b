"""PackedWeight, a quantized weight in the layout that kernels read, and :func:`pack_weight`, which makes it.

Private to a version and a device class: never saved, made again from the :class:`~lowbit.tensor.QuantTensor`.
"""

from __future__ import annotations

import functools

import torch

from .. import cuda_devices, extension
from ..bit_stream import stream_bytes
from ..errors import DeviceError, DtypeError
from ..scheme import Scheme, Schemed
from ..tensor import QuantTensor, as_bytes
from ..tensor_checks import named_device
from ..tensor_contents import expect_perm, has_values
from . import layout as _layout
from .known import op_numbers

_LAYOUT_OF_DEVICE = {"cpu": "cpu", "cuda": "nvidia"}


class PackedWeight(Schemed):
    """A packed weight; make it with :func:`pack_weight`. Holds one copy of the codes and nothing else of size.

    codes: uint8 in ``layout`` (formula and picture: lowbit/pack/layout.py); scales, zeros: ``[N/16 rounded up, G, 16]``
    in the type that the layout has (Scheme.held_scales), zeros None without a zero point; perm: int32 ``[K]`` or None
    (the product reads ``x[..., perm]``); codebook: fp32 ``[2**bits]`` or None (codebook_dtype: the type that
    :meth:`unpack` gives it back in, by default what it comes in); row_scales: fp32 ``[N, 1]`` or None; scheme: the
    :class:`~lowbit.scheme.Scheme`; shape: ``(N, K)`` unpadded; layout: its name; numbers: what ops are told
    (:func:`~lowbit.pack.known.op_numbers`); native: whether kernels of its device read it here.
    """

    def __init__(
        self,
        codes,
        scales,
        zeros,
        perm,
        *,
        scheme: Scheme,
        shape: tuple[int, int],
        layout: str,
        codebook=None,
        codebook_dtype=None,
        row_scales=None,
    ):
        self.row_scales = _fixed(row_scales)
        self.codes, self.scales, self.zeros, self.perm = map(_fixed, (codes, scales, zeros, perm))
        self.codebook_dtype = codebook.dtype if codebook_dtype is None and codebook is not None else codebook_dtype
        self.codebook = _fixed(None if codebook is None else codebook.float())
        self.scheme = scheme
        self.shape = shape
        self.layout = layout
        self.numbers = op_numbers(scheme, shape, *((self.scales, self.zeros) if layout == "nvidia" else ()))
        # Why here: a product asks for it every time.
        self.native = layout == _LAYOUT_OF_DEVICE.get(codes.device.type) and has_kernels(codes.device)

    def __getstate__(self):
        return {**self.__dict__, "scales": as_bytes(self.scales)}  # as QuantTensor does it

    def __setstate__(self, state):
        # Why: copies and pickles come here, and they write packed bytes.
        self.__dict__.update(state)
        self.scales = _fixed(self.scales.detach().view(getattr(torch, self.scheme.held_scales(self.layout))))
        finish(self.device)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        tensors = (self.codes, self.scales, self.zeros, self.perm, self.codebook, self.row_scales)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def unpack(self) -> QuantTensor:
        """The QuantTensor that was packed, byte for byte, on this device."""
        _refuse_capture("unpack")
        n, k = self.shape
        stored = getattr(torch, self.scheme.scale_type)
        return QuantTensor(
            _run_unpack(self.codes, n, k, self.scheme.weight.bits, self.layout),
            _layout.unpack_groups(self.scales, n, self.layout, stored),
            None if self.zeros is None else _layout.unpack_groups(self.zeros, n, self.layout, stored),
            dtype=self.scheme.weight,
            shape=self.shape,
            group_size=self.scheme.group_size,
            zero_kind=self.scheme.zero_kind,
            perm=self.perm,
            codebook=None if self.codebook is None else self.codebook.to(self.codebook_dtype),
            row_scales=self.row_scales,
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole weight ``[N, K]`` as floats (QuantTensor.dequantize): for looking at it, not for products."""
        return self.unpack().dequantize(dtype)

    def to(self, device) -> PackedWeight:
        """The same weight on another device, repacked when that device's kernels read another layout.

        Returns self when it is there already. Raises DeviceError like :func:`pack_weight`.
        """
        device = _device(device)
        if device == self.device:
            return self
        if self.layout != _LAYOUT_OF_DEVICE[device.type]:
            return pack_weight(self.unpack(), device)
        tensors = (self.codes, self.scales, self.zeros, self.perm, self.codebook, self.row_scales)
        *moved, codebook, row_scales = [None if t is None else t.to(device) for t in tensors]
        finish(device)
        options = {"scheme": self.scheme, "shape": self.shape, "layout": self.layout, "row_scales": row_scales}
        return PackedWeight(*moved, codebook=codebook, codebook_dtype=self.codebook_dtype, **options)

    def __repr__(self) -> str:
        s = self.scheme
        zeros = "" if s.zero_kind == "none" else f", zero_kind={s.zero_kind!r}"
        perm = "".join(f", {field}" for field in ("perm", "codebook", "row_scales") if getattr(self, field) is not None)
        return (
            f"PackedWeight({s.weight}, shape={self.shape}, group_size={s.group_size}{zeros}, "
            f"scales={s.scale_type}{perm}, layout={self.layout!r}, device={str(self.device)!r}, nbytes={self.nbytes})"
        )


def pack_weight(qt: QuantTensor, device="cpu", *, layout: str | None = None) -> PackedWeight:
    """Put a QuantTensor into the layout that the kernels of ``device`` read; ``pack_weight(qt).unpack() == qt``.

    device: "cpu" or a CUDA device; layout: by default the device's own ("cpu", "nvidia" for CUDA). Raises DtypeError
    when qt is not a QuantTensor, DeviceError for a device that lowbit has no kernels for and for a qt on meta,
    SchemeError for an unknown layout, FormatError for a perm that is not a permutation. All other contents (NaN among
    scales, codes that mean NaN, bits behind the last code) are judged by :meth:`QuantTensor.validate` alone.
    """
    if not isinstance(qt, QuantTensor):
        raise DtypeError(f"expected a QuantTensor (lowbit.quantize makes one), got {type(qt).__name__}")
    device = _device(device)
    layout = _layout.check_layout(_LAYOUT_OF_DEVICE[device.type] if layout is None else layout)
    if qt.device.type == "meta":
        raise DeviceError("expected a weight that has values, got one on meta; load it first")
    _refuse_capture("pack")
    if has_values(qt.perm):  # Why this alone: kernels read x by it, unchecked
        expect_perm(qt.perm, "weight")
    qt = qt.to(device)
    (n, k), bits = qt.shape, qt.dtype.bits
    packed = PackedWeight(
        _run_pack(qt.codes, n, k, bits, layout),
        _layout.pack_groups(qt.scales, layout),
        None if qt.zeros is None else _layout.pack_groups(qt.zeros, layout),
        qt.perm,
        scheme=qt.scheme,
        shape=qt.shape,
        layout=layout,
        codebook=qt.codebook,
        row_scales=qt.row_scales,
    )
    finish(device)
    return packed


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether lowbit's kernels run on a device here; where they do not, torch operations do the work. For a GPU without
    them one warning says why.
    """
    if device.type != "cuda":
        return device.type == "cpu"
    try:
        return cuda_devices.cuda_kernels(device.index)
    except ImportError:  # ExtensionError is one
        return False


def finish(device: torch.device) -> None:
    """Wait until packed bytes that were just written are in the memory of a GPU."""
    # Why: kernels read packed bytes before they wait for the kernel in front of them (programmatic dependent launch),
    # so the bytes must be there before any product is launched, on whatever stream.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _fixed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    # Why parameters: torch.compile takes their sizes as fixed. Those of a tensor it would take for the batch size of
    # an x that has the same one, and compile again for the next batch.
    return None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)


def _device(device) -> torch.device:
    device = named_device(device)
    if device.type not in _LAYOUT_OF_DEVICE:
        raise DeviceError(f"expected a cpu or cuda device, got '{device}': lowbit has no kernels for it")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"expected a device that torch sees, got '{device}': this torch finds no CUDA; use 'cpu'")
        count = torch.cuda.device_count()
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if device.index >= count:
            raise DeviceError(f"expected a device that torch sees (cuda:0 to cuda:{count - 1}), got '{device}'")
    elif device.index is not None:
        device = torch.device("cpu")
    return device


def _refuse_capture(what: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise DeviceError(f"cannot {what} a weight while a CUDA graph is captured; {what} it before the capture")


def _native(name: str, device: torch.device, layout: str):
    """The compiled op, or None where there is none: then the torch operations of layout.py give the same bytes."""
    if not has_kernels(device) or (device.type == "cuda" and layout != "nvidia"):
        return None
    try:
        extension.load()
    except ImportError:
        return None
    return getattr(torch.ops.lowbit, name)


def _run_pack(stream: torch.Tensor, n: int, k: int, bits: int, layout: str) -> torch.Tensor:
    op = _native("pack_codes", stream.device, layout)
    if op is None:
        return _layout.pack_codes(stream, n, k, bits, layout)
    # Why here and not in the op: out of memory stays torch.OutOfMemoryError.
    packed = torch.empty(_layout.codes_shape(layout, n, k, bits), dtype=torch.uint8, device=stream.device)
    op(stream, n, k, bits, _layout.LAYOUTS.index(layout), packed)
    return packed


def _run_unpack(packed: torch.Tensor, n: int, k: int, bits: int, layout: str) -> torch.Tensor:
    op = _native("unpack_codes", packed.device, layout)
    if op is None:
        return _layout.unpack_codes(packed, n, k, bits, layout)
    stream = torch.empty((n, stream_bytes(k, bits)), dtype=torch.uint8, device=packed.device)
    op(packed, n, k, bits, _layout.LAYOUTS.index(layout), stream)
    return stream
