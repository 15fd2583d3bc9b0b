"""quantize_checkpoint: a float HuggingFace checkpoint on disk to a quantized one, shard by shard."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ..errors import DeviceError, LowbitError, SchemeError
from ..quantizers import quantize
from . import plan as planning
from .native import FORMAT, describe
from .on_the_fly import quantize_matrix
from .partial import Partial, stamp_of
from .safetensors_file import Later, Reader, write
from .settings import Settings
from .source import INDEX, SINGLE, Source, write_json

#: Methods that look at activations; calibrate.py is to make them.
CALIBRATED = ("gptq", "awq")


def quantize_checkpoint(
    src,
    dst,
    dtype="int4",
    *,
    group_size: int = 128,
    method: str = "mse",
    zero_kind: str | None = None,
    act: str | None = None,
    scale_dtype: str | None = None,
    skip: Iterable[str] = (),
    dynamic: Mapping[str, Mapping | None] | None = None,
    lm_head: str | None = None,
    device="cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> Path:
    """Quantize the safetensors checkpoint in folder ``src`` into the new folder ``dst``; returns the path of ``dst``.

    dtype, group_size, method, zero_kind, act, skip, dynamic: as in :func:`lowbit.quantize_model`; names are those of
    the model that transformers builds. The matrices of a mixture's experts are called ``...experts.3.down_proj``, and
    patterns may say ``experts.down_proj`` for all. scale_dtype: "float16", "bfloat16" or "float32", by default that of
    the weights, float16 for float32 ones. lm_head: weight type of the output layer, which by default stays as it is;
    one that is tied to the embedding is then stored apart. device: where to compute. progress: called with (bytes
    done, bytes in all, name) after each tensor.

    The source is only read. One tensor at a time is in memory beside the quantized tensors of one shard. dst appears
    whole, by a rename; until then the work lies beside it in ``.<name>.partial``, whose finished shards are used again
    by the next call with the same settings and an unchanged source.

    Raises FormatError for a source that is incomplete, damaged, no safetensors or quantized already; SchemeError for
    settings that do not exist or fit no layer; QuantizationError, with the layer's name, for weights that cannot be
    quantized; LowbitError where dst exists or cannot be written.
    """
    if method in CALIBRATED:
        raise SchemeError(
            f"method {method!r} needs calibration on text, which is not available here; use hqq, mse or rtn"
        )
    device = _checked_device(device)
    dtype, group = getattr(dtype, "name", dtype), {"group_size": group_size, "method": method, "zero_kind": zero_kind}
    quantize(torch.zeros(1, 16), dtype, **group)  # the quantizer itself judges, before the work
    settings = Settings.make(
        dtype=dtype, **group, act=act, scale_dtype=scale_dtype, skip=skip, dynamic=dynamic, lm_head=lm_head
    )
    source, dst = Source(src), Path(dst)
    if source.folder.resolve() in [dst.resolve(), *dst.resolve().parents]:
        raise LowbitError(f"{dst} must not lie inside the checkpoint {src}")
    plan = planning.make(source, settings)
    for options in plan.settings.dynamic.values():
        if (options or {}).get("method") in CALIBRATED:
            raise SchemeError(f"method {options['method']!r} needs calibration on text, which is not available here")
    try:
        with Partial(dst, {"lowbit": FORMAT, "config": plan.settings.to_json(), "shards": source.shards}) as partial:
            _write_all(source, plan, partial, device, progress)
    except OSError as error:
        raise LowbitError(
            f"{dst} cannot be written: {error.strerror or error}; run again to go on with the finished shards"
        ) from error
    return dst


def _write_all(source: Source, plan: planning.Plan, partial: Partial, device, progress) -> None:
    total = sum(_bytes(source, name) for name in source.tensors)
    done, index = 0, {}
    for shard in source.shards:
        target, path = shard if len(source.shards) > 1 else SINGLE, source.folder / shard
        names = source.of(shard)

        def step(name: str) -> None:
            nonlocal done
            done += _bytes(source, name)
            if progress is not None:
                progress(done, total, name)

        entry = partial.finished(target, path)
        if entry is None:
            stamp = stamp_of(path)
            weights = _write_shard(path, names, plan, partial.folder / target, device, step)
            partial.finish(target, path, stamp, weights=weights)
            entry = partial.done[target]
        else:
            done += sum(_bytes(source, name) for name in names)
        index |= dict.fromkeys(entry["weights"], target)
    source.copy_rest(partial.folder)
    if len(source.shards) > 1:
        size = sum(size for entry in partial.done.values() for size in entry["weights"].values())
        write_json(partial.folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    write_json(partial.folder / "config.json", _config(source, plan))
    partial.publish()


def _write_shard(path: Path, names: list[str], plan: planning.Plan, target: Path, device, step) -> dict[str, int]:
    """Quantize one file; returns name -> bytes of what was written."""
    tensors, entries = {}, {}
    with Reader(path) as reader:
        for name in names:
            job = plan.jobs.get(name)
            if job is not None:
                for stem, options, expert in job.outputs:
                    weight = reader.read(name, expert).to(device)
                    qt = quantize_matrix(stem, weight.T if job.transposed else weight, options).cpu()
                    made, entries[stem] = describe(stem, qt.validate(stem))
                    tensors.update(made)
                    del weight
            if job is None or job.keep:
                dtype, shape, _, _ = reader.entries[name]
                tensors[name] = Later(dtype, tuple(shape), lambda name=name: reader.read(name))
            step(name)
        entry = json.dumps({"format": FORMAT, "weights": entries})
        write(target, tensors, {"format": "pt", "lowbit": entry})
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _config(source: Source, plan: planning.Plan) -> dict:
    config = copy.deepcopy(source.config)
    config["quantization_config"] = plan.settings.to_json()
    if plan.untie:
        config["tie_word_embeddings"] = False
        for part in config.values():
            if isinstance(part, dict) and part.get("tie_word_embeddings"):
                part["tie_word_embeddings"] = False
    return config


def _bytes(source: Source, name: str) -> int:
    stored, count = source.tensors[name], 1
    for size in stored.shape:
        count *= size
    return count * stored.dtype.itemsize


def _checked_device(device) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(1, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"device must be one that works here, got {device!r}: {reason}") from error
    if device.type == "meta":
        raise DeviceError("device must hold data, got meta")
    return device
