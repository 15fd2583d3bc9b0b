"""Weights for other programs: compressed-tensors (pack-quantized, 2 to 8 bits) and GPTQ v2.

Both are exact or refused. The layouts are those that formats/compressed_tensors_weights.py and formats/gptq.py read;
vLLM loads the first at every width.
"""

from __future__ import annotations

import torch

from ..errors import DtypeError, FormatError
from ..tensor import QuantTensor


def to_compressed_tensors(qt: QuantTensor) -> tuple[dict[str, torch.Tensor], dict]:
    """``(tensors by their last names, the "weights" settings of a group of config_groups)`` of an int2..8 weight, or of
    a uint2..8 one with whole zeros, for compressed-tensors from version 0.18 on.

    Raises DtypeError for anything but a QuantTensor, FormatError for a weight that the format cannot hold.
    """
    bits, zeros = _integer(qt, "pack-quantized")
    n, k = qt.shape
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
        tensors["weight_zero_point"] = _words(QuantTensor.pack_codes(zeros.t().contiguous(), bits)).t().contiguous()
    grouped = {"strategy": "group", "group_size": qt.group_size}
    whole = {"strategy": "channel", "group_size": None}
    settings = {"num_bits": bits, "type": "int", "symmetric": zeros is None, "dynamic": False}
    return tensors, {**settings, **(whole if qt.group_size == -1 else grouped)}


def compressed_tensors_config(settings: dict, ignore: list[str]) -> dict:
    """The ``quantization_config`` of a model whose layers all have these settings; ignore: layers left alone."""
    group = {"targets": ["Linear"], "weights": settings, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "version": "0.18.0",
    }


def to_gptq(qt: QuantTensor) -> tuple[dict[str, torch.Tensor], dict]:
    """``(tensors by their last names, the quantization_config)`` of an int2..8 weight, or of a uint2..8 one with whole
    zeros, as ``checkpoint_format: "gptq_v2"``; a perm becomes ``g_idx`` (``desc_act``).

    Raises DtypeError for anything but a QuantTensor, FormatError for a weight that the format cannot hold.
    """
    bits, zeros = _integer(qt, "gptq_v2")
    n, k = qt.shape
    if k * bits % 32 or n * bits % 32:
        raise FormatError(f"gptq_v2 fills whole words: N and K times {bits} must be multiples of 32, got {n} and {k}")
    if zeros is None:
        zeros = torch.full(qt.scales.shape, 1 << (bits - 1), dtype=torch.uint8, device=qt.device)
    stream, group_of = qt.codes, torch.arange(k, device=qt.device) // (k if qt.group_size == -1 else qt.group_size)
    if qt.perm is not None:
        codes, perm = qt.unpack(), qt.perm.long()
        stream = QuantTensor.pack_codes(torch.empty_like(codes).index_copy_(1, perm, codes), bits)
        group_of = torch.empty_like(group_of).index_copy_(0, perm, group_of)
    tensors = {
        "qweight": _words(stream).t().contiguous(),
        "qzeros": _words(QuantTensor.pack_codes(zeros.t().contiguous(), bits)),
        "scales": qt.scales.t().contiguous(),
        "g_idx": group_of.to(torch.int32),
    }
    settings = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": bits, "group_size": qt.group_size}
    return tensors, {**settings, "sym": qt.zeros is None, "desc_act": qt.perm is not None, "pack_dtype": "int32"}


def _integer(qt: QuantTensor, name: str) -> tuple[int, torch.Tensor | None]:
    """``(bits, zeros uint8 [N, G] or None)`` of a weight of whole numbers. Raises DtypeError or FormatError."""
    if not isinstance(qt, QuantTensor):
        raise DtypeError(f"expected a QuantTensor, got {type(qt).__name__}")
    bits, pair = qt.dtype.bits, (qt.dtype.kind, qt.zero_kind)
    if bits == 1 or qt.codebook is not None or pair not in (("int", "none"), ("uint", "zero")):
        book = " with a codebook" if qt.codebook is not None else ""
        raise FormatError(
            f"{name} holds int2 to int8, and uint2 to uint8 with zero_kind 'zero', got {qt.dtype} with zero_kind "
            f"{qt.zero_kind!r}{book}"
        )
    if qt.zeros is None:
        return bits, None
    zeros = qt.zeros.float()
    bad = int(((zeros != zeros.round()) | (zeros < 0) | (zeros >= 1 << bits)).count_nonzero())
    if bad:
        raise FormatError(f"{name} holds whole zeros of 0..{(1 << bits) - 1}, {bad} of {zeros.numel()} are others")
    return bits, zeros.to(torch.uint8)


def _words(stream: torch.Tensor) -> torch.Tensor:
    """int32 ``[R, words]`` of a bit stream uint8 ``[R, bytes]``, padded with zeros."""
    padded = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 4))
    return padded.flatten().view(torch.int32).view(len(stream), -1)
