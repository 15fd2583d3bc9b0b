"""Rotary embeddings of a GGUF file as transformers' ``rope_parameters``.

Source: llama.cpp, gguf-py/gguf/constants.py (keys) and convert_hf_to_gguf.py: a Llama 3.1 keeps no settings of its
scaling, but what they give: rope_freqs.weight, by which each frequency is divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ...errors import FormatError

#: What every Llama 3.1 to 3.3 was trained with; only the factor differs.
_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192


def rope_parameters(kind: str, metadata: Mapping, head_dim: int, freqs: torch.Tensor | None, hint: str) -> dict:
    """``rope_parameters`` of the metadata of architecture kind; freqs: rope_freqs.weight ``[head_dim / 2]`` or None.

    Raises FormatError, ending in hint, for a scaling whose settings the file does not hold.
    """
    theta = metadata.get(f"{kind}.rope.freq_base", 10000.0)
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    factor = metadata.get(f"{kind}.rope.scaling.factor", metadata.get(f"{kind}.rope.scale_linear", 1.0))
    if type(theta) is not float or type(factor) is not float or not 0 < theta < math.inf or not 0 < factor < math.inf:
        raise FormatError(f"{kind}.rope.freq_base and rope.scaling.factor must be numbers, got {theta!r}, {factor!r}")
    if freqs is not None:
        return _llama3(freqs.float(), theta, head_dim, hint)
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise FormatError(f"{kind}.rope.scaling.type {scaling!r:.50} has no settings for transformers yet; {hint}")


def _llama3(freqs: torch.Tensor, theta: float, head_dim: int, hint: str) -> dict:
    factor = round(float(freqs.max()), 4) if freqs.shape == (head_dim // 2,) and freqs.isfinite().all() else 0.0
    known = factor > 1
    if known:
        expected = torch.tensor([_divisor(theta ** (-2 * i / head_dim), factor) for i in range(head_dim // 2)])
        known = torch.allclose(expected, freqs, rtol=1e-4, atol=0)
    if not known:
        raise FormatError(f"rope_freqs.weight is not the scaling of a Llama 3, whose settings are known; {hint}")
    settings = {"factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
    trained = {"original_max_position_embeddings": _TRAINED}
    return {"rope_type": "llama3", "rope_theta": theta, **settings, **trained}


def _divisor(frequency: float, factor: float) -> float:
    """What a frequency is divided by: 1 for short waves, factor for long ones, something between for the others."""
    waves = _TRAINED * frequency / (2 * math.pi)  # that fit into the context that the model was trained with
    if waves > _HIGH:
        return 1.0
    if waves < _LOW:
        return factor
    part = (waves - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - part) / factor + part)
