"""AutoRound checkpoints (github.com/intel/auto-round): the layouts of GPTQ and AWQ; ``packing_format`` says which.

"auto_round:auto_gptq": GPTQ v1 (zeros stored minus one); "auto_round:gptqmodel" and "auto_round": zeros as they are;
"auto_round:auto_awq": AWQ gemm. ``extra_config`` has settings of single layers, by name or regular expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ...errors import FormatError
from ...tensor import QuantTensor
from .awq import Awq
from .base import EMPTY, Format, Layer, matches, setting
from .fields import dense_codes
from .gptq import Gptq

_GPTQ = {"auto_round:auto_gptq": 1, "auto_round:gptq": 1, "auto_round:gptqmodel": 2, "auto_round": 2}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")


class AutoRound(Format):
    """``quant_method: "auto-round"``."""

    name = "auto-round"

    def __init__(self, config: Mapping):
        super().__init__(config)
        packing = config.get("packing_format") or config.get("backend") or "auto_round"
        if packing not in (*_GPTQ, *_AWQ):
            raise FormatError(f"packing_format must be one of {', '.join((*_GPTQ, *_AWQ))}, got {packing!r:.100}")
        self.extra = setting(config, "extra_config", dict, None) or {}
        if packing in _AWQ:
            awq = {**config, "zero_point": not config.get("sym", False), "version": "gemm"}
            self.inner: Format = Awq(awq)
        else:
            version = ("gptq", "gptq_v2")[_GPTQ[packing] - 1]
            self.inner = Gptq({**config, "checkpoint_format": version, "dynamic": None})

    def layers(self, keys: Iterable[str], metadata: Mapping[str, str] = EMPTY) -> list[Layer]:
        return [
            Layer(layer.name, layer.tensors, {**layer.settings, **self._extra(layer.name)})
            for layer in self.inner.layers(keys, metadata)
        ]

    def _extra(self, name: str) -> Mapping:
        for pattern, changed in self.extra.items():
            if not isinstance(changed, Mapping):
                raise FormatError(f"extra_config[{pattern!r}] must be settings, got {type(changed).__name__}")
            plain = pattern.replace(".", "").replace("_", "").isalnum()
            if pattern == name or (not plain and matches(pattern, name)):
                return {key: value for key, value in changed.items() if key in ("bits", "group_size", "sym")}
        return EMPTY

    def decode(self, layer: Layer, tensors: Mapping[str, torch.Tensor]) -> QuantTensor:
        qt = self.inner.decode(layer, tensors)
        if isinstance(self.inner, Gptq) and qt.zeros is not None:
            _check_zeros(layer, tensors, qt)
        return qt


def _check_zeros(layer: Layer, tensors: Mapping[str, torch.Tensor], qt: QuantTensor) -> None:
    """Raises FormatError where zeros lie so far from the mean of the codes that packing_format must be wrong.

    Why: writers of AutoRound disagree on whether they store zeros minus one; weights lie around 0, so codes around it.
    """
    words = tensors["qweight"].t()
    codes = dense_codes(words, qt.dtype.bits, qt.shape[1]).double().mean()
    apart = float(codes - qt.zeros.double().mean())
    enough = qt.shape[0] * qt.shape[1] >= 4096
    if enough and abs(apart) > 0.75:
        raise FormatError(
            f"{layer.name}: codes lie {apart:+.2f} from zeros on average, expected about 0; is packing_format right?"
        )
