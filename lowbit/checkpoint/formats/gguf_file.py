"""The GGUF container (github.com/ggml-org/ggml, docs/gguf.md): versions 2 and 3, little-endian.

Magic "GGUF", version uint32, numbers of tensors and of pairs uint64; the pairs: key, type, value; a row a tensor:
name, number of dimensions, dimensions (innermost first), type, offset; then, aligned, the data. No size in a file is
believed: each is held against the bytes that are left.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import FormatError

_MAX_TEXT, _MAX_NAME, _MAX_DIMS, _MAX_DEPTH = 1 << 28, 1 << 16, 4, 4
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

#: Number of a tensor's type -> (name, weights in a block, bytes of a block).
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor: type by name, shape as torch has it (the innermost dimension last), where it begins, its bytes."""

    type: str
    shape: tuple[int, ...]
    begin: int
    size: int


class GgufReader:
    """An open file: ``metadata`` (key to value), ``entries`` (name to :class:`Entry`); a context manager.

    Opening reads and checks everything but the data; :meth:`read` reads one tensor's bytes. Raises FormatError.
    """

    def __init__(self, path):
        self.file = Path(path).name
        self._stream = open(path, "rb")
        try:
            self._total = os.fstat(self._stream.fileno()).st_size
            self.metadata, self.entries = self._read_header()
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> GgufReader:
        return self

    def __exit__(self, *_) -> None:
        self._stream.close()

    def read(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, uint8, in memory of their own."""
        entry = self.entries[name]
        data = bytearray(entry.size)
        self._stream.seek(entry.begin)
        if self._stream.readinto(data) != entry.size:
            raise FormatError(f"{self.file}: {name} ends early; the file shrank while it was read")
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    # ---- the header ----------------------------------------------------------------------------------------------

    def _read_header(self) -> tuple[dict, dict[str, Entry]]:
        if self._take(4, "the magic") != b"GGUF":
            raise FormatError(f"{self.file}: not a GGUF file: it does not begin with GGUF")
        (version,) = self._numbers("<I", "the version")
        if version not in (2, 3):
            raise FormatError(f"{self.file}: expected version 2 or 3 in little-endian order, got {version}")
        tensors, pairs = self._numbers("<QQ", "the counts")
        # The least that a tensor (name, dimensions, type, offset) and a pair (key, type, value) take.
        if tensors * 32 + pairs * 13 > self._left():
            raise FormatError(f"{self.file}: {tensors} tensors and {pairs} pairs do not fit in {self._left()} bytes")
        metadata = {}
        for _ in range(pairs):
            key = self._text("a key", _MAX_NAME)
            if key in metadata:
                raise FormatError(f"{self.file}: the key {key!r:.100} stands there twice")
            (kind,) = self._numbers("<I", key)
            metadata[key] = self._value(kind, key, 0)
        rows = [self._tensor_row() for _ in range(tensors)]
        return metadata, self._placed(rows, metadata)

    def _placed(self, rows: list, metadata: dict) -> dict[str, Entry]:
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align > 1 << 20:
            raise FormatError(f"{self.file}: general.alignment must be a number from 1 to {1 << 20}, got {align!r:.50}")
        start = -(-self._stream.tell() // align) * align
        entries, reached = {}, 0
        for name, kind, shape, size, offset in sorted(rows, key=lambda row: (row[4], row[3])):
            if name in entries:
                raise FormatError(f"{self.file}: the tensor {name!r:.100} stands there twice")
            if offset % align or offset < reached:
                what = "overlaps the one before" if offset < reached else f"is not aligned to {align}"
                raise FormatError(f"{self.file}: {name} at byte {offset} of the data {what}")
            reached = offset + size
            if start + reached > self._total:
                raise FormatError(f"{self.file}: {name} needs {start + reached} bytes of file, got {self._total}")
            entries[name] = Entry(kind, shape, start + offset, size)
        return {row[0]: entries[row[0]] for row in rows}

    def _tensor_row(self):
        name = self._text("the name of a tensor", _MAX_NAME)
        (count,) = self._numbers("<I", name)
        if count > _MAX_DIMS:
            raise FormatError(f"{self.file}: {name} must have at most {_MAX_DIMS} dimensions, got {count}")
        dims = self._numbers(f"<{count}Q", name)
        kind, offset = self._numbers("<IQ", name)
        if kind not in TYPES:
            raise FormatError(f"{self.file}: {name} is of type {kind}, which is not known")
        known, per_block, size = TYPES[kind]
        inner = dims[0] if dims else 1
        if inner % per_block or math.prod(dims) > self._total * per_block:
            raise FormatError(
                f"{self.file}: {name} of {known} in blocks of {per_block} cannot have the dimensions {dims}"
            )
        return name, known, tuple(reversed(dims)), math.prod(dims) // per_block * size, offset

    def _value(self, kind: int, key: str, depth: int):
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], key)[0]
        if kind == _STRING:
            return self._text(key, _MAX_TEXT)
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise FormatError(f"{self.file}: {key:.100} has a value of type {kind}, which is not known here")
        inner, count = self._numbers("<IQ", key)
        if inner in _SCALARS:
            code = _SCALARS[inner]
            if count * struct.calcsize(code) > self._left():
                raise FormatError(f"{self.file}: {key:.100} has {count} values, but {self._left()} bytes are left")
            return list(self._numbers(f"<{count}{code[1]}", key))
        # The least that a string, or an array in an array, takes.
        if count * 8 > self._left():
            raise FormatError(f"{self.file}: {key:.100} has {count} values, but {self._left()} bytes are left")
        return [self._value(inner, key, depth + 1) for _ in range(count)]

    def _text(self, what: str, limit: int) -> str:
        (size,) = self._numbers("<Q", what)
        if size > min(limit, self._left()):
            raise FormatError(f"{self.file}: {what:.100} claims {size} bytes, but {self._left()} are left")
        try:
            return self._take(size, what).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.file}: {what:.100} is not UTF-8: {error}") from None

    def _numbers(self, code: str, what: str) -> tuple:
        return struct.unpack(code, self._take(struct.calcsize(code), what))

    def _take(self, size: int, what: str) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise FormatError(f"{self.file}: is cut off in {what:.100}")
        return data

    def _left(self) -> int:
        return self._total - self._stream.tell()
