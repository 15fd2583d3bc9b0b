"""A checkpoint folder written anew, shard by shard, into another that appears whole; a run that is cut off goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from .partial import Partial, stamp_of
from .source import INDEX, SINGLE, Source, write_json

#: (a file of the source, names of its tensors, the file to write, step(name) after each tensor) -> name -> bytes
WriteShard = Callable[[Path, list[str], Path, Callable[[str], None]], dict[str, int]]


def finished(source: Source, partial: Partial) -> bool:
    """Whether no shard is left to write."""
    return all(partial.finished(_target(source, shard), source.folder / shard) for shard in source.shards)


def rewrite(
    source: Source,
    partial: Partial,
    write_shard: WriteShard,
    config: dict,
    progress: Callable[[int, int, str], None] | None,
    stamps: Mapping[str, list[int]] | None = None,
) -> None:
    """Write every shard that is not finished yet, copy the other files, write index and config.json.

    progress: called with (bytes done, bytes in all, name) after each tensor. stamps: of files of the source that were
    read before, by name; others get theirs when they are. Raises what write_shard raises,
    FormatError for a source that changes meanwhile, OSError as the system gives it.
    """
    total = sum(_bytes(source, name) for name in source.tensors)
    done, index = 0, {}
    for shard in source.shards:
        target, path = _target(source, shard), source.folder / shard
        names = source.of(shard)

        def step(name: str) -> None:
            nonlocal done
            done += _bytes(source, name)
            if progress is not None:
                progress(done, total, name)

        entry = partial.finished(target, path)
        if entry is None:
            stamp = (stamps or {}).get(shard) or stamp_of(path)
            partial.finish(target, path, stamp, weights=write_shard(path, names, partial.folder / target, step))
            entry = partial.done[target]
        else:
            done += sum(_bytes(source, name) for name in names)
        index |= dict.fromkeys(entry["weights"], target)
    source.copy_rest(partial.folder)
    if len(source.shards) > 1:
        size = sum(size for entry in partial.done.values() for size in entry["weights"].values())
        write_json(partial.folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    write_json(partial.folder / "config.json", config)


def _target(source: Source, shard: str) -> str:
    return shard if len(source.shards) > 1 else SINGLE


def _bytes(source: Source, name: str) -> int:
    stored = source.tensors[name]
    return math.prod(stored.shape) * stored.dtype.itemsize
