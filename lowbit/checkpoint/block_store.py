"""What a calibrated run has finished, on disk, so that a run that was cut off goes on behind its last decoder block.

A folder with one file for each finished part of the model (its quantized weights in lowbit's format, and the float
tensors that calibration changed), one with the hidden states that enter the next block, and ``journal.json``. What the
journal does not list does not count: it is renamed into place last, and only then are the hidden states before it
removed. Why those are stored, and not made again by the finished blocks: they are the same to the bit whatever computes
them, cost one copy on disk of what is in memory anyway, and a run of many blocks goes on at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from ..errors import FormatError
from ..tensor import QuantTensor
from . import native
from .safetensors_file import Later, Reader, write
from .source import write_json

_JOURNAL = "journal.json"


class BlockStore:
    """A context manager: opens ``folder``, or makes it; what was made with other settings, or is damaged, is removed.

    settings: anything of JSON that all results depend on. blocks: how many decoder blocks are finished; complete: that
    nothing is left to calibrate; entries: name on disk of each quantized weight -> its entry in lowbit's format;
    starved: what :meth:`finish` was given. Raises OSError as the system gives it.
    """

    def __init__(self, folder, settings):
        self.folder, self.settings = Path(folder), json.loads(json.dumps(settings))
        self._files = contextlib.ExitStack()

    def __enter__(self) -> BlockStore:
        self._forget()
        self.folder.mkdir(exist_ok=True)
        try:
            self._read()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, FormatError):
            self._forget()
        for path in self.folder.iterdir():
            if path.name != _JOURNAL and path.name not in self._listed:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return self

    def __exit__(self, *_) -> None:
        self._files.close()

    def _forget(self) -> None:
        self._files.close()
        self.blocks, self.complete, self.starved = 0, False, []
        self.entries: dict[str, dict] = {}
        self._held: dict[str, Reader] = {}
        self._listed: dict[str, list] = {}
        self._hidden: str | None = None

    def _read(self) -> None:
        journal = json.loads((self.folder / _JOURNAL).read_text(encoding="utf-8"))
        if journal["settings"] != self.settings:
            return
        for name, print_ in journal["files"].items():
            if Path(name).name != name or _print(self.folder / name) != print_:
                raise FormatError(f"{name} is not what was written")
            if name != journal["hidden"]:
                self._hold(self.folder / name)
        if journal["hidden"] not in (None, *journal["files"]):
            raise FormatError("the journal lists no file with the hidden states")
        self._listed, self._hidden = journal["files"], journal["hidden"]
        self.blocks, self.complete = int(journal["blocks"]), bool(journal["complete"])
        self.starved = list(journal["starved"])

    # ---- writing -----------------------------------------------------------------------------------------------------

    def add(self, tensors: Mapping[str, torch.Tensor], entries: Mapping[str, dict]) -> None:
        """Write a part of the model: tensors by their names on disk, and the entries of the quantized weights among
        them. It counts from the next :meth:`finish` on."""
        if not tensors:
            return
        number = sum(name.startswith("part-") for name in self._listed)  # parts are never removed one by one
        path = self.folder / f"part-{number}.safetensors"
        about = json.dumps({"format": native.FORMAT, "weights": dict(entries)})
        write(path, tensors, {"lowbit": about})
        self._listed[path.name] = _print(path)
        self._hold(path)

    def finish(
        self, blocks: int, hidden: Iterable[torch.Tensor] | None, complete: bool = False, starved: Iterable[str] = ()
    ) -> None:
        """Note that so many blocks are finished. hidden: what enters the next one, a tensor a batch."""
        before, self._hidden = self._hidden, None
        if hidden is not None:
            self._hidden = f"hidden-{blocks}.safetensors"
            write(self.folder / self._hidden, {str(index): states for index, states in enumerate(hidden)}, {})
            self._listed[self._hidden] = _print(self.folder / self._hidden)
        if before is not None and before != self._hidden:
            del self._listed[before]
        self.blocks, self.complete, self.starved = blocks, complete, list(starved)
        journal = {name: getattr(self, name) for name in ("settings", "blocks", "complete", "starved")}
        write_json(self.folder / _JOURNAL, {**journal, "files": self._listed, "hidden": self._hidden})
        if before is not None and before != self._hidden:
            (self.folder / before).unlink()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def hidden(self) -> Iterator[torch.Tensor] | None:
        """The hidden states behind the finished blocks, batch by batch; None where none were stored."""
        if self._hidden is None:
            return None

        def batches():
            with Reader(self.folder / self._hidden) as reader:
                for index in range(len(reader.entries)):
                    yield reader.read(str(index))

        return batches()

    def quant_tensor(self, stem: str) -> QuantTensor:
        """A quantized weight by its name on disk."""
        entry = self.entries[stem]
        return native.read(self._held[f"{stem}.{entry['tensors'][0]}"], stem, entry)

    def later(self, name: str) -> Later | None:
        """A tensor by its name on disk, to be read when it is written elsewhere; None for one that is not here."""
        if name not in self._held:
            return None
        reader = self._held[name]
        dtype, shape, _, _ = reader.entries[name]
        return Later(dtype, tuple(shape), lambda: reader.read(name))

    def _hold(self, path: Path) -> None:
        reader = self._files.enter_context(Reader(path))
        self.entries |= native.entries_of(reader)
        self._held |= dict.fromkeys(reader.entries, reader)


def _print(path: Path) -> list:
    """The length and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return [size, digest.hexdigest()]
