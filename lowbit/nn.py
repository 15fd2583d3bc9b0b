"""Linear, an nn.Linear whose weight is quantized: how it is made and what it multiplies."""

from __future__ import annotations

import warnings
from multiprocessing.reduction import ForkingPickler

import torch
from torch import nn

from .errors import DtypeError, SchemeError
from .ops.canonical import product_by_rows
from .ops.launch import product
from .ops.schema import check_act, check_bias, check_x
from .pack.packed import has_kernels
from .placeholder import NoWeight
from .quantizers import quantize
from .scheme import Scheme
from .tensor import QuantTensor
from .weight_holder import WeightHolder

#: Most bytes of float weight that the slow path holds at a time.
_SCRATCH_BYTES = 64 << 20


class Linear(WeightHolder, nn.Linear):
    """``y = x @ dequant(W).T + bias`` for a quantized weight ``[out_features, in_features]``; made by
    :meth:`from_linear`, :meth:`from_quant_tensor` or :func:`lowbit.quantize_model`.

    Frozen parameters ``qweight`` (uint8), ``scales``, ``zeros``, ``perm``, ``codebook`` and ``row_scales`` (or None)
    hold one copy of the weight: canonical, or packed for the device once :func:`lowbit.prepare` ran (``layout`` says
    which; a codebook of 16 bits is then fp32, and scales of 8 bits have 16 on a GPU). ``state_dict``, pickle and
    :meth:`quant_tensor` give the canonical form, and loading packs again. ``.to(dtype)`` changes ``bias`` and
    ``weight.dtype`` and leaves the weight as it is; a move to another device packs for that device. Gradients reach x
    and bias. There is no float weight: ``weight`` is an empty tensor that has its type and device.

    scheme: the :class:`~lowbit.scheme.Scheme`; dtype: type of bias and of ``weight.dtype``; act: None or "int8", see
    :func:`lowbit.matmul`; perm, codebook: whether the weight has an order of its columns, and a table of values (fp32
    in a new layer). A new layer holds zeros. Raises DtypeError, ShapeError, DeviceError or SchemeError.
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        scheme: Scheme,
        act=None,
        perm=False,
        codebook=False,
    ):
        super().__init__(in_features, out_features, scheme, device=device, dtype=dtype, perm=perm, codebook=codebook)
        check_act(act, codebook=codebook)
        self.act = act
        # Why not register_parameter: the property of that name stands in its way.
        self._parameters["weight"] = None
        free = nn.Parameter(torch.zeros(out_features, dtype=self.float_dtype, device=device)) if bias else None
        self.register_parameter("bias", free)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, dtype="int4", *, group_size=128, method="mse", zero_kind=None, act=None, prepare=True
    ) -> Linear:
        """Quantize an nn.Linear (left as it is; the bias is shared). Options and errors: :func:`lowbit.quantize`."""
        weight = linear._parameters.get("weight") if isinstance(linear, nn.Linear) else None
        if weight is None:
            raise DtypeError(f"expected an nn.Linear with a float weight of its own, got {type(linear).__name__}")
        qt = quantize(weight.detach(), dtype, group_size=group_size, method=method, zero_kind=zero_kind)
        layer = cls.from_quant_tensor(qt, linear.bias, dtype=weight.dtype, act=act, prepare=prepare)
        return layer.train(linear.training)

    @classmethod
    def from_quant_tensor(cls, qt: QuantTensor, bias=None, *, dtype=None, act=None, prepare=True) -> Linear:
        """A layer of a QuantTensor and a bias [N] (a Parameter is shared); dtype: by default the bias's, or what
        ``qt.dequantize()`` gives. Raises DtypeError, ShapeError, DeviceError or SchemeError; FormatError for a perm
        that is not a permutation, if it packs."""
        if not isinstance(qt, QuantTensor):
            raise DtypeError(f"expected a QuantTensor, got {type(qt).__name__}")
        options = {"scheme": qt.scheme, "act": act, "perm": qt.perm is not None, "codebook": qt.codebook is not None}
        n, k = qt.shape
        if bias is not None:
            # Why: ``double()`` makes layers of float64 too, whose products refuse x.
            wide = isinstance(bias, torch.Tensor) and bias.dtype is torch.float64
            check_bias(bias.float() if wide else bias, n, qt.device)
        if dtype is None:
            dtype = getattr(torch, qt.scheme.float_type) if bias is None else bias.dtype
        layer = cls(k, n, bias=False, device="meta", dtype=dtype, **options)
        layer._hold(qt.codes, qt.scales, qt.zeros, qt.perm, qt.codebook, qt.row_scales, layout=None)
        if bias is not None:
            layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        return layer.prepare() if prepare else layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Why past the attributes, here and below: a module looks for them in a function of Python, 0.5 us each. A bias
        # that is not there is computed by what took its place (pruning, parametrizations).
        held = self._parameters
        return self._multiply(x, held["bias"] if "bias" in held else self.bias, self.act)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, act: str | None) -> torch.Tensor:
        # Why not in forward: accelerate holds on to that method, past a change of class (fused.py).
        if self.layout is not None:
            held = self._parameters
            codes, scales, book, rows = held["qweight"], held["scales"], held["codebook"], held["row_scales"]
            if scales.dtype is not self._stored:
                self._restore_type()
            return product(x, codes, scales, held["zeros"], held["perm"], book, rows, bias, self._numbers, act)
        return self._multiply_canonical(x, bias, act)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The float weight ``[out_features, in_features]``, by default in ``weight.dtype``."""
        return self.quant_tensor().dequantize(self.float_dtype if dtype is None else dtype)

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor with the type and device of the layer, for code that asks for them."""
        held = self._parameters["weight"]
        if held is not None:  # while transformers loads a float checkpoint, on meta: it counts the bytes of parameters
            return held
        return torch.empty(0, dtype=self.float_dtype, device=self.qweight.device).as_subclass(NoWeight)

    def requires_grad_(self, requires_grad: bool = True) -> Linear:
        """Freeze or free the bias; the weight stays frozen."""
        if self.bias is not None:
            self.bias.requires_grad_(requires_grad)
        return self

    def extra_repr(self) -> str:
        s = self.scheme
        zeros = "" if s.zero_kind == "none" else f", zero_kind={s.zero_kind!r}"
        act = "" if self.act is None else f", act={self.act!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{s.weight}, group_size={s.group_size}{zeros}{act}, layout={self.layout!r}"
        )

    def _multiply_canonical(self, x: torch.Tensor, bias: torch.Tensor | None, act: str | None) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if not torch.compiler.is_compiling() and self.qweight.device.type != "meta":
            _warn_once(self.qweight.device)
        check_x(x, self.in_features, self.qweight.device)
        if act is not None:
            raise SchemeError(f"act={act!r} needs a packed weight; call lowbit.prepare(model) first")
        return product_by_rows(x, self.quant_tensor(), bias, _SCRATCH_BYTES)


def _reduce_for_process(layer: Linear):
    # Why: another process of this machine may share the packed bytes; and canonical tensors made for a pickle would be
    # gone, with their files in shared memory, before a new process has started.
    return _rebuild_in_process, (type(layer), layer.__dict__)


def _rebuild_in_process(cls, state) -> Linear:
    layer = cls.__new__(cls)
    layer.__dict__.update(state)
    return layer


ForkingPickler.register(Linear, _reduce_for_process)


_warned: set[torch.device] = set()


def _warn_once(device: torch.device) -> None:
    if device in _warned:
        return
    _warned.add(device)
    if has_kernels(device):
        reason = "a lowbit.Linear is not packed; call lowbit.prepare(model) once after loading"
    else:
        reason = f"lowbit has no kernels for {device}"
    warnings.warn(f"{reason}: its products run by dequantizing the weight every time, which is slow", stacklevel=5)
