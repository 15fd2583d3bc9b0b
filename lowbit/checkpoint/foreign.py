"""Checkpoints of others on disk, opened and checked: a folder of safetensors shards, or a GGUF file.

Both have ``names`` (of layers and of tensors that belong to none, in the order of the files), ``weight(name)`` for the
first and ``plain(name)`` for the second; at most one layer is in memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from ..errors import FormatError
from ..tensor import QuantTensor
from ..tensor_checks import checked_path
from .formats import Format, Layer, find
from .gguf_source import Gguf
from .safetensors_file import Reader, parse_json

INDEX = "model.safetensors.index.json"
OLD_CONFIGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
#: Ends of the names of files that hold weights; those that may hold a pickle are never opened.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", *_PICKLES)


class Folder:
    """A folder with config.json and safetensors files; ``config``, ``format``, ``layers`` by name; a context manager.

    Raises FormatError for what is incomplete, contradicts itself, or is not quantized in a format that is known.
    """

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise FormatError(f"expected a folder with config.json and safetensors files, or a .gguf file, got {path}")
        self.config = self._json("config.json")
        self.format = self._format()
        self._stack, self._cache = ExitStack(), {}
        try:
            self._readers = {name: self._stack.enter_context(Reader(self.path / name)) for name in self._files()}
            self._where = self._places()
            metadata = {key: text for reader in self._readers.values() for key, text in reader.metadata.items()}
            layers = self.format.layers(self._where, metadata)
        except BaseException:
            self._stack.close()
            raise
        self.layers: dict[str, Layer] = {layer.name: layer for layer in layers}
        if not layers:
            self._stack.close()
            raise FormatError(f"{path}: expected layers of {self.format.name}, got none in {len(self._where)} tensors")
        taken = {key for layer in layers for key in layer.tensors.values()}
        first = {}
        for layer in layers:
            first.setdefault(next(iter(layer.tensors.values())), []).append(layer.name)
        self.names = [n for key in self._where for n in first.get(key, [] if key in taken else [key])]

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def weight(self, name: str) -> QuantTensor:
        """The weight of a layer. Raises FormatError, or InexactError."""
        layer = self.layers[name]
        keys = list(layer.tensors.values())
        if self._cache.keys() != set(keys):  # the experts of a stack come one after the other out of the same tensors
            self._cache = {}
            self._cache = {key: self.plain(key) for key in keys}
        return self.format.decode(layer, {role: self._cache[key] for role, key in layer.tensors.items()})

    def plain(self, name: str) -> torch.Tensor:
        return self._where[name].read(name)

    def is_widened(self, name: str) -> bool:
        """Whether :meth:`plain` gives floats for a quantized tensor: never here."""
        return False

    def dims(self, name: str) -> int:
        """How many dimensions a tensor has."""
        return len(self._where[name].entries[name][1])

    def others(self) -> list[Path]:
        """The files beside the weights that belong to a model."""
        kept = (p for p in sorted(self.path.iterdir()) if p.is_file() and p.suffix not in WEIGHTS)
        return [p for p in kept if p.name not in ("config.json", INDEX, *OLD_CONFIGS) and not p.name.startswith(".")]

    def _json(self, name: str) -> dict:
        path = self.path / name
        if not path.is_file():
            raise FormatError(f"{self.path} has no {name}")
        held = parse_json(path.read_bytes(), name)
        if not isinstance(held, dict):
            raise FormatError(f"{name} must be a JSON object, got {type(held).__name__}")
        return held

    def _format(self) -> Format:
        found = find(self.config)
        for name in OLD_CONFIGS:
            if found is None and (self.path / name).is_file():
                found = find(self._json(name))
        if found is None:
            raise FormatError(
                f"{self.path}: expected quantization_config of a format of others in config.json, got none or lowbit's"
            )
        return found

    def _files(self) -> list[str]:
        if (self.path / INDEX).is_file():
            self._listed = self._json(INDEX).get("weight_map")
            if not isinstance(self._listed, dict) or not all(isinstance(f, str) for f in self._listed.values()):
                raise FormatError(f"{INDEX} must map the names of tensors to files under weight_map")
            files = sorted(set(self._listed.values()))
            strange = [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]
            lost = [name for name in files if not (self.path / name).is_file()]
            if strange or lost:
                what = "names files outside the folder" if strange else "names files that are not there"
                raise FormatError(f"{INDEX} {what}: {', '.join((strange or lost)[:3])}")
            return files
        self._listed = None
        files = sorted(p.name for p in self.path.glob("*.safetensors"))
        if not files:
            pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in _PICKLES)
            got = f"{pickles[0]}, which may hold a pickle and is never opened" if pickles else "none"
            raise FormatError(f"{self.path}: expected safetensors files, got {got}")
        return files

    def _places(self) -> dict[str, Reader]:
        where: dict[str, Reader] = {}
        for name, reader in self._readers.items():
            for key in reader.entries:
                if key in where:
                    raise FormatError(f"{name}: holds {key}, which {where[key].file} holds too")
                where[key] = reader
        lost = [key for key in self._listed or () if key not in where]
        if lost:
            raise FormatError(f"{self.path} lacks {len(lost)} tensors that {INDEX} lists, the first is {lost[0]}")
        return where


def open_foreign(path, gguf_names: bool = False) -> Folder | Gguf:
    """The checkpoint at path, by what it is; gguf_names: a GGUF file keeps its own names. Raises DtypeError."""
    path = checked_path(path, "src")
    if path.is_file() and path.suffix == ".gguf":
        return Gguf(path, own_names=gguf_names)
    if gguf_names:
        raise FormatError(f"gguf_names goes with a .gguf file, got {path}")
    return Folder(path)
