"""lowbit's own files: quantized weights in safetensors, described by a versioned ``lowbit`` entry (docs/format.md).

The entry is JSON in the file's ``__metadata__``:

    {"format": 1, "weights": {NAME: {"dtype": "int4", "shape": [N, K], "group_size": 128, "zero_kind": "none",
                                     "tensors": ["qweight", "scales"]}}}

and NAME.qweight, NAME.scales ... are the tensors. Files of other tools are read with suspicion: whatever is not exactly
so is a FormatError that names the file and the tensor, and nothing in a file is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from ..errors import DtypeError, FormatError, LowbitError
from ..tensor import FIELDS as _FIELDS
from ..tensor import NAMES, QuantTensor
from . import safetensors_file as container

FORMAT = 1
_KEY = "lowbit"
#: The name in a file of each tensor of a QuantTensor.
FIELDS = dict(zip(NAMES, _FIELDS, strict=True))
_ENTRY = {"dtype", "shape", "group_size", "zero_kind", "tensors"}


def save(path, weights: QuantTensor | Mapping[str, QuantTensor]) -> None:
    """Write weights (by name; a single one is called "weight") to one file, which appears whole or not at all.

    Raises DtypeError for anything that is not a QuantTensor, FormatError for one whose contents would not be read
    back, OSError as the system gives it.
    """
    if isinstance(weights, QuantTensor):
        weights = {"weight": weights}
    tensors, entries = {}, {}
    for name, qt in weights.items():
        if not isinstance(name, str) or not isinstance(qt, QuantTensor):
            raise DtypeError(
                f"save takes QuantTensors by their names, got {type(qt).__name__} under {name!r}; quantize it first"
            )
        part, entries[name] = describe(name, qt.validate(name))
        tensors.update(part)
    container.write(path, tensors, {"format": "pt", _KEY: json.dumps({"format": FORMAT, "weights": entries})})


def describe(name: str, qt: QuantTensor) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors that a file holds for a weight, by their full names, and its entry in the metadata."""
    held = {short: getattr(qt, field) for short, field in FIELDS.items() if getattr(qt, field) is not None}
    entry = {
        "dtype": qt.dtype.name,
        "shape": list(qt.shape),
        "group_size": qt.group_size,
        "zero_kind": qt.zero_kind,
        "tensors": list(held),
    }
    return {f"{name}.{short}": tensor for short, tensor in held.items()}, entry


def load(path, device="cpu") -> dict[str, QuantTensor]:
    """Every quantized weight of a file, by name, checked and moved to device.

    Tensors that belong to no quantized weight are left alone. Raises FormatError for a file that is not of this format
    or breaks it, and for one of a newer format; OSError as the system gives it.
    """
    with container.Reader(path) as reader:
        weights = {name: read(reader, name, entry) for name, entry in entries_of(reader).items()}
    return {name: qt.to(device) for name, qt in weights.items()}


def entries_of(reader: container.Reader) -> dict:
    """The entries of an open file's weights, by name. Raises FormatError for a file that is not of this format."""
    metadata, file = reader.metadata, reader.file
    if _KEY not in metadata:
        raise FormatError(f"{file}: no {_KEY!r} entry in its metadata, so it holds no weights quantized by lowbit")
    root = container.parse_json(metadata[_KEY], f"{file}: the {_KEY!r} entry")
    version = root.get("format") if isinstance(root, dict) else None
    if type(version) is not int or version < 1:
        raise FormatError(f"{file}: the {_KEY!r} entry must state its format, a number from 1, got {version!r}")
    if version > FORMAT:
        raise FormatError(f"{file}: format {version} needs a newer lowbit, this one reads formats up to {FORMAT}")
    if set(root) != {"format", "weights"} or not isinstance(root["weights"], dict):
        raise FormatError(f"{file}: the {_KEY!r} entry must have 'format' and 'weights', got {sorted(root)}")
    return root["weights"]


def read(reader: container.Reader, name: str, entry) -> QuantTensor:
    """The weight of an entry, checked. Raises FormatError."""
    where = f"{reader.file}: {name}"
    if not isinstance(entry, dict) or set(entry) != _ENTRY:
        got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise FormatError(f"{where}: its entry must have {', '.join(sorted(_ENTRY))}, got {got}")
    shape, listed = entry["shape"], entry["tensors"]
    if not isinstance(shape, list) or not isinstance(listed, list) or not isinstance(entry["zero_kind"], str):
        raise FormatError(f"{where}: shape and tensors must be lists and zero_kind a string, got {entry}")
    present = [short for short in FIELDS if f"{name}.{short}" in reader.entries]
    if sorted(map(str, listed)) != sorted(present) or not {"qweight", "scales"} <= set(present):
        raise FormatError(f"{where}: its entry lists the tensors {listed}, the file holds {present}")
    fields = {FIELDS[short]: reader.read(f"{name}.{short}") for short in present}
    options = {key: entry[key] for key in ("dtype", "shape", "group_size", "zero_kind")}
    try:
        return QuantTensor(**fields, **options).validate(name)
    except FormatError as error:
        raise FormatError(f"{reader.file}: {error}") from None
    except LowbitError as error:
        raise FormatError(f"{where}: {error}") from None
