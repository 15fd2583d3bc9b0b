"""WeightHolder, the quantized weight of a layer: packed and unpacked, moved, saved, loaded, pickled and copied."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from .bit_stream import stream_bytes
from .dtypes import kernel_type
from .errors import DtypeError, FormatError, ShapeError
from .ops.schema import type_name
from .pack import PackedWeight, pack_weight
from .pack.known import op_numbers
from .pack.packed import finish, has_kernels
from .placeholder import frozen, keep_type
from .scheme import Scheme
from .tensor import FIELDS, NAMES, QuantTensor, as_bytes
from .tensor_checks import checked_device, is_size
from .tensor_contents import has_values, is_permutation

#: The parameters that hold the weight, frozen.
HELD = NAMES

_Layer = TypeVar("_Layer", bound="WeightHolder")


class WeightHolder(nn.Module):
    """A module that holds a quantized weight ``[out_features, in_features]`` and knows nothing of products: what
    :class:`~lowbit.nn.Linear` is built on, which explains the form.

    ``layout`` is None while the parameters HELD are canonical, else the name of the layout that they are packed in.
    ``_numbers`` is what ops are told of them, ``_stored`` the type that scales and zeros have in this layout,
    ``_stored_codebook`` the canonical type of the codebook.
    """

    def __init__(self, in_features, out_features, scheme: Scheme, *, device, dtype, perm: bool, codebook: bool):
        # Why not super(): beside an nn.Linear that would make a float weight.
        nn.Module.__init__(self)
        if not isinstance(scheme, Scheme):
            raise DtypeError(f"scheme must be a lowbit.scheme.Scheme, got {type(scheme).__name__}")
        if not is_size(in_features) or not is_size(out_features):
            got = f"{in_features!r} and {out_features!r}"
            raise ShapeError(f"in_features and out_features must be whole numbers from 1, got {got}")
        kernel_type(scheme.weight, codebook)  # a codebook goes with uint types alone
        if device is not None:
            device = checked_device(device)
        self.in_features, self.out_features = in_features, out_features
        self.scheme, self.layout = scheme, None
        self.float_dtype = torch.get_default_dtype() if dtype is None else _checked_dtype(dtype)
        n, k = out_features, in_features
        self._numbers = op_numbers(scheme, (n, k))
        groups, stored = (n, scheme.groups(k)), getattr(torch, scheme.scale_type)
        self._stored, self._stored_codebook = stored, torch.float32
        has_zeros = scheme.zero_kind != "none"
        held = {
            "qweight": torch.zeros(n, stream_bytes(k, scheme.weight.bits), dtype=torch.uint8, device=device),
            "scales": torch.zeros(groups, dtype=stored, device=device),
            "zeros": torch.zeros(groups, dtype=stored, device=device) if has_zeros else None,
            "perm": torch.arange(k, dtype=torch.int32, device=device) if perm else None,
            "codebook": torch.zeros(1 << scheme.weight.bits, dtype=torch.float32, device=device) if codebook else None,
            "row_scales": torch.ones(n, 1, dtype=torch.float32, device=device) if scheme.has_row_scales else None,
        }
        for name, tensor in held.items():
            self.register_parameter(name, None if tensor is None else frozen(tensor))

    def prepare(self: _Layer) -> _Layer:
        """Pack the weight for its device, in place of the canonical form; nothing to do for one that is packed.

        Stays canonical (and slow): a device without kernels, and parameters that are no plain tensors (FSDP, DTensor).
        """
        plain = type(self.qweight) is nn.Parameter
        if self.layout is None and plain and has_kernels(self.qweight.device):
            with torch.inference_mode(False), torch.no_grad():
                pw = pack_weight(self.quant_tensor(), self.qweight.device)
                self._stored_codebook = pw.codebook_dtype
                held = (pw.codes, pw.scales, pw.zeros, pw.perm, pw.codebook, pw.row_scales)
                self._hold(*held, layout=pw.layout)
        return self

    def unprepare(self: _Layer) -> _Layer:
        """Put the canonical form back in place of the packed one; nothing to do for a layer that is not packed.

        For tools that cut, move or compare parameters themselves, such as FSDP: each row of a canonical tensor is a row
        of the weight. The layer then dequantizes its weight for each product, which is slow, and ``act`` needs a packed
        weight. :meth:`prepare` packs again, once the parameters are plain tensors.
        """
        if self.layout is not None:
            with torch.inference_mode(False), torch.no_grad():
                qt = self.quant_tensor()
                self._hold(*(getattr(qt, field) for field in FIELDS), layout=None)
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
        held = [None if t is None else t.detach() for t in map(self._parameters.get, HELD)]
        shape, s = (self.out_features, self.in_features), self.scheme
        *held, codebook, row_scales = held
        extras = {"codebook": codebook, "row_scales": row_scales}
        if self.layout is not None:
            extras["codebook_dtype"] = self._stored_codebook
            return PackedWeight(*held, scheme=s, shape=shape, layout=self.layout, **extras).unpack()
        *held, perm = held
        options = {"dtype": s.weight, "group_size": s.group_size, "zero_kind": s.zero_kind}
        return QuantTensor(*held, shape=shape, perm=perm, **extras, **options)

    def _hold(self, *tensors, layout: str | None) -> None:
        for name, tensor in zip(HELD, tensors, strict=True):
            held = self._parameters.get(name)
            if tensor is None or held is None or held.device != tensor.device:
                setattr(self, name, None if tensor is None else frozen(tensor))
            else:
                held.data = tensor
        self.layout = layout
        self._stored = getattr(torch, self.scheme.held_scales(layout))
        known = [self._parameters[name] for name in ("scales", "zeros")] if layout == "nvidia" else ()
        self._numbers = op_numbers(self.scheme, (self.out_features, self.in_features), *known)

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
        held = {id(t) for t in map(self._parameters.get, HELD) if t is not None}
        super()._apply(lambda t: keep_type(fn, t) if id(t) in held else fn(t), recurse)
        if probe.dtype.is_floating_point:
            self.float_dtype = probe.dtype
        if self.layout is not None:
            finish(self.qweight.device)
        try:
            return self.prepare() if pack else self
        except FormatError:
            return self  # Why: to_empty leaves numbers that are no order of columns; weights are to be loaded next

    # ---- in files, pickles and copies -------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout is not None:
            for name, tensor in self._canonical().items():
                destination[prefix + name] = tensor if keep_vars else tensor.data

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        found = {name: state_dict[prefix + name] for name in HELD if prefix + name in state_dict}
        packed = self.layout is not None
        if found:
            self.unprepare()
        for name, tensor in found.items():
            held = self._parameters.get(name)
            if held is None or not isinstance(tensor, torch.Tensor):
                continue
            if tensor.dtype != held.dtype:
                # Why: torch would convert without a word, and a weight would change its values.
                expected, got = type_name(held.dtype), type_name(tensor.dtype)
                errors.append(f"{prefix}{name} must be {expected}, got {got}; make the layer with the stored scheme")
            elif name == "perm" and tensor.shape == held.shape and has_values(tensor) and not is_permutation(tensor):
                # Why this alone of all contents: kernels read x by it, unchecked.
                errors.append(f"{prefix}perm must be a permutation of 0..{self.in_features - 1}")
        if not errors:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if packed:
            self.prepare()

    def _canonical(self) -> dict[str, nn.Parameter]:
        qt = self.quant_tensor()
        tensors = {name: getattr(qt, field) for name, field in zip(HELD, FIELDS, strict=True)}
        return {name: frozen(tensor) for name, tensor in tensors.items() if tensor is not None}

    def __getstate__(self):
        # Why: packed bytes belong to one version of lowbit; a pickle may outlive it.
        state = self.__dict__.copy()
        if self.layout is not None:
            state["_parameters"] = {**self._parameters, **self._canonical()}
            stored = getattr(torch, self.scheme.scale_type)
            state.update(layout=None, _stored=stored, _was_packed=True)
        scales = state["_parameters"]["scales"]
        if scales.element_size() == 1:  # as QuantTensor does it
            state["_parameters"] = {**state["_parameters"], "scales": frozen(as_bytes(scales.detach()))}
        return state

    def __setstate__(self, state):
        state = dict(state)
        packed = state.pop("_was_packed", False)
        state.setdefault("_stored", getattr(torch, state["scheme"].scale_type))  # pickles of 0.1.0 lack it
        super().__setstate__(state)
        # Why: the first pickles of version 0.1.0 have no places for these, later ones none for the codebook's type.
        self._parameters.setdefault("row_scales", None)
        codebook = self._parameters.setdefault("codebook", None)
        scales = self._parameters["scales"]
        if scales is not None and scales.dtype == torch.uint8:
            self._parameters["scales"] = frozen(scales.detach().view(self._stored))
        self.__dict__.setdefault("_stored_codebook", torch.float32 if codebook is None else codebook.dtype)
        if packed:
            self.prepare()

    def __deepcopy__(self, memo):
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        if new.layout is not None:
            finish(new.qweight.device)
        return new


def _checked_dtype(dtype) -> torch.dtype:
    """A type that a layer may have. Why any float: ``double()`` makes such layers too, products then refuse x."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise DtypeError(f"dtype must be a floating torch.dtype, got {dtype!r}")
    return dtype
