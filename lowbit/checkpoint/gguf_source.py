"""A GGUF file opened to be converted, as :class:`~lowbit.checkpoint.foreign.Folder` is a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import FormatError
from ..tensor import BY_ROW, QuantTensor, as_bytes
from .formats.gguf import GgufFile
from .formats.gguf_model import GgufModel

_FREQS = "rope_freqs.weight"


class Gguf:
    """A GGUF file: ``names`` without the ending ``.weight`` for layers, ``layers``, ``metadata``, ``config``.

    Names, order of rows and ``config`` are those of transformers; with own_names they are GGUF's, and config is None.
    An embedding that is quantized is no layer, but a float tensor. Raises FormatError.
    """

    def __init__(self, path, own_names: bool = False):
        self._file = GgufFile(path)
        try:
            self.metadata, entries = self._file.metadata, self._file.entries
            self._model = None
            names = {key: key for key in entries}
            if not own_names:
                freqs = self._file.plain(_FREQS) if _FREQS in entries else None
                self._model = GgufModel(self.metadata, entries, freqs)
                names = self._model.names
            self.config = self._model and self._model.config
            self._key, self.layers = {}, {}
            for key, name in names.items():
                if self._file.is_quantized(key) and (own_names or key != "token_embd.weight"):
                    name = name.removesuffix(".weight")
                    self.layers[name] = key
                if name in self._key:
                    raise FormatError(f"{key} and {self._key[name]} would get the same name")
                self._key[name] = key
        except FormatError as error:
            self._file.__exit__()
            prefix = "" if str(error).startswith(f"{self._file.file}: ") else f"{self._file.file}: "
            raise FormatError(f"{prefix}{error}") from None
        self.names = list(self._key)

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *_) -> None:
        self._file.__exit__()

    def weight(self, name: str) -> QuantTensor:
        """The weight of a layer, codes and scales as they are in the file. Raises FormatError."""
        key = self._key[name]
        qt = self._file.weight(key)
        rows = self._model and self._model.rows(key)
        return qt if rows is None else take_rows(qt, rows)

    def plain(self, name: str) -> torch.Tensor:
        """A tensor that is no layer; a quantized embedding in float32, which holds its values exactly."""
        key = self._key[name]
        if self._file.is_quantized(key):
            return self._file.weight(key).dequantize(torch.float32)
        tensor = self._file.plain(key)
        if self._model is None:
            return tensor
        if self._model.is_plus_one(key):
            tensor = (tensor.double() - 1).to(tensor.dtype)
        rows = self._model.rows(key)
        return tensor if rows is None else tensor[rows]

    def is_widened(self, name: str) -> bool:
        """Whether :meth:`plain` gives floats for a tensor that is quantized in the file."""
        return self._file.is_quantized(self._key[name]) and name not in self.layers

    def dims(self, name: str) -> int:
        """How many dimensions a tensor has."""
        return len(self._file.entries[self._key[name]].shape)

    def others(self) -> list[Path]:
        """No files lie beside the weights."""
        return []


def take_rows(qt: QuantTensor, rows: torch.Tensor) -> QuantTensor:
    """Rows int64 ``[R]`` of a weight, each with its codes, scales, zeros and row_scales as they are."""
    # Why as bytes: torch takes rows of few floats of 8 bits.
    given = {field: getattr(qt, field) for field in BY_ROW}
    held = {field: None if t is None else as_bytes(t)[rows].view(t.dtype) for field, t in given.items()}
    options = {"dtype": qt.dtype, "group_size": qt.group_size, "zero_kind": qt.zero_kind}
    return QuantTensor(**held, shape=(len(rows), qt.shape[1]), perm=qt.perm, codebook=qt.codebook, **options)
