"""GPTQ checkpoints: AutoGPTQ and GPTQModel, ``checkpoint_format`` "gptq" (v1), "gptq_v2" and "gptq_p".

Layout (github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear): ``qweight`` int32 ``[K*b/32, N]``, each column a
bit stream along K from the lowest bit; ``qzeros`` int32 ``[G, N*b/32]``, each row such a stream along N; ``scales``
``[G, N]``; ``g_idx`` int32 ``[K]``, the group of each input. ``W[n, k] = scales[g, n] * (q[k, n] - z[g, n])``. v1
stores z - 1, v2 and gptq_p store z. In gptq_p (docs/gptq_planar.md there) streams are cut into planes
(:func:`~.fields.planar_codes`), which changes words of 3, 5, 6 and 7 bits; the last three have no other layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .base import Format, expect, group_setting, matches, setting
from .fields import dense_codes, group_order, planar_codes, regroup

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_VERSIONS = {"gptq": 1, "gptq_v2": 2, "gptq_p": 2}
_BITS = (2, 3, 4, 5, 6, 7, 8)
PLANAR_ONLY = (5, 6, 7)


class Gptq(Format):
    """``quant_method: "gptq"``, or a quantize_config.json without one."""

    name = "gptq"
    primaries = ("qweight",)
    required = ("qzeros", "scales")
    optional = ("g_idx",)

    def __init__(self, config: Mapping):
        super().__init__(config)
        version = config.get("checkpoint_format") or "gptq"
        if version not in tuple(_VERSIONS):
            raise FormatError(f"checkpoint_format must be one of {', '.join(_VERSIONS)}, got {version!r:.100}")
        pack = config.get("pack_dtype", "int32")
        if pack not in ("int32", None):
            raise FormatError(f"pack_dtype must be int32, got {pack!r:.100}")
        self.config.update(version=_VERSIONS[version], planar=version == "gptq_p")
        self.config.update(bits=setting(config, "bits", int, choices=_BITS))
        group_setting(self.config, default=-1)
        self.dynamic = setting(config, "dynamic", dict, None) or {}

    def settings(self, name: str) -> Mapping:
        """Entries of ``dynamic`` are regular expressions: "-:" leaves layers alone, "+:" or nothing overrides."""
        for pattern, changed in self.dynamic.items():
            if matches(pattern.removeprefix("+:").removeprefix("-:"), name):
                if pattern.startswith("-:"):
                    raise FormatError(f"{name}: dynamic[{pattern!r}] says that it is not quantized, but it has qweight")
                if not isinstance(changed, dict):
                    raise FormatError(f"dynamic[{pattern!r}] must be settings, got {type(changed).__name__}")
                return {**self.config, **changed}
        return self.config

    @staticmethod
    def decode_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping) -> QuantTensor:
        """qweight, qzeros, scales, g_idx -> uint codes with a zero, or int codes where ``sym``.

        Layers of ``desc_act`` get a ``perm`` that brings each group's inputs together.
        """
        bits, sym = setting(settings, "bits", int, choices=_BITS), setting(settings, "sym", bool, True)
        if bits in PLANAR_ONLY and not settings.get("planar"):
            raise FormatError(
                f"{bits} bits have a layout in checkpoint_format gptq_p alone, got gptq or gptq_v2; who wrote this?"
            )
        scales = expect(tensors, "scales", _FLOATS, (None, None))
        groups, n = scales.shape
        words = expect(tensors, "qweight", torch.int32, (None, n))
        if words.shape[0] % bits:
            rows = words.shape[0]
            raise FormatError(
                f"qweight of {bits} bits has a multiple of {bits} rows of words, got {rows}; is bits right?"
            )
        k = words.shape[0] * 32 // bits
        asked = group_setting(settings, default=-1)
        size = k if asked == -1 else min(asked, k)
        if groups != -(-k // size):
            raise FormatError(f"scales of {k} inputs in groups of {size} have {-(-k // size)} rows, got {groups}")
        codes, zeros = _codes(words.t().contiguous(), bits, k, settings), _zeros(tensors, settings, groups, n, bits)
        of_input = straight = torch.arange(k, device=codes.device) // size
        if "g_idx" in tensors:
            of_input = expect(tensors, "g_idx", (torch.int32, torch.int64), (k,)).long()

        def dequantize():
            return (codes.float() - zeros.t().float()[:, of_input]) * scales.t().float()[:, of_input]

        perm = group_order(of_input, straight, groups, dequantize)
        stored = None if sym else zeros.t().to(scales.dtype)
        if sym:
            _check_symmetric(zeros, bits)
        group, held, stored = regroup(k, -1 if asked == -1 else size, scales.t(), stored, dequantize)
        return QuantTensor.from_codes(
            codes if perm is None else codes[:, perm.long()],
            held,
            stored,
            dtype=f"{'int' if sym else 'uint'}{bits}",
            group_size=group,
            perm=perm,
        )


def _codes(words: torch.Tensor, bits: int, k: int, settings: Mapping) -> torch.Tensor:
    """Codes uint8 ``[R, k]`` of words ``[R, k*bits/32]``."""
    if bits in (2, 4, 8) or not settings.get("planar"):
        return dense_codes(words, bits, k)
    if k % 32:
        raise FormatError(f"gptq_p packs {bits} bits in blocks of 32: K and N must be a multiple of that, got {k}")
    return planar_codes(words, bits, k)


def _zeros(tensors: Mapping, settings: Mapping, groups: int, n: int, bits: int) -> torch.Tensor:
    """The zeros int16 ``[G, N]``, 0 to 2^b."""
    if n * bits % 32:
        raise FormatError(f"qzeros hold whole words: N * bits must be a multiple of 32, got N = {n} and {bits} bits")
    words = expect(tensors, "qzeros", torch.int32, (groups, n * bits // 32))
    # Why not masked again: v1 stores 2^b as 2^b - 1, and as a float it can be held.
    return _codes(words, bits, n, settings).to(torch.int16) + (settings.get("version", 1) == 1)


def _check_symmetric(zeros: torch.Tensor, bits: int) -> None:
    """Raises FormatError where zeros are not all in the middle of the codes."""
    middle = 1 << (bits - 1)
    wrong = zeros[zeros != middle]
    if len(wrong):
        raise FormatError(
            f"sym says that every zero is {middle}, {len(wrong)} of {zeros.numel()} are not, such as {int(wrong[0])}; "
            "is sym or checkpoint_format right?"
        )
