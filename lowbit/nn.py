"""Linear, an nn.Linear whose weight is quantized, and :func:`prepare`, which packs it for its device."""

from __future__ import annotations

import copy
import warnings
from multiprocessing.reduction import ForkingPickler

import torch
from torch import nn

from .errors import DtypeError, SchemeError, ShapeError
from .ops.canonical import product_by_rows
from .ops.launch import product
from .ops.schema import check_act, check_x, type_name
from .pack import PackedWeight, pack_weight
from .pack.packed import finish, has_kernels, op_numbers
from .placeholder import NoWeight, frozen, keep_type
from .quantizers import quantize
from .scheme import Scheme
from .tensor import QuantTensor, stream_bytes

#: The parameters that hold the weight, frozen.
_HELD = ("qweight", "scales", "zeros", "perm", "codebook")
#: Most bytes of float weight that the slow path holds at a time.
_SCRATCH_BYTES = 64 << 20


class Linear(nn.Linear):
    """``y = x @ dequant(W).T + bias`` for a quantized weight ``[out_features, in_features]``; made by
    :meth:`from_linear`, :meth:`from_quant_tensor` or :func:`lowbit.quantize_model`.

    Frozen parameters ``qweight`` (uint8), ``scales``, ``zeros``, ``perm`` and ``codebook`` (or None) hold one copy of
    the weight: canonical, or packed for the device once :func:`prepare` ran (``layout`` says which; a
    codebook of 16 bits is then fp32). ``state_dict``, pickle and :meth:`quant_tensor` give the canonical form, and
    loading packs again. ``.to(dtype)`` changes ``bias`` and ``weight.dtype`` and leaves the weight as it is; a move to
    another device packs for that device. Gradients reach x and bias. There is no float weight: ``weight`` is an empty
    tensor that has its type and device.

    scheme: the :class:`~lowbit.scheme.Scheme`; dtype: type of bias and of ``weight.dtype``; act: None or "int8", see
    :func:`lowbit.matmul`; perm, codebook: whether the weight has an order of its columns, and a table of values (fp32
    in a new layer). A new layer holds zeros.
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
        nn.Module.__init__(self)
        if not isinstance(scheme, Scheme):
            raise DtypeError(f"scheme must be a lowbit.scheme.Scheme, got {type(scheme).__name__}")
        self.in_features, self.out_features = in_features, out_features
        self.scheme, self.act, self.layout = scheme, act, None
        self.float_dtype = torch.get_default_dtype() if dtype is None else dtype
        n, k = out_features, in_features
        if n < 1 or k < 1:
            raise ShapeError(f"in_features and out_features must be at least 1, got {k} and {n}")
        check_act(act, codebook=codebook)
        self._numbers = op_numbers(scheme, (n, k))
        groups, stored = (n, scheme.groups(k)), getattr(torch, scheme.scale_type)
        self._stored, self._stored_codebook = stored, torch.float32
        # Why not register_parameter: the property of that name stands in its way.
        self._parameters["weight"] = None
        has_zeros = scheme.zero_kind != "none"
        held = {
            "qweight": torch.zeros(n, stream_bytes(k, scheme.weight.bits), dtype=torch.uint8, device=device),
            "scales": torch.zeros(groups, dtype=stored, device=device),
            "zeros": torch.zeros(groups, dtype=stored, device=device) if has_zeros else None,
            "perm": torch.arange(k, dtype=torch.int32, device=device) if perm else None,
            "codebook": torch.zeros(1 << scheme.weight.bits, device=device) if codebook else None,
        }
        for name, tensor in held.items():
            self.register_parameter(name, None if tensor is None else frozen(tensor))
        free = nn.Parameter(torch.zeros(n, dtype=self.float_dtype, device=device)) if bias else None
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
        """A layer of a QuantTensor and a bias [N] (a Parameter is shared); dtype: by default the bias's or scales'."""
        if not isinstance(qt, QuantTensor):
            raise DtypeError(f"expected a QuantTensor, got {type(qt).__name__}")
        options = {"scheme": qt.scheme, "act": act, "perm": qt.perm is not None, "codebook": qt.codebook is not None}
        n, k = qt.shape
        if bias is not None and tuple(bias.shape) != (n,):
            raise ShapeError(f"bias must have shape ({n},), got {tuple(bias.shape)}")
        dtype = (qt.scales if bias is None else bias).dtype if dtype is None else dtype
        layer = cls(k, n, bias=False, device="meta", dtype=dtype, **options)
        layer._hold(qt.codes, qt.scales, qt.zeros, qt.perm, qt.codebook, layout=None)
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
            codes, scales = held["qweight"], held["scales"]
            if scales.dtype is not self._stored:
                self._restore_type()
            return product(x, codes, scales, held["zeros"], held["perm"], held["codebook"], bias, self._numbers, act)
        return self._multiply_canonical(x, bias, act)

    def prepare(self) -> Linear:
        """Pack the weight for its device, in place of the canonical form; nothing to do for one that is packed.

        Stays canonical (and slow): a device without kernels, and parameters that are no plain tensors (FSDP, DTensor).
        """
        plain = type(self.qweight) is nn.Parameter
        if self.layout is None and plain and has_kernels(self.qweight.device):
            with torch.inference_mode(False), torch.no_grad():
                pw = pack_weight(self.quant_tensor(), self.qweight.device)
                self._stored_codebook = pw.codebook_dtype
                self._hold(pw.codes, pw.scales, pw.zeros, pw.perm, pw.codebook, layout=pw.layout)
        return self

    def unprepare(self) -> Linear:
        """Put the canonical form back in place of the packed one; nothing to do for a layer that is not packed.

        For tools that cut, move or compare parameters themselves, such as FSDP: each row of a canonical tensor is a row
        of the weight. The layer then dequantizes its weight for each product, which is slow, and ``act`` needs a packed
        weight. :meth:`prepare` packs again, once the parameters are plain tensors.
        """
        if self.layout is not None:
            with torch.inference_mode(False), torch.no_grad():
                qt = self.quant_tensor()
                self._hold(qt.codes, qt.scales, qt.zeros, qt.perm, qt.codebook, layout=None)
        return self

    def quant_tensor(self) -> QuantTensor:
        """The weight in canonical form; of a layer that is not packed it shares the memory.

        Raises DtypeError for packed parameters that another tool has cut.
        """
        if self.layout is not None and hasattr(self.qweight, "placements"):
            raise DtypeError(
                "a packed weight was cut over processes and cannot be unpacked in parts; call lowbit.unprepare(model) "
                "before fully_shard"
            )
        if self.layout is not None and self.scales.dtype is not self._stored:
            self._restore_type()
        held = [None if t is None else t.detach() for t in map(self._parameters.get, _HELD)]
        shape, s = (self.out_features, self.in_features), self.scheme
        codes, scales, zeros, perm, codebook = held
        if self.layout is not None:
            book = {"codebook": codebook, "codebook_dtype": self._stored_codebook}
            packed = PackedWeight(codes, scales, zeros, perm, scheme=s, shape=shape, layout=self.layout, **book)
            return packed.unpack()
        options = {"dtype": s.weight, "group_size": s.group_size, "zero_kind": s.zero_kind}
        return QuantTensor(codes, scales, zeros, shape=shape, perm=perm, codebook=codebook, **options)

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

    # ---- how the weight is held ------------------------------------------------------------------------------------

    def _hold(self, *tensors, layout: str | None) -> None:
        for name, tensor in zip(_HELD, tensors, strict=True):
            held = self._parameters.get(name)
            if tensor is None or held is None or held.device != tensor.device:
                setattr(self, name, None if tensor is None else frozen(tensor))
            else:
                held.data = tensor
        self.layout = layout
        zeros = self._parameters["zeros"] if layout == "nvidia" else None
        self._numbers = op_numbers(self.scheme, (self.out_features, self.in_features), zeros)

    def _restore_type(self) -> None:
        """Give scales and zeros their type back. Why: tools that prepare a model for training widen all 16-bit
        parameters, past every hook; back again they are what they were."""
        for name in ("scales", "zeros"):
            tensor = self._parameters[name]
            if tensor is not None:
                tensor.data = tensor.data.to(self._stored)

    def _apply(self, fn, recurse=True):
        # Why: nobody says which device and type fn leads to; it is tried on an empty tensor.
        probe = fn(torch.empty(0, dtype=self.float_dtype, device=self.qweight.device))
        packed = self.layout is not None
        before = self.qweight.device
        moved = probe.device.type != before.type
        # Where there were no kernels a layer could not be packed; on meta there is nothing to pack.
        pack = moved and (packed or not (before.type == "meta" or has_kernels(before)))
        if moved:
            self.unprepare()
        held = {id(t) for t in map(self._parameters.get, _HELD) if t is not None}
        super()._apply(lambda t: keep_type(fn, t) if id(t) in held else fn(t), recurse)
        if probe.dtype.is_floating_point:
            self.float_dtype = probe.dtype
        if self.layout is not None:
            finish(self.qweight.device)
        return self.prepare() if pack else self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout is not None:
            for name, tensor in self._canonical().items():
                destination[prefix + name] = tensor if keep_vars else tensor.data

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        found = {name: state_dict[prefix + name] for name in _HELD if prefix + name in state_dict}
        packed = self.layout is not None
        if found:
            self.unprepare()
        for name, tensor in found.items():
            held = self._parameters.get(name)
            if held is not None and isinstance(tensor, torch.Tensor) and tensor.dtype != held.dtype:
                # Why: torch would convert without a word, and a weight would change its values.
                expected, got = type_name(held.dtype), type_name(tensor.dtype)
                errors.append(f"{prefix}{name} must be {expected}, got {got}; make the layer with the stored scheme")
        if not errors:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if packed:
            self.prepare()

    def _canonical(self) -> dict[str, nn.Parameter]:
        qt = self.quant_tensor()
        tensors = zip(_HELD, (qt.codes, qt.scales, qt.zeros, qt.perm, qt.codebook), strict=True)
        return {name: frozen(tensor) for name, tensor in tensors if tensor is not None}

    def __getstate__(self):
        # Why: packed bytes belong to one version of lowbit; a pickle may outlive it.
        state = self.__dict__.copy()
        if self.layout is not None:
            state["_parameters"] = {**self._parameters, **self._canonical()}
            state.update(layout=None, _was_packed=True)
        return state

    def __setstate__(self, state):
        state = dict(state)
        packed = state.pop("_was_packed", False)
        state.setdefault("_stored", getattr(torch, state["scheme"].scale_type))  # pickles of 0.1.0 lack it
        super().__setstate__(state)
        # Why: pickles of version 0.1.0 have no place for it, later ones none for its type.
        codebook = self._parameters.setdefault("codebook", None)
        self.__dict__.setdefault("_stored_codebook", torch.float32 if codebook is None else codebook.dtype)
        if packed:
            self.prepare()

    def __deepcopy__(self, memo):
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        if new.layout is not None:
            finish(new.qweight.device)
        return new

    # ---- the slow path -------------------------------------------------------------------------------------------

    def _multiply_canonical(self, x: torch.Tensor, bias: torch.Tensor | None, act: str | None) -> torch.Tensor:
        if not torch.compiler.is_compiling() and self.qweight.device.type != "meta":
            _warn_once(self.qweight.device)
        check_x(x, self.in_features, self.qweight.device)
        if act is not None:
            raise SchemeError(f"act={act!r} needs a packed weight; call lowbit.prepare(model) first")
        return product_by_rows(x, self.quant_tensor(), bias, _SCRATCH_BYTES)


def prepare(model: nn.Module) -> nn.Module:
    """Pack every :class:`Linear` of a model for the device it lies on, in place: canonical -> packed, once.

    Layers are packed one after the other, so memory grows by one layer at most. Returns the model.
    """
    for layer in _layers_of(model):
        layer.prepare()
    return model


def unprepare(model: nn.Module) -> nn.Module:
    """Give every :class:`Linear` of a model its canonical form back, in place; what FSDP needs before it cuts them.

    One layer after the other, so memory grows by one layer at most. Returns the model; :func:`prepare` packs again.
    """
    for layer in _layers_of(model):
        layer.unprepare()
    return model


def _layers_of(model: nn.Module) -> list[Linear]:
    if not isinstance(model, nn.Module):
        raise DtypeError(f"expected an nn.Module, got {type(model).__name__}")
    return [module for module in model.modules() if isinstance(module, Linear)]


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
