"""What a loader put into quantized layers is judged before the model is handed on."""

from __future__ import annotations

import torch

from ..errors import FormatError, LowbitError
from ..nn import Linear
from .names import in_model
from .native import entries_of
from .safetensors_file import Reader


def settle(layers: dict[str, Linear]) -> None:
    """Hold every loaded tensor against its layer's scheme, and freeze it.

    Raises FormatError for a tensor that was not loaded, has another type or shape, or breaks the canonical form.
    Tensors on meta (offloaded to disk or for a device that is busy) are left to the one who loads them.
    """
    for name, layer in layers.items():
        held, expected = tensors_of(layer), tensors_of(empty(layer))
        for short, tensor in held.items():
            tensor.requires_grad_(False)
            if tensor.is_meta or type(tensor.data) is not torch.Tensor:
                continue
            # Why: loaders leave what a file lacks at some value or other, and only log it.
            if not getattr(tensor, "_is_hf_initialized", False) and not hasattr(layer, "_hf_hook"):
                raise FormatError(f"{name}.{short}: the checkpoint must hold it, in the right shape, but it does not")
            for what in ("dtype", "shape"):
                got, wanted = getattr(tensor, what), getattr(expected[short], what)
                if got != wanted:
                    raise FormatError(f"{name}.{short}: expected {what} {_plain(wanted)}, got {_plain(got)}")
        if all(type(t.data) is torch.Tensor and not t.is_meta for t in held.values()):
            try:
                layer.quant_tensor().validate(name)
            except FormatError:
                raise
            except LowbitError as error:
                raise FormatError(f"{name}: {error}") from error


def expect_described(model, layers: dict[str, Linear], files) -> None:
    """Raises FormatError where a file says of one of a model's quantized layers what its config.json does not.

    Why: some of it does not show in tensors: an order of zeros and minima, codes of int and uint. Files that
    transformers saved describe nothing, and experts that other versions name otherwise are left to their tensors.
    """
    for file in files:
        with Reader(file) as reader:
            entries = entries_of(reader) if "lowbit" in reader.metadata else {}
            names = in_model(model, [f"{stem}.qweight" for stem in entries])
            for stem, entry in entries.items():
                layer = layers.get(names[f"{stem}.qweight"][0].removesuffix(".qweight"))
                if layer is not None:
                    _expect_entry(f"{reader.file}: {stem}", layer, entry, reader.entries)


def _expect_entry(where: str, layer: Linear, entry: dict, stored: dict) -> None:
    stem, scheme = where.partition(": ")[2], layer.scheme
    scales = stored.get(f"{stem}.scales", (None,))[0]
    expected = {
        "dtype": scheme.weight.name,
        "group_size": scheme.group_size,
        "zero_kind": scheme.zero_kind,
        "tensors": sorted(tensors_of(layer)),
        "scale_dtype": scheme.scale_type,
    }
    got = {name: entry.get(name) for name in expected} if isinstance(entry, dict) else {}
    got["scale_dtype"] = None if scales is None else _plain(scales)
    got["tensors"] = sorted(got["tensors"]) if isinstance(got.get("tensors"), list) else None
    for name, wanted in expected.items():
        if got[name] != wanted:
            raise FormatError(f"{where}: config.json says that its {name} is {wanted}, the file {got[name]}")
    # Why here: transformers gives what it reads the layer's type.
    kind = stored.get(f"{stem}.row_scales", (torch.float32,))[0]
    if kind != torch.float32:
        raise FormatError(f"{where}: row_scales must be float32, got {_plain(kind)}")


def expect_shapes(model, shapes: dict[str, torch.Size]) -> None:
    """Raises FormatError for a float parameter of another shape than the model was built with.

    Why: with a quantizer in place transformers 5.17 loads them in whatever shape they have.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return  # each process may hold a part
    for name, tensor in model.named_parameters():
        if name in shapes and not tensor.is_meta and tensor.shape != shapes[name]:
            raise FormatError(f"{name}: expected shape {_plain(shapes[name])}, got {_plain(tensor.shape)}")


def tensors_of(layer: Linear) -> dict[str, torch.nn.Parameter]:
    """The parameters that hold a layer's weight."""
    return {short: t for short, t in layer._parameters.items() if t is not None and short not in ("weight", "bias")}


def empty(layer: Linear) -> Linear:
    """A layer of the same scheme and shape on meta: what its tensors have to look like."""
    options = {"scheme": layer.scheme, "perm": layer._parameters.get("perm") is not None}
    if layer._parameters.get("codebook") is not None:
        options["codebook"] = True
    return Linear(layer.in_features, layer.out_features, bias=False, device="meta", **options)


def _plain(value) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
