"""A float model whose weights stay on disk: parameters on meta, read for a part of the model when its turn comes."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import FormatError, SchemeError
from . import layers
from .names import in_model
from .plan import architecture
from .safetensors_file import Reader
from .source import Source


@dataclass
class _Place:
    """A parameter or persistent buffer: who holds it, and the tensors on disk that it is made of.

    parts: (name on disk, which rows of which expert it fills: None for all of the tensor).
    """

    name: str
    placeholder: torch.Tensor
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)
    parts: list[tuple[str, tuple | None]] = field(default_factory=list)
    transposed: bool = False


class Streamed:
    """``model``: the float model of a checkpoint, in eval mode; :meth:`enter` and :meth:`leave` make parts of it real.

    names: name on disk -> name in the model, for every tensor. transposed: linear layers of GPT-2's kind, which become
    nn.Linear modules here, so that one kind of layer is calibrated. device: where parts come to be. A context manager:
    it keeps the files open. Raises SchemeError for a checkpoint whose tensors transformers changes as it loads them,
    other than by stacking experts; FormatError for a config.json that makes no model.
    """

    def __init__(self, source: Source, device: torch.device):
        self.source, self.device = source, device
        self.model = _float_skeleton(source)
        found = in_model(self.model, source.tensors)
        changed = [key for key, (_, alone) in found.items() if not alone]
        if changed:
            raise SchemeError(
                f"{changed[0]} lies otherwise in the model than on disk; use hqq or mse for this checkpoint"
            )
        self.names = {key: name for key, (name, _) in found.items()}
        self.transposed = _plain_linears(self.model)
        for module in self.model.modules():
            for local, buffer in module._buffers.items():
                module._buffers[local] = None if buffer is None else buffer.to(device)
        self._places: dict[int, _Place] = {}
        self._held_by: dict[nn.Module, list[_Place]] = {}
        self._find_places()
        self._files, self._readers = contextlib.ExitStack(), {}

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *_) -> None:
        self._files.close()

    def read(self, key: str, index: int | None = None) -> torch.Tensor:
        """A tensor of the checkpoint, or one expert of it, on the CPU."""
        file = self.source.tensors[key].file
        if file not in self._readers:
            self._readers[file] = self._files.enter_context(Reader(self.source.folder / file))
        return self._readers[file].read(key, index)

    def enter(self, modules: Iterable[nn.Module]) -> None:
        """Give these modules, without what lies inside them, their weights. Raises FormatError for one not on disk."""
        for module in modules:
            for held in (module._parameters, module._buffers):
                for local in list(held):
                    place = self._places.get(id(held[local]))
                    if place is not None:
                        self._make(place)

    def leave(self, modules: Iterable[nn.Module]) -> None:
        """Free every parameter of these modules, whoever else holds it."""
        for module in modules:
            for place in self._held_by.get(module, ()):
                for holder, local in place.holders:
                    if local in holder._parameters:
                        holder._parameters[local] = place.placeholder
            for local, parameter in module._parameters.items():
                if parameter is not None and parameter.device.type != "meta":
                    module._parameters[local] = nn.Parameter(parameter.detach().to("meta"), False)
        # Why: glibc keeps freed blocks of memory under 32 MB, in pieces; 12 blocks of 42 MB grew by 3 MB a block.
        with contextlib.suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)

    def _find_places(self) -> None:
        stored: dict[str, list[tuple[str, tuple | None]]] = {}
        for key, name in self.names.items():
            whole, part = _in_stack(self.model, name)
            stored.setdefault(whole, []).append((key, part))
        for prefix, module in self.model.named_modules():
            kept_out = module._non_persistent_buffers_set
            held = [*module._parameters.items()]
            held += [(local, buffer) for local, buffer in module._buffers.items() if local not in kept_out]
            for local, tensor in held:
                if tensor is None:
                    continue
                name = f"{prefix}.{local}" if prefix else local
                place = self._places.setdefault(id(tensor), _Place(name, tensor))
                place.holders.append((module, local))
                self._held_by.setdefault(module, []).append(place)
                place.transposed |= local == "weight" and prefix in self.transposed
                place.parts = place.parts or stored.get(name, [])

    def _make(self, place: _Place) -> None:
        old, dtype = place.placeholder, place.placeholder.dtype
        if not place.parts:
            raise FormatError(f"{self.source.folder} lacks {place.name}")
        key, part = place.parts[0]
        if part is None:
            tensor = self.read(key)
            tensor = tensor.T if place.transposed else tensor
            self._expect_shape(key, tensor, old.shape)
            tensor = tensor.to(self.device, dtype).contiguous()
        else:
            tensor = torch.empty(old.shape, dtype=dtype, device=self.device)
            filled = 0
            for key, (expert, begin, end) in place.parts:
                rows = self.read(key)
                self._expect_shape(key, rows, tensor[expert, begin:end].shape)
                tensor[expert, begin:end] = rows.to(self.device, dtype)
                filled += rows.numel()
            if filled != tensor.numel():
                raise FormatError(f"{self.source.folder} lacks experts of {place.name}")
        parameter = isinstance(old, nn.Parameter)
        made = nn.Parameter(tensor, False) if parameter else tensor
        for holder, local in place.holders:
            (holder._parameters if parameter else holder._buffers)[local] = made

    def _expect_shape(self, key: str, got: torch.Tensor, expected) -> None:
        if got.shape != expected:
            raise FormatError(f"{key} must have shape {tuple(expected)} by config.json, got {tuple(got.shape)}")


def _float_skeleton(source: Source) -> nn.Module:
    """The model with its parameters on meta, in the types that from_pretrained(dtype="auto") gives them.

    Why buffers are real: constructors compute those that are on no disk.
    """
    from transformers.core_model_loading import build_glob_alternation

    cls, config = architecture(source)
    dtype = getattr(config, "dtype", None)
    if dtype is None:
        dtype = next((stored.dtype for stored in source.tensors.values() if stored.dtype.is_floating_point), None)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.get_default_dtype()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _parameters_on_meta():
            model = cls(config)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"{source.folder}: its config.json does not fit {cls.__name__}: {reason}") from error
    finally:
        torch.set_default_dtype(before)
    wider = model._get_dtype_plan(dtype)  # what must not be rounded to 16 bits
    if wider:
        wanted = build_glob_alternation(list(wider))[0]
        for prefix, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for local, tensor in held.items():
                    if tensor is not None and wanted.search(f"{prefix}.{local}"):
                        tensor.data = tensor.data.float()
    return model.eval()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that modules are given while this is open lose their memory; tied ones stay one parameter."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _plain_linears(model: nn.Module) -> set[str]:
    """Put an nn.Linear in the place of every linear layer of GPT-2's kind; their names."""
    found = {name: module for name, module in model.named_modules() if layers.kind_of(module) == "conv1d"}
    for name, module in found.items():
        k, n = module.weight.shape
        linear = nn.Linear(k, n, bias=module.bias is not None, device="meta", dtype=module.weight.dtype)
        linear.bias = module.bias
        model.set_submodule(name, linear.train(module.training))
    return set(found)


def _in_stack(model: nn.Module, name: str) -> tuple[str, tuple | None]:
    """Where a tensor goes: (its name, None), or (the stack that it is a part of, (expert, first row, last row + 1))."""
    matrix = re.fullmatch(r"(.*)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight", name)
    try:
        module = model.get_submodule(matrix[1]) if matrix else None
    except AttributeError:
        module = None
    if module is None or layers.kind_of(module) != "experts":
        return name, None
    part, rows = matrix[3], layers.shape_of(module, matrix[3])[0]
    begin = rows if part == "up_proj" and module.has_gate else 0
    whole = "gate_up_proj" if module.has_gate and part != "down_proj" else part
    return f"{matrix[1]}.{whole}", (int(matrix[2]), begin, begin + rows)
