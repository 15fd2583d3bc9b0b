"""Floats as compressed-tensors stores them: float-quantized, mxfp4, mxfp6, mxfp8 and nvfp4, scales as they are.

The layouts are those that formats/compressed_tensors_floats.py and, of float-quantized, compressed_tensors_weights.py
read.
"""

from __future__ import annotations

import torch

from ..errors import FormatError
from ..scheme import Schemed
from ..tensor import QuantTensor

#: (type, group size, type of scales) -> layout; with other scales float8_e4m3 is float-quantized.
_LAYOUTS = {
    ("float4_e2m1", 32, "float8_e8m0fnu"): "mxfp4-pack-quantized",
    ("float6_e2m3", 32, "float8_e8m0fnu"): "mxfp6-pack-quantized",
    ("float8_e4m3", 32, "float8_e8m0fnu"): "mxfp8-quantized",
    ("float4_e2m1", 16, "float8_e4m3fn"): "nvfp4-pack-quantized",
}
_HELD = (
    "compressed-tensors holds floats as float4_e2m1, float6_e2m3 and float8_e4m3 with groups of 32 and scales "
    "float8_e8m0fnu, as float4_e2m1 with groups of 16 and scales float8_e4m3fn, and as float8_e4m3 with wider scales"
)


def layout_of(weight: Schemed) -> str:
    """The layout of a float weight's scheme. Raises FormatError for one that compressed-tensors does not hold."""
    scales = weight.scheme.scale_type
    layout = _LAYOUTS.get((weight.dtype.name, weight.group_size, scales))
    if layout is None and weight.dtype.name == "float8_e4m3" and not scales.startswith("float8"):
        layout = "float-quantized"
    if layout is None or weight.zero_kind != "none" or getattr(weight, "codebook", None) is not None:
        book = " and a codebook" if getattr(weight, "codebook", None) is not None else ""
        raise FormatError(
            f"{_HELD}, got {weight.dtype} with groups of {weight.group_size}, scales {scales}, zero_kind "
            f"{weight.zero_kind!r}{book}"
        )
    return layout


def settings_of(weight: Schemed) -> dict:
    """The "weights" settings of a float weight's scheme. Raises FormatError as above."""
    layout, size = layout_of(weight), weight.group_size
    settings = {"num_bits": weight.dtype.bits, "type": "float", "symmetric": True, "dynamic": False}
    if layout == "float-quantized":
        return {
            **settings,
            "strategy": "channel" if size == -1 else "group",
            "group_size": None if size == -1 else size,
        }
    if layout == "nvfp4-pack-quantized":
        return {**settings, "strategy": "tensor_group", "group_size": size, "scale_dtype": "torch.float8_e4m3fn"}
    return {**settings, "strategy": "group", "group_size": size, "scale_dtype": "torch.uint8"}


def layout_of_settings(settings: dict) -> str:
    """The layout that goes with the settings of a weight, of an integer too."""
    if settings["type"] == "int":
        return "pack-quantized"
    if settings["strategy"] == "tensor_group":
        return "nvfp4-pack-quantized"
    if settings.get("scale_dtype") != "torch.uint8":
        return "float-quantized"
    bits = settings["num_bits"]
    return "mxfp8-quantized" if bits == 8 else f"mxfp{bits}-pack-quantized"


def to_tensors(qt: QuantTensor) -> dict[str, torch.Tensor]:
    """The tensors of a float weight by their last names. Raises FormatError for what its layout cannot hold."""
    layout, (_, k) = layout_of(qt), qt.shape
    if qt.perm is not None:
        raise FormatError(f"{layout} holds columns in their order, got a weight with perm")
    if qt.group_size != -1 and k % qt.group_size:
        raise FormatError(f"{layout} has no short groups: K must be a multiple of {qt.group_size}, got {k}")
    if qt.dtype.bits == 8:
        tensors = {"weight": qt.codes.view(torch.float8_e4m3fn)}
    else:
        tensors = {"weight_packed": qt.codes}
    if layout == "nvfp4-pack-quantized":
        return {**tensors, "weight_scale": qt.scales, "weight_global_scale": _global_scale(qt.row_scales)}
    small = qt.scales.dtype == torch.float8_e8m0fnu
    return {**tensors, "weight_scale": qt.scales.view(torch.uint8) if small else qt.scales}


def _global_scale(factors: torch.Tensor) -> torch.Tensor:
    """The one number, float32 [1], that scales are divided by: its reciprocal is the factor of every row."""
    factor = factors.flatten()[:1].float()
    if bool((factors != factor).any()):
        raise FormatError(
            "nvfp4-pack-quantized has one factor for all rows, got a weight whose rows have different ones: lowbit "
            "quantizes so; weights that were imported have one"
        )
    start = 1 / factor
    near = (torch.nextafter(start, start * 2), torch.nextafter(start, start / 2))
    for number in (start, *near):
        if bool(1 / number == factor):
            return number
    raise FormatError(f"nvfp4-pack-quantized divides by a number, and 1 / {float(factor)!r} is none of float32")
