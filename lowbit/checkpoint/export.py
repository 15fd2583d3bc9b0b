"""Weights for other programs: compressed-tensors and GPTQ (v2, or in planes).

Both are exact or refused. Integers of compressed-tensors are pack-quantized, 2 to 8 bits, which vLLM loads at every
width; floats are those of export_floats.py. The layouts are those that formats/ reads.
"""

from __future__ import annotations

import torch

from .. import bit_stream
from ..errors import DtypeError, FormatError
from ..scheme import SCALE_TYPES, WIDER_SCALES, Schemed
from ..tensor import QuantTensor
from . import export_floats
from .formats.fields import planes_of
from .formats.gptq import PLANAR_ONLY


def to_compressed_tensors(qt: QuantTensor) -> tuple[dict[str, torch.Tensor], dict]:
    """``(tensors by their last names, the "weights" settings of a group of config_groups)`` of an int2..8 weight, of a
    uint2..8 one with whole zeros, or of a float of export_floats.py, for compressed-tensors from version 0.18 on.

    Raises DtypeError for anything but a QuantTensor, FormatError for a weight that the format cannot hold.
    """
    settings = compressed_tensors_settings(qt)
    if settings["type"] == "float":
        return export_floats.to_tensors(qt), settings
    bits, zeros, (n, k) = qt.dtype.bits, _whole_zeros(qt, "pack-quantized"), qt.shape
    if qt.perm is not None:
        raise FormatError("pack-quantized holds columns in their order, got a weight with perm")
    if qt.group_size != -1 and k % qt.group_size:
        raise FormatError(f"pack-quantized has no short groups: K must be a multiple of {qt.group_size}, got {k}")
    tensors = {
        "weight_packed": _words(qt.codes),
        "weight_scale": qt.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = _dense_words(zeros.t().contiguous(), bits).t().contiguous()
    return tensors, settings


def compressed_tensors_settings(weight: Schemed) -> dict:
    """The "weights" settings of a weight's scheme. Raises DtypeError, or FormatError for a scheme that does not fit."""
    if isinstance(weight, Schemed) and weight.dtype.kind == "float":
        return export_floats.settings_of(weight)
    _expect_integer(weight, "pack-quantized")
    grouped = {"strategy": "group", "group_size": weight.group_size}
    whole = {"strategy": "channel", "group_size": None}
    symmetric = weight.zero_kind == "none"
    settings = {"num_bits": weight.dtype.bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    return {**settings, **(whole if weight.group_size == -1 else grouped)}


def compressed_tensors_config(settings: dict, ignore: list[str]) -> dict:
    """The ``quantization_config`` of a model whose layers all have these settings; ignore: layers left alone."""
    return compressed_tensors_groups([(["Linear"], settings)], ignore)


def compressed_tensors_groups(groups: list[tuple[list[str], dict]], ignore: list[str]) -> dict:
    """The ``quantization_config`` of groups of layers: (targets, settings) each; ignore: layers left alone."""
    layouts = [export_floats.layout_of_settings(settings) for _, settings in groups]
    mixed = len(set(layouts)) > 1
    made = []
    for (targets, settings), layout in zip(groups, layouts, strict=True):
        made.append(
            {"targets": list(targets), "weights": settings, "input_activations": None, "output_activations": None}
        )
        if mixed:
            made[-1]["format"] = layout
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if mixed else layouts[0],
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(made)},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "version": "0.18.0",
    }


def to_gptq(qt: QuantTensor, planar: bool | None = None) -> tuple[dict[str, torch.Tensor], dict]:
    """``(tensors by their last names, the quantization_config)`` of an int2..8 weight, or of a uint2..8 one with whole
    zeros, as ``checkpoint_format: "gptq_v2"``; a perm becomes ``g_idx`` (``desc_act``). planar: as "gptq_p", by default
    for 5, 6 and 7 bits, which have no other layout.

    Raises DtypeError for anything but a QuantTensor, FormatError for a weight that the format cannot hold.
    """
    settings = gptq_settings(qt, getattr(qt, "perm", None) is not None)
    planar = settings["bits"] in PLANAR_ONLY if planar is None else planar
    name = "gptq_p" if planar else "gptq_v2"
    bits, zeros, (n, k) = qt.dtype.bits, _whole_zeros(qt, name), qt.shape
    if k * bits % 32 or n * bits % 32 or (planar and (k % 32 or n % 32)):
        whole = "" if planar else f" times {bits}"
        raise FormatError(f"{name} fills whole words: N and K{whole} must be multiples of 32, got {n} and {k}")
    if zeros is None:
        zeros = torch.full(qt.scales.shape, 1 << (bits - 1), dtype=torch.uint8, device=qt.device)
    codes, group_of = qt.unpack(), torch.arange(k, device=qt.device) // (k if qt.group_size == -1 else qt.group_size)
    if qt.perm is not None:
        perm = qt.perm.long()
        codes = torch.empty_like(codes).index_copy_(1, perm, codes)
        group_of = torch.empty_like(group_of).index_copy_(0, perm, group_of)
    words = _planar_words if planar else _dense_words
    tensors = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(zeros.t().contiguous(), bits),
        "scales": qt.scales.t().contiguous(),
        "g_idx": group_of.to(torch.int32),
    }
    return tensors, gptq_config(settings, planar)


def gptq_config(settings: dict, planar: bool = False) -> dict:
    """The ``quantization_config`` of a model whose layers all have these settings."""
    version = "gptq_p" if planar else "gptq_v2"
    return {"quant_method": "gptq", "checkpoint_format": version, "pack_dtype": "int32", **settings}


def gptq_settings(weight: Schemed, ordered: bool) -> dict:
    """bits, group_size, sym and desc_act of a weight's scheme; ordered: whether it has a perm. Errors: as above."""
    _expect_integer(weight, "gptq")
    settings = {"bits": weight.dtype.bits, "group_size": weight.group_size}
    return {**settings, "sym": weight.zero_kind == "none", "desc_act": ordered}


def _expect_integer(weight, name: str) -> None:
    """Raises DtypeError for what has no scheme, FormatError for a scheme that is not of whole numbers."""
    if not isinstance(weight, Schemed):
        raise DtypeError(f"expected a QuantTensor, got {type(weight).__name__}")
    bits, pair = weight.dtype.bits, (weight.dtype.kind, weight.zero_kind)
    codebook = getattr(weight, "codebook", None) is not None
    if bits == 1 or codebook or pair not in (("int", "none"), ("uint", "zero")):
        book = " with a codebook" if codebook else ""
        raise FormatError(
            f"{name} holds int2 to int8, and uint2 to uint8 with zero_kind 'zero', got {weight.dtype} with zero_kind "
            f"{weight.zero_kind!r}{book}"
        )
    if weight.scheme.scale_type in WIDER_SCALES:
        wanted = ", ".join(kind for kind in SCALE_TYPES if kind not in WIDER_SCALES)
        raise FormatError(f"{name} holds scales of {wanted}, got {weight.scheme.scale_type}")


def _whole_zeros(qt: QuantTensor, name: str) -> torch.Tensor | None:
    """The zeros uint8 ``[N, G]``, or None. Raises FormatError for one that is no whole number of the codes' range."""
    if qt.zeros is None:
        return None
    bits, zeros = qt.dtype.bits, qt.zeros.float()
    bad = int(((zeros != zeros.round()) | (zeros < 0) | (zeros >= 1 << bits)).count_nonzero())
    if bad:
        raise FormatError(f"{name} holds whole zeros of 0..{(1 << bits) - 1}, {bad} of {zeros.numel()} are others")
    return zeros.to(torch.uint8)


def _dense_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return _words(bit_stream.pack(codes, bits))


def _planar_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 ``[R, k*bits/32]`` of codes uint8 ``[R, k]``, k a multiple of 32, as formats/fields.py reads them."""
    blocks, made = codes.reshape(-1, 32), []
    for width in planes_of(bits):
        low = sum(part.shape[1] for part in made)
        made.append(_dense_words((blocks >> low) & ((1 << width) - 1), width))
    return torch.cat(made, 1).view(len(codes), -1)


def _words(stream: torch.Tensor) -> torch.Tensor:
    """int32 ``[R, words]`` of a bit stream uint8 ``[R, bytes]``, padded with zeros."""
    padded = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 4))
    return padded.flatten().view(torch.int32).view(len(stream), -1)
