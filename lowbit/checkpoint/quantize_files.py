"""quantize_checkpoint: a float HuggingFace checkpoint on disk to a quantized one, shard by shard."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ..errors import DeviceError, LowbitError
from ..tensor_checks import checked_device, checked_path
from . import plan as planning
from .block_store import BlockStore
from .calibrated_files import CalibratedModel, checked_calibration, depends_on, reads_calibration
from .layers import quantize_matrix
from .native import FORMAT, describe
from .partial import Partial
from .rewrite import finished, rewrite
from .safetensors_file import Later, Reader, write
from .settings import Settings, expect_quantizable
from .source import Source


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
    calibration: torch.Tensor | None = None,
    device="cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> Path:
    """Quantize the safetensors checkpoint in folder ``src`` into the new folder ``dst``; returns the path of ``dst``.

    dtype, group_size, method, zero_kind, act, skip, dynamic: as in :func:`lowbit.quantize_model`; names are those of
    the model that transformers builds. The matrices of a mixture's experts are called ``...experts.3.down_proj``, and
    patterns may say ``experts.down_proj`` for all. scale_dtype: "float16", "bfloat16" or "float32", by default that of
    the weights, float16 for float32 ones; without zeros and calibration also "float8_e8m0fnu" and "float8_e4m3fn", see
    :func:`lowbit.quantize`. lm_head: weight type of the output layer, which by default stays as it is; one that is tied
    to the embedding is then stored apart. calibration: token ids int ``[samples, length]``, which
    "gptq" and "awq" read. device: where to compute. progress: called with (bytes done, bytes in all, name) after each
    tensor, and before that, with calibration, with (layers done, layers in all, name) after each layer.

    The source is only read. One tensor at a time is in memory beside the quantized tensors of one shard. dst appears
    whole, by a rename; until then the work lies beside it in ``.<name>.partial``, whose finished shards are used again
    by the next call with the same settings and an unchanged source. With calibration one decoder block at a time is in
    memory, beside the embeddings and the hidden states of all tokens; these and the quantized blocks lie in that folder
    too until the end, and the next call goes on behind the last finished block, if the calibration, config.json and the
    versions of lowbit, torch and transformers are the same as well.

    Raises FormatError for a source that is incomplete, damaged, no safetensors or quantized already; SchemeError for
    settings that do not exist or fit no layer; DtypeError for arguments of a wrong type; QuantizationError, with the
    layer's name, for weights that cannot be quantized; LowbitError where dst exists or cannot be written.
    """
    device = _checked_device(device)
    dtype, group = getattr(dtype, "name", dtype), {"group_size": group_size, "method": method, "zero_kind": zero_kind}
    settings = Settings.make(
        dtype=dtype, **group, act=act, scale_dtype=scale_dtype, skip=skip, dynamic=dynamic, lm_head=lm_head
    )
    expect_quantizable(settings.default(), calibrated=True)
    checked_calibration(reads_calibration(settings), calibration)
    source, dst = Source(src), checked_path(dst, "dst")
    if source.folder.resolve() in [dst.resolve(), *dst.resolve().parents]:
        raise LowbitError(f"{dst} must not lie inside the checkpoint {src}")
    plan = planning.make(source, settings)
    about = {"lowbit": FORMAT, "config": plan.settings.to_json(), "shards": source.shards}
    stamps = {}
    if calibration is not None:
        about["calibration"] = depends_on(source, calibration)
        # Why now: calibration reads all files, long before each is written.
        stamps = about["calibration"]["files"]
    try:
        scratch = None if calibration is None else "blocks"
        with Partial(dst, about, scratch) as partial:
            with contextlib.ExitStack() as stack:
                model = None
                if calibration is not None and not finished(source, partial):
                    store = BlockStore(partial.scratch, about)
                    model = stack.enter_context(CalibratedModel(source, plan, store, device))
                    if not store.complete:
                        partial.forget()  # shards of another run, whose blocks are lost
                    model.quantize(calibration, progress)

                def write_shard(*files):
                    return _write_shard(*files, plan, device, model)

                rewrite(source, partial, write_shard, _config(source, plan), progress, stamps)
            partial.publish()
    except OSError as error:
        raise LowbitError(
            f"{dst} cannot be written: {error.strerror or error}; run again to go on with what is finished"
        ) from error
    return dst


def _write_shard(
    path: Path, names: list[str], target: Path, step, plan: planning.Plan, device, model: CalibratedModel | None
) -> dict[str, int]:
    """Quantize one file, or write what a model has of it; returns name -> bytes of what was written."""
    tensors, entries = {}, {}
    with Reader(path) as reader:
        for name in names:
            job = plan.jobs.get(name)
            if job is not None:
                for stem, options, expert in job.outputs:
                    if model is None:
                        weight = reader.read(name, expert).to(device)
                        qt = quantize_matrix(stem, weight.T if job.transposed else weight, options).cpu()
                        del weight
                        made, entries[stem] = describe(stem, qt.validate(stem))
                    else:
                        made, entries[stem] = model.quantized(stem)
                    tensors.update(made)
            if job is None or job.keep:
                dtype, shape, _, _ = reader.entries[name]
                kept = None if model is None else model.kept(name)
                tensors[name] = kept or Later(dtype, tuple(shape), lambda name=name: reader.read(name))
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


def _checked_device(device) -> torch.device:
    device = checked_device(device)
    if device.type == "meta":
        raise DeviceError("device must hold data, got meta")
    return device
