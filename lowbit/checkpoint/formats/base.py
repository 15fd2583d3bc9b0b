"""What every format of others shares: :class:`Format`, :class:`Layer`, and judges of settings and tensors.

A format is a subclass of :class:`Format` that says which tensors make one layer (``primaries``,
``required``, ``optional``: the last parts of their names) and how they are decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from ...errors import FormatError, InexactError, LowbitError
from ...tensor import QuantTensor

EMPTY: Mapping = MappingProxyType({})


@dataclass(frozen=True)
class Layer:
    """One quantized layer of a checkpoint.

    name: the module's full name; tensors: role (``"qweight"``) to the key of a tensor in the checkpoint; settings:
    what the configuration says about this layer.
    """

    name: str
    tensors: Mapping[str, str]
    settings: Mapping = field(default_factory=dict)


class Format:
    """A format of others, with the settings of one checkpoint. Made by :func:`lowbit.checkpoint.formats.find`.

    ``layers(keys)`` says which tensors make which layer, ``decode(layer, tensors)`` gives its weight.
    """

    #: What an error calls the format.
    name = ""
    #: The last part of the name of the tensor that every quantized layer has (one of these).
    primaries: tuple[str, ...] = ()
    #: Last parts that must come with it, and that may.
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    #: What stands between a layer's name and these parts.
    joint = "."

    def __init__(self, config: Mapping):
        self.config = dict(config)

    @classmethod
    def claims(cls, config: Mapping) -> bool:
        """Whether a quantization_config is this format's."""
        return config.get("quant_method") == cls.name

    def layers(self, keys: Iterable[str], metadata: Mapping[str, str] = EMPTY) -> list[Layer]:
        """The quantized layers among the keys of a checkpoint (of all its shards), in the order of the keys.

        metadata: the text of the files' ``__metadata__``. A tensor that belongs to no layer is stored as it is in the
        original. Raises FormatError for a layer that lacks a tensor.
        """
        known = dict.fromkeys(keys)
        found = []
        for key in known:
            for primary in self.primaries:
                if key.endswith(self.joint + primary) and self.is_primary(key, known):
                    found.extend(self.split(self._layer(key, primary, known)))
        return found

    def _layer(self, key: str, primary: str, known: Mapping[str, None]) -> Layer:
        name, tensors = key.removesuffix(self.joint + primary), {primary: key}
        for role in (*self.required, *self.optional):
            other = name + self.joint + role
            if other in known:
                tensors[role] = other
            elif role in self.required:
                roles = ", ".join((primary, *self.required))
                raise FormatError(f"{name}: a layer of {self.name} has {roles}; expected {other!r}, got none")
        return Layer(name, MappingProxyType(tensors), self.settings(name))

    def is_primary(self, key: str, keys: Mapping[str, None]) -> bool:
        """Whether a key that ends like a quantized layer's belongs to one."""
        return True

    def split(self, layer: Layer) -> list[Layer]:
        """The matrices of a layer: itself, but for stacks of experts."""
        return [layer]

    def settings(self, name: str) -> Mapping:
        """What the configuration says about the layer called name."""
        return self.config

    def decode(self, layer: Layer, tensors: Mapping[str, torch.Tensor]) -> QuantTensor:
        """The weight of a layer of :meth:`layers` from its tensors, by role; on their device.

        Raises FormatError for tensors that are not what the format says, and its subclass InexactError for a weight
        that the canonical form cannot hold without a change; both begin with the layer's name.
        """
        try:
            return self.decode_tensors(tensors, layer.settings).validate("decoded")
        except LowbitError as error:
            raise _named(error, layer.name) from None

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        raise NotImplementedError


def _named(error: LowbitError, name: str) -> FormatError:
    if isinstance(error, InexactError):
        return InexactError(f"{name}: {error.reason}", error.dequantize)
    return FormatError(f"{name}: {error}")


def expect(tensors: Mapping, role: str, dtypes, shape=None) -> torch.Tensor:
    """The tensor of a role, checked: its type is one of dtypes, its shape as given (None in it: any size from 1).

    Raises FormatError naming expected and got.
    """
    if role not in tensors:
        raise FormatError(f"expected a tensor {role!r}, got {', '.join(sorted(tensors)) or 'none'}")
    tensor = tensors[role]
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor.dtype not in dtypes:
        raise FormatError(f"{role} must be {' or '.join(map(type_name, dtypes))}, got {type_name(tensor.dtype)}")
    if shape is not None:
        got = tuple(tensor.shape)
        if len(got) != len(shape) or any(g < 1 if s is None else g != s for g, s in zip(got, shape)):
            wanted = ", ".join("any" if s is None else str(s) for s in shape) + ("," if len(shape) == 1 else "")
            raise FormatError(f"{role} must have shape ({wanted}), got {got}")
    return tensor


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def setting(settings: Mapping, key: str, kind, default=..., choices: Iterable | None = None):
    """A setting, checked. Raises FormatError when it is missing (without a default), of another kind, or no choice."""
    value = settings.get(key, None if default is ... else default)
    if value is None and default is None:
        return None
    legal = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if not legal or (choices is not None and value not in tuple(choices)):
        names = "number" if isinstance(kind, tuple) else kind.__name__
        wanted = names if choices is None else f"one of {', '.join(map(str, choices))}"
        raise FormatError(f"{key} must be {wanted}, got {value!r:.100}")
    return value


def group_setting(settings: Mapping, key: str = "group_size", default=...) -> int:
    """A group size: a whole number from 1, or -1 for the whole row."""
    size = setting(settings, key, int, default)
    if size != -1 and not 1 <= size < 1 << 40:
        raise FormatError(f"{key} must be a whole number from 1, or -1 for the whole row, got {size}")
    return size


def matches(pattern: str, name: str) -> bool:
    """Whether a regular expression of a configuration matches a layer's name. Raises FormatError when it is none."""
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise FormatError(f"{pattern!r:.100} is not a regular expression: {error}") from None
