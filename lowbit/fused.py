"""Fused, the weight of layers that share a product, and FusedLinear, one of these layers; fusing.py makes them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .errors import SchemeError
from .nn import Linear
from .ops.canonical import rows_of
from .tensor import BY_ROW, FIELDS, QuantTensor, as_bytes
from .weight_holder import HELD


class Fused(nn.Module):
    """The weight of layers that share a product, a child of the module that holds them; made by :func:`lowbit.fuse`.

    whole: a Linear without bias, its parameters also this module's; members: the layers, in the order of their rows.
    """

    def __init__(self, whole: Linear, members: list[Linear]):
        super().__init__()
        # Why past __setattr__: tools would take a registered Linear for one of the model's layers.
        self.__dict__["whole"] = whole
        self._parameters = whole._parameters
        self.members = tuple(members)
        self.sizes = [layer.out_features for layer in members]
        self.scope = _Scope()

    @classmethod
    def of(cls, layers: list[Linear]) -> Fused:
        """Take the weights out of layers that are alike, and make them its members."""
        first, packed = layers[0], layers[0].layout is not None
        with torch.inference_mode(False), torch.no_grad():
            parts = [layer.quant_tensor() for layer in layers]
            tensors = {field: _stack([getattr(qt, field) for qt in parts]) for field in BY_ROW}
            s, n = first.scheme, sum(layer.out_features for layer in layers)
            options = {"dtype": s.weight, "group_size": s.group_size, "zero_kind": s.zero_kind}
            qt = QuantTensor(**tensors, shape=(n, first.in_features), perm=parts[0].perm, **options)
            whole = Linear.from_quant_tensor(qt, dtype=first.float_dtype, prepare=packed)
        fused = cls(whole, layers)
        for place, layer in enumerate(layers):
            layer._parameters.update(dict.fromkeys(HELD))
            del layer.layout
            layer.__class__ = FusedLinear
            layer.fusion = (fused, place)
        return fused

    def release(self) -> None:
        """Give the members their weights back."""
        packed = self.whole.layout is not None
        weights = [self.rows(place) for place in range(len(self.members))]
        for layer, qt in zip(self.members, weights, strict=True):
            layer.__class__ = Linear
            del layer.fusion
            with torch.inference_mode(False), torch.no_grad():
                layer._hold(*(getattr(qt, field) for field in FIELDS), layout=None)
            if packed:
                layer.prepare()

    # ---- the product -----------------------------------------------------------------------------------------------

    def part(self, x: torch.Tensor, place: int, act: str | None) -> torch.Tensor:
        """A member's columns of the product: those that another member left for it, or new ones."""
        if type(x) is not torch.Tensor and hasattr(x, "placements"):
            raise SchemeError("fused layers cannot be cut over processes: call lowbit.unfuse(model) before")
        held = self.scope.held
        if held is None or not isinstance(x, torch.Tensor):  # outside of the forward of the module that holds them
            return self._products(x, act)[place]
        now = self._state(x, act)
        if held and held[0] is x and held[1] == now and place in held[2]:
            mine = held[2].pop(place)
            if not held[2]:
                self.scope.held = ()
            return mine
        parts = dict(enumerate(self._products(x, act)))
        mine = parts.pop(place)
        self.scope.held = () if now is None else (x, now, parts)
        return mine

    def _products(self, x: torch.Tensor, act: str | None) -> tuple[torch.Tensor, ...]:
        biases = [layer._parameters["bias"] for layer in self.members]
        given = next((bias for bias in biases if bias is not None), None)
        if given is not None:
            # Why each time: a kept copy would miss what a training step, or anyone, writes to a bias.
            pairs = zip(biases, self.sizes, strict=True)
            given = torch.cat([given.new_zeros(n) if bias is None else bias for bias, n in pairs])
        y = self.whole._multiply(x, given, act)
        # Why unsafe: nobody else sees y, and the parts do not overlap. Each may so be written in place, by itself,
        # and one concatenation makes the gradient of y.
        return torch.unsafe_split_with_sizes(y, self.sizes, -1)

    def _state(self, x: torch.Tensor, act: str | None) -> tuple | None:
        """What must be the same for two members to share a product of x; None: they must not."""
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        state = (act, autocast, torch.is_grad_enabled(), x.requires_grad)
        if torch.compiler.is_compiling():
            return None if self._hooked() else state
        if kind == "cuda":
            stream = torch.cuda.current_stream(x.get_device()).cuda_stream
            state = (*state, stream, torch.cuda.is_current_stream_capturing())
        if x.is_inference():
            return None if self._hooked() else (*state, "no version")
        return (*state, x._version)

    def _hooked(self) -> bool:
        return any(layer._forward_pre_hooks or layer._forward_hooks for layer in self.members)

    # ---- the weight ------------------------------------------------------------------------------------------------

    def rows(self, place: int) -> QuantTensor:
        """A member's weight in canonical form, in memory of its own. Raises SchemeError for one that is cut."""
        codes = self.whole.qweight
        if hasattr(codes, "placements"):
            raise SchemeError(
                "fused weights were cut over processes and cannot be told apart: call lowbit.unfuse(model) before"
            )
        return rows_of(self.whole.quant_tensor(), self._slice(place)).clone()

    def put(self, place: int, qt: QuantTensor) -> None:
        """Write a member's weight, of the same scheme, shape and perm."""
        packed = self.whole.layout is not None
        self.whole.unprepare()
        for name, field in zip(HELD, FIELDS, strict=True):
            tensor = getattr(qt, field)
            if field in BY_ROW and tensor is not None:
                as_bytes(self._parameters[name].data)[self._slice(place)] = as_bytes(tensor)
        if packed:
            self.whole.prepare()

    def _slice(self, place: int) -> slice:
        first = sum(self.sizes[:place])
        return slice(first, first + self.sizes[place])

    def _apply(self, fn, recurse=True):
        self.whole._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """Nothing: the members save their rows, under their names."""

    def _load_from_state_dict(self, *_):
        """Nothing: the members load theirs."""

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["_parameters"]  # whole's, which has a form of its own for pickles
        return state

    def __setstate__(self, state):
        super().__setstate__({**state, "_parameters": state["whole"]._parameters})

    def extra_repr(self) -> str:
        return f"{self.whole.extra_repr()}, rows={self.sizes}"


class FusedLinear(Linear):
    """A :class:`~lowbit.nn.Linear` whose weight is rows of a :class:`Fused`; see :func:`lowbit.fuse`.

    It has no parameter but bias: ``qweight``, ``scales`` and so on are those of the Fused, of all layers.
    ``quant_tensor()`` and ``state_dict`` give this layer's rows; ``prepare`` and ``unprepare`` change all of it.
    """

    qweight, scales, zeros, perm, row_scales = (
        property(lambda self, n=n: getattr(self.fusion[0], n)) for n in HELD if n != "codebook"
    )

    @property
    def layout(self) -> str | None:
        return self.fusion[0].whole.layout

    def prepare(self) -> Linear:
        self.fusion[0].whole.prepare()
        return self

    def unprepare(self) -> Linear:
        self.fusion[0].whole.unprepare()
        return self

    def quant_tensor(self) -> QuantTensor:
        """The layer's weight in canonical form, a copy. Raises SchemeError for one that another tool has cut."""
        fused, place = self.fusion
        return fused.rows(place)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fused"

    def _multiply(self, x, bias, act):
        fused, place = self.fusion
        return fused.part(x, place, act)

    def _apply(self, fn, recurse=True):
        # The weight moves with the Fused, which is a child of the same module.
        probe = fn(torch.empty(0, dtype=self.float_dtype, device=self.qweight.device))
        nn.Module._apply(self, fn, recurse)
        if probe.dtype.is_floating_point:
            self.float_dtype = probe.dtype
        return self

    def _separate(self) -> Linear:
        """A canonical Linear of a copy of the weight, with the same bias."""
        options = {"dtype": self.float_dtype, "act": self.act}
        return Linear.from_quant_tensor(self.quant_tensor(), self.bias, prepare=False, **options)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self._separate()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        fused, place = self.fusion
        layer, known = self._separate(), len(errors)
        perm = layer.perm if layer.perm is None else layer.perm.clone()
        layer._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if perm is not None and not torch.equal(perm, layer.perm):
            errors.append(f"{prefix}perm must be that of the layers it is fused with; call lowbit.unfuse(model) before")
        if len(errors) == known:
            self.bias = layer.bias
            if any(prefix + name in state_dict for name in HELD):
                fused.put(place, layer.quant_tensor())

    def __getstate__(self):
        return self.__dict__.copy()

    def __deepcopy__(self, memo):
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return new


class _Scope:
    """What members leave for each other. held: None outside of the forward of the module that holds them, () where
    nothing is kept, else (x, the state it was multiplied in, the parts not yet taken by place)."""

    __slots__ = ("held",)

    def __init__(self):
        self.held = None

    def __reduce__(self):
        return _Scope, ()  # copies begin outside


def _stack(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
    if tensors[0] is None:
        return None
    return torch.cat([as_bytes(tensor) for tensor in tensors]).view(tensors[0].dtype)
