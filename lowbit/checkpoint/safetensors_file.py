"""The safetensors container: named tensors and a little text, written and read with numpy and torch alone.

Format (github.com/huggingface/safetensors, README): 8 bytes, little-endian, the length of the header; the header, JSON
``{NAME: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}``; then the data, which the
tensors fill without a hole or an overlap. A file is refused unless all of that holds to the byte.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import DtypeError, FormatError

#: Types by their name in the header.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the format's own library
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Later:
    """A tensor that :func:`write` reads when its turn comes, so that not all of a file are held in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)


def write(path, tensors: Mapping[str, torch.Tensor | Later], metadata: Mapping[str, str]) -> None:
    """Write a file under a temporary name beside path, then rename it: path is the old file or the whole new one.

    Raises DtypeError for a tensor of a type that the format lacks, OSError as the system gives it.
    """
    path = Path(path)
    # The widest types come first, so that every tensor begins at a multiple of its item size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {_METADATA: dict(metadata)} if metadata else {}, 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or name == _METADATA:
            raise DtypeError(f"{path.name}: cannot hold {name!r} of {tensor.dtype}; one of {', '.join(DTYPES)} can be")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                tensor = tensors[name]
                tensor = tensor.read() if isinstance(tensor, Later) else tensor
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                file.write(memoryview(flat.view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last through a loss of power, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Reader:
    """An open file: ``metadata`` (text by text), ``entries`` (name to dtype, shape, begin, end); a context manager.

    Opening reads and checks the header against the file's size; :meth:`read` reads one tensor. Raises FormatError.
    """

    def __init__(self, path):
        self.file = Path(path).name
        self._stream = open(path, "rb")
        try:
            self.metadata, self.entries = self._read_header()
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_) -> None:
        self._stream.close()

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor called name, or ``tensor[index]`` of it, in memory of its own, on the CPU."""
        dtype, shape, begin, end = self.entries[name]
        if index is not None:
            size = (end - begin) // shape[0]
            begin, shape = begin + index * size, shape[1:]
            end = begin + size
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        data = bytearray(end - begin)
        self._stream.seek(self._start + begin)
        if self._stream.readinto(data) != len(data):
            raise FormatError(f"{self.file}: {name} ends early; the file shrank while it was read")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)

    def _read_header(self):
        total = os.fstat(self._stream.fileno()).st_size
        first = self._stream.read(8)
        size = int.from_bytes(first, "little")
        if first[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") and size > total:
            raise FormatError(f"{self.file}: looks like a pickle, which is never opened; expected a safetensors file")
        if len(first) < 8 or not 2 <= size <= min(total - 8, _MAX_HEADER):
            raise FormatError(
                f"{self.file}: not a safetensors file or cut off: {total} bytes, of which the header claims {size}"
            )
        header = parse_json(self._stream.read(size), f"{self.file}: the header")
        if not isinstance(header, dict):
            raise FormatError(f"{self.file}: the header must be a JSON object, got {type(header).__name__}")
        self._start = 8 + size
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise FormatError(f"{self.file}: {_METADATA} must map text to text")
        entries = {name: self._entry(name, entry) for name, entry in header.items()}
        reached = 0
        for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
            if begin != reached:
                what = "overlaps the one before" if begin < reached else "leaves a hole before it"
                raise FormatError(f"{self.file}: {name} {what}: expected it at byte {reached}, got {begin}")
            reached = end
        if reached != total - self._start:
            what = "is cut off" if reached > total - self._start else "has bytes that belong to no tensor"
            raise FormatError(f"{self.file}: {what}: expected {reached} bytes of data, got {total - self._start}")
        return metadata, entries

    def _entry(self, name: str, entry) -> tuple[torch.dtype, list[int], int, int]:
        where = f"{self.file}: {name}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise FormatError(f"{where}: its entry must have dtype, shape and data_offsets, got {entry!r:.200}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise FormatError(f"{where}: its dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.200}")
        for what, numbers in (("shape", shape), ("data_offsets", offsets)):
            if (
                not isinstance(numbers, list)
                or len(numbers) > 64
                or not all(type(i) is int and 0 <= i < 1 << 63 for i in numbers)
            ):
                raise FormatError(f"{where}: its {what} must be whole numbers from 0, got {numbers!r:.200}")
        # Why the second product: torch cannot make [2**62, 2**62, 0], although it takes no bytes.
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        if math.prod(d for d in shape if d) >= 1 << 60:
            raise FormatError(f"{where}: shape {shape} is larger than any tensor")
        if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
            raise FormatError(f"{where}: {dtype} of shape {shape} takes {needed} bytes, its data_offsets are {offsets}")
        return DTYPES[dtype], shape, offsets[0], offsets[1]


def parse_json(text: str | bytes, what: str):
    """JSON in the strict sense: UTF-8, no key twice, no NaN or infinity. The FormatError begins with ``what``."""

    def unique(pairs):
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key stands there twice")
        for key in made:
            key.encode()  # Why: half a surrogate pair is refused here, a ValueError, and not where it is printed
        return made

    def constant(name):
        raise ValueError(f"{name} is no JSON")

    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    # Why RecursionError: JSON nested some thousand deep, which only a hostile file holds.
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON: {error}") from None
