"""export_checkpoint: a checkpoint of lowbit's own becomes one that other programs read, file by file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as partial_of
from pathlib import Path

from ..errors import FormatError, LowbitError, nearest
from ..scheme import Scheme, Schemed
from ..tensor_checks import checked_path
from . import export, export_floats, native
from .formats.base import type_name
from .partial import Partial
from .rewrite import rewrite
from .safetensors_file import Later, Reader, write
from .source import Source, Stored


@dataclass(frozen=True)
class Layer(Schemed):
    """What the header of a file says of a weight; perm, codebook: True or None."""

    scheme: Scheme
    perm: bool | None
    codebook: bool | None


def export_checkpoint(
    src, dst, format: str = "compressed-tensors", *, progress: Callable[[int, int, str], None] | None = None
) -> Path:
    """Write lowbit's checkpoint in folder src as the new folder dst of another format; returns the path of dst.

    format: "compressed-tensors" (integers of 2 to 8 bits, pack-quantized as of version 0.18; floats of 8 bits, of MX
    formats and of NVFP4) or "gptq" (GPTQ v2; "gptq_p" where a layer has 5, 6 or 7 bits, for which GPTQModel has no
    other layout). Values are the same, or it is an error: types,
    zeros and shapes that the format cannot hold, perm in compressed-tensors. Layers of several schemes are named in
    config_groups, or in GPTQ's dynamic. Tensors that are not quantized and all other files are copied. ``act`` is no
    part of a weight, and is not written.

    The source is only read. Memory holds the weights of one file. dst appears whole, by a rename; until then the work
    lies beside it in ``.<name>.partial``, whose finished files are used again by the next call. progress: called with
    (bytes done, bytes in all, name) after each tensor.

    Raises FormatError, with the weight's name, for what cannot be exported and for a source that is damaged, or no
    checkpoint written by quantize_checkpoint or convert; LowbitError where dst exists or cannot be written.
    """
    if format not in _FORMATS:
        raise FormatError(f"no format to export to is called {format!r:.100}; expected {nearest(format, _FORMATS)}")
    source, dst, (to_tensors, to_config) = Source(src, quantized=True), checked_path(dst, "dst"), _FORMATS[format]
    if source.folder.resolve() in [dst.resolve(), *dst.resolve().parents]:
        raise LowbitError(f"{dst} must not lie inside the checkpoint {src}")
    layers = _layers(source)
    held = {f"{name}.{short}" for name in layers for short in native.FIELDS}
    floats = [name for name, stored in source.tensors.items() if name not in held and len(stored.shape) == 2]
    left = [name.removesuffix(".weight") for name in floats if name.endswith(".weight")]
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    config["quantization_config"] = to_config(layers, left)
    if format == "gptq":
        to_tensors = partial_of(to_tensors, planar=_planar(layers))
    about = {"lowbit": native.FORMAT, "to": config["quantization_config"], "shards": source.shards}

    def write_shard(path: Path, names: list[str], target: Path, step) -> dict[str, int]:
        return _write_shard(path, names, target, step, to_tensors)

    try:
        with Partial(dst, about) as partial:
            rewrite(source, partial, write_shard, config, progress)
            partial.publish()
    except OSError as error:
        raise LowbitError(
            f"{dst} cannot be written: {error.strerror or error}; run again to go on with the finished files"
        ) from error
    return dst


def _layers(source: Source) -> dict[str, Layer]:
    """Every quantized weight by name, from the headers of the files. Raises FormatError."""
    settings = source.config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method != "lowbit":
        hint = "`lowbit convert` it first" if method else "quantize it first"
        raise FormatError(
            f"{source.folder}: expected a checkpoint of quant_method 'lowbit', got {method!r:.50}; {hint}"
        )
    layers = {}
    for shard in source.shards:
        with Reader(source.folder / shard) as reader:
            entries = native.entries_of(reader) if "lowbit" in reader.metadata else {}
            for name, entry in entries.items():
                layers[name] = _layer(f"{shard}: {name}", entry, source.tensors.get(f"{name}.scales"))
    codes = [name.removesuffix(".qweight") for name in source.tensors if name.endswith(".qweight")]
    unknown = [name for name in codes if name not in layers]
    if unknown or not layers:
        got = f"none for {unknown[0]}" if unknown else "none"
        raise FormatError(
            f"{source.folder}: expected files whose metadata describe each weight, as quantize_checkpoint and convert "
            f"write them, got {got}"
        )
    return layers


def _layer(where: str, entry, scales: Stored | None) -> Layer:
    kind = "float16" if scales is None else type_name(scales.dtype)  # without scales it is refused when it is read
    try:
        scheme = Scheme.make(entry["dtype"], entry["group_size"], entry["zero_kind"], kind)
        held = list(entry["tensors"])
    except (LowbitError, KeyError, TypeError) as error:
        raise FormatError(f"{where}: its entry does not describe a weight: {error}") from None
    return Layer(scheme, *("perm" in held or None, "codebook" in held or None))


def _write_shard(path: Path, names: list[str], target: Path, step, to_tensors) -> dict[str, int]:
    """Write the weights of one file; returns name -> bytes of what was written."""
    tensors = {}
    with Reader(path) as reader:
        entries = native.entries_of(reader) if "lowbit" in reader.metadata else {}
        parts = {f"{name}.{short}": name for name in entries for short in native.FIELDS}
        for name in names:
            owner = parts.get(name)
            if owner is None:
                dtype, shape, _, _ = reader.entries[name]
                tensors[name] = Later(dtype, tuple(shape), lambda name=name: reader.read(name))
            elif name.endswith(".qweight"):
                made = _named(owner, lambda owner=owner: to_tensors(native.read(reader, owner, entries[owner])))[0]
                tensors |= {f"{owner}.{last}": tensor for last, tensor in made.items()}
            step(name)
        write(target, tensors, {"format": "pt"})
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _named(name: str, call):
    """What call returns; its LowbitErrors begin with the name of the weight."""
    try:
        return call()
    except LowbitError as error:
        raise type(error)(f"{name}: {error}" if name not in str(error) else str(error)) from error


def _settings(layers: dict[str, Layer], of_one) -> tuple[dict[str, dict], dict]:
    """(settings by name, the most common ones). Raises FormatError for a layer that another program cannot hold."""
    made = {}
    for name, layer in layers.items():
        if re.search(r"\.experts\.\d+\.gate_up_proj$", name):
            raise FormatError(f"{name}: gate and up projection are one matrix, which has no name in other formats")
        made[name] = _named(name, lambda layer=layer: of_one(layer))
    return made, dict(Counter(tuple(one.items()) for one in made.values()).most_common(1)[0][0])


def _compressed_tensors(layers: dict[str, Layer], left: list[str]) -> dict:
    def of_one(layer: Layer) -> dict:
        settings = export.compressed_tensors_settings(layer)
        if layer.perm:
            layout = export_floats.layout_of_settings(settings)
            raise FormatError(f"{layout} holds columns in their order, got a weight with perm")
        return settings

    settings, common = _settings(layers, of_one)
    groups = {tuple(one.items()): [] for one in (common, *settings.values())}
    for name, one in settings.items():
        groups[tuple(one.items())].append(name)
    # Why names where schemes differ: readers disagree on which of a class and a name goes first.
    named = [(["Linear"] if len(groups) == 1 else names, dict(one)) for one, names in groups.items()]
    return export.compressed_tensors_groups(named, [*left, *(["lm_head"] if "lm_head" not in [*layers, *left] else [])])


def _planar(layers: dict[str, Layer]) -> bool:
    """Whether a layer makes all of a GPTQ checkpoint planar."""
    return any(layer.dtype.bits in export.PLANAR_ONLY for layer in layers.values())


def _gptq(layers: dict[str, Layer], left: list[str]) -> dict:
    settings, common = _settings(layers, lambda layer: export.gptq_settings(layer, layer.perm is not None))
    dynamic = {f"+:^{re.escape(name)}$": one for name, one in settings.items() if one != common}
    # Why only with a number: outside of the blocks nothing is expected to be quantized.
    dynamic |= {f"-:^{re.escape(name)}$": {} for name in left if re.search(r"\.\d+\.", name)}
    made = export.gptq_config(common, _planar(layers))
    if "lm_head" in layers:
        made["lm_head"] = True
    return {**made, "dynamic": dynamic} if dynamic else made


#: Format -> (tensors of a weight, quantization_config of layers and the names of float matrices).
_FORMATS = {
    "compressed-tensors": (export.to_compressed_tensors, _compressed_tensors),
    "gptq": (export.to_gptq, _gptq),
}
FORMATS = tuple(_FORMATS)
