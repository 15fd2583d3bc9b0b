"""The folder that a checkpoint grows in: finished shards survive a kill, and nobody can load half of it.

It lies beside the target, named ``.<target>.partial``, gets its config.json last and becomes the target by one rename.
``journal.json`` in it lists the finished shards with the size and time of change of the file each was made from.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

from ..errors import FormatError, LowbitError
from .source import write_json

_JOURNAL, _LOCK = "journal.json", "lock"


class Partial:
    """A context manager: takes the folder for this process, keeps what fits ``settings``, removes the rest.

    settings: anything of JSON; a shard made with others is made again. scratch: a name in the folder that is left to
    the caller, and removed in the end. Raises LowbitError when the target exists or another process works on it.
    """

    def __init__(self, target, settings, scratch: str | None = None):
        self.target = Path(os.path.abspath(target))
        if self.target.exists() or self.target.is_symlink():
            raise LowbitError(f"{target} exists already; give a new folder or remove it")
        if not self.target.parent.is_dir():
            raise LowbitError(f"the folder {self.target.parent}, where {target} should be written, does not exist")
        self.folder = self.target.with_name(f".{self.target.name}.partial")
        self.settings = json.loads(json.dumps(settings))
        self.scratch = None if scratch is None else self.folder / scratch
        self.done: dict[str, dict] = {}

    def __enter__(self) -> Partial:
        self.folder.mkdir(exist_ok=True)
        self._lock = open(self.folder / _LOCK, "w")
        try:
            # Why flock: the system takes it back from a process that dies, however it dies.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise LowbitError(f"another process is writing {self.target}; wait for it or stop it") from None
        self._read_journal()
        self._sweep()
        return self

    def _sweep(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in (_LOCK, _JOURNAL, *self.done) and path != self.scratch:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def forget(self) -> None:
        """Remove the finished shards: they will not fit those that are to come."""
        self.done = {}
        (self.folder / _JOURNAL).unlink(missing_ok=True)
        self._sweep()

    def __exit__(self, *_) -> None:
        self._lock.close()

    def _read_journal(self) -> None:
        try:
            journal = json.loads((self.folder / _JOURNAL).read_text(encoding="utf-8"))
            if journal["settings"] == self.settings:
                self.done = {
                    shard: entry
                    for shard, entry in journal["done"].items()
                    if entry["written"] == (self.folder / shard).stat().st_size and isinstance(entry["weights"], dict)
                }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.done = {}

    def finished(self, shard: str, source: Path) -> dict | None:
        """The journal's entry of a shard that need not be made again, else None."""
        entry = self.done.get(shard)
        return entry if entry is not None and entry["source"] == stamp_of(source) else None

    def finish(self, shard: str, source: Path, stamp: list[int], **entry) -> None:
        """Note that a shard is complete. Raises FormatError if its source changed since it was stamped."""
        if stamp_of(source) != stamp:
            raise FormatError(f"{source} changed while it was read; run again when it is complete")
        written = (self.folder / shard).stat().st_size
        self.done[shard] = {"source": stamp, "written": written, **entry}
        write_json(self.folder / _JOURNAL, {"settings": self.settings, "done": self.done})

    def publish(self) -> None:
        """Make the folder the target."""
        if self.scratch is not None and self.scratch.exists():
            shutil.rmtree(self.scratch)
        for name in (_JOURNAL, _LOCK):
            (self.folder / name).unlink(missing_ok=True)
        for path in self.folder.rglob("*"):
            if path.is_file():
                _sync(path)
        _sync(self.folder)
        try:
            os.rename(self.folder, self.target)
        except OSError as error:
            raise LowbitError(f"{self.folder} is complete but cannot become {self.target}: {error.strerror}") from None
        _sync(self.target.parent)


def stamp_of(source: Path) -> list[int]:
    facts = source.stat()
    return [facts.st_size, facts.st_mtime_ns]


def _sync(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
