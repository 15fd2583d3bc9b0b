"""Calibrated methods for quantize_checkpoint: the model of a checkpoint, quantized in memory, as tensors to write."""

from __future__ import annotations

import torch

from ..convert_model import OPTIONS
from ..errors import FormatError, LowbitError, SchemeError
from ..quantizers import CALIBRATED
from ..tensor import QuantTensor
from . import layers
from .calibrate import quantize_calibrated
from .names import in_model
from .plan import Plan
from .settings import Settings
from .source import Source


def reads_calibration(settings: Settings) -> str | None:
    """The first method of these settings that needs calibration, or None."""
    methods = [settings.method, *((options or {}).get("method") for options in settings.dynamic.values())]
    return next((method for method in methods if method in CALIBRATED), None)


class CalibratedModel:
    """The quantized model, whose tensors are asked for by their names on disk.

    The whole float model is in memory, and quantized one decoder block after the other (calibrate.py). Raises
    SchemeError for layers that are no nn.Linear and for scales of another type than their weights, LowbitError with the
    layer's name where a weight can't be quantized.
    """

    def __init__(self, source: Source, plan: Plan, calibration, device, progress=None):
        if plan.untie:
            raise SchemeError(
                "a tied output layer can't be quantized by a method that needs calibration; use hqq or mse"
            )
        model = _float_model(source).to(device)
        names = in_model(model, source.tensors)
        chosen, _ = layers.choose(model, plan.settings)
        for name, choice in chosen.items():
            if choice.kind != "linear":
                raise SchemeError(
                    f"{name} is no nn.Linear, which methods that need calibration are for; name it in skip or use hqq"
                )
            expected = "bfloat16" if choice.module.weight.dtype == torch.bfloat16 else "float16"
            if choice.matrices[name]["scale_dtype"] not in (None, expected):
                raise SchemeError(
                    f"{name}: methods that need calibration give scales the weight's type: expected scale_dtype "
                    f"{expected}, got {choice.matrices[name]['scale_dtype']}"
                )
        merged = [key for key, (_, alone) in names.items() if not alone]
        if merged:
            raise SchemeError(
                f"{merged[0]} lies otherwise in the model than on disk; use hqq or mse for this checkpoint"
            )
        work = [
            (choice.module, [name], {option: choice.matrices[name][option] for option in OPTIONS})
            for name, choice in chosen.items()
        ]
        quantize_calibrated(model, work, calibration, prepare=False, progress=progress)
        self.model, self.names = model, {key: name for key, (name, _) in names.items()}
        self.tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())

    def quantized(self, stem: str) -> QuantTensor:
        """The weight of a layer, on the CPU."""
        name = self.names[f"{stem}.weight"].removesuffix(".weight")
        return self.model.get_submodule(name).quant_tensor().cpu()

    def kept(self, name: str) -> torch.Tensor | None:
        """A tensor that is not quantized, on the CPU; None where the model has none. AWQ changes float weights too."""
        found = self.tensors.get(self.names.get(name, ""))
        return None if found is None else found.detach().cpu()


def _float_model(source: Source):
    import transformers

    cls = getattr(transformers, source.config["architectures"][0])
    try:
        return cls.from_pretrained(source.folder, dtype="auto", local_files_only=True).eval()
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"{source.folder} can't be loaded: {reason}") from error


def checked_calibration(method: str | None, calibration) -> None:
    """Raises SchemeError unless calibration is given where a method needs it, and only there."""
    if method is not None and calibration is None:
        raise SchemeError(
            f"method {method!r} needs calibration: token ids [samples, length], or --calibration FILE of the command; "
            "got none"
        )
    if method is None and calibration is not None:
        raise SchemeError(f"calibration is read by the methods {' and '.join(CALIBRATED)}, but no layer uses one")
    if calibration is not None and not isinstance(calibration, torch.Tensor):
        raise LowbitError(f"calibration must be a tensor of token ids, got {type(calibration).__name__}")
