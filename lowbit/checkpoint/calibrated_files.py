"""Calibrated methods for quantize_checkpoint: a checkpoint quantized block by block, as tensors to write."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator

import torch

from .. import __version__
from ..convert_model import OPTIONS
from ..errors import DtypeError, LowbitError, SchemeError
from ..quantizers import CALIBRATED
from ..quantizers.rule import expect_finite
from ..tensor import QuantTensor
from . import layers
from .block_store import BlockStore
from .calibrate import quantize_calibrated
from .calibrate_experts import Mixture, warn_starved
from .native import describe
from .partial import stamp_of
from .plan import Plan
from .safetensors_file import Later
from .settings import Settings
from .source import Source
from .streamed import Streamed


def reads_calibration(settings: Settings) -> str | None:
    """The first method of these settings that needs calibration, or None."""
    methods = [settings.method, *((options or {}).get("method") for options in settings.dynamic.values())]
    return next((method for method in methods if method in CALIBRATED), None)


class CalibratedModel:
    """The weights of a checkpoint, quantized with calibration, which are asked for by their names on disk.

    One decoder block is in memory at a time (streamed.py), beside the embeddings and what the calibration tokens make
    between two blocks; what became of it lies in ``store``, and what is there already is not made again. A context
    manager. Raises SchemeError for scales of another type than their weights, LowbitError with the layer's name where
    a weight can't be quantized.
    """

    keeps = False  # of calibrate.Resident: what is done can't be set back

    def __init__(self, source: Source, plan: Plan, store: BlockStore, device):
        if plan.untie:
            raise SchemeError(
                "a tied output layer can't be quantized by a method that needs calibration; use hqq or mse"
            )
        self.plan, self.store = plan, store
        self.streamed = Streamed(source, device)
        self._on_disk = {name: key for key, name in self.streamed.names.items()}
        self._stems = {}
        for key, job in plan.jobs.items():
            owner, _, last = self.streamed.names[key].rpartition(".")
            for stem, _, expert in job.outputs:
                self._stems[owner if expert is None else f"{owner}.{expert}.{last}"] = stem

    def __enter__(self) -> CalibratedModel:
        self._files = contextlib.ExitStack()
        self._files.enter_context(self.store)
        self._files.enter_context(self.streamed)
        return self

    def __exit__(self, *_) -> None:
        self._files.close()

    def quantize(self, calibration: torch.Tensor, progress=None) -> None:
        """Do the work. progress: called with (layers done, layers in all, name)."""
        model, settings = self.streamed.model, self.plan.settings
        chosen, _ = layers.choose(model, settings)
        for name, choice in chosen.items():
            self._check_scales(name, choice)
        for key, job in self.plan.jobs.items() if not self.store.entries else ():
            for stem, _, expert in job.outputs:
                _expect_finite(stem, self.streamed.read(key, expert))
        work, mixtures = [], {}
        for name, choice in chosen.items():
            if choice.kind == "experts":
                mixture = mixtures[choice.module] = Mixture(name, choice, settings.experts)
                mixture.starved = [full for full in self.store.starved if full.startswith(f"{name}.")]
            else:
                options = {option: choice.matrices[name][option] for option in OPTIONS}
                work.append((choice.module, [name], options))
        self._mixtures = list(mixtures.values())
        if not self.store.complete:
            quantize_calibrated(model, work, calibration, progress=progress, parts=self, mixtures=mixtures)
        warn_starved(self._mixtures)

    def quantized(self, stem: str) -> tuple[dict[str, Later], dict]:
        """What a file holds for a layer, as :func:`~lowbit.checkpoint.native.describe` gives it."""
        entry = self.store.entries[stem]
        names = (f"{stem}.{short}" for short in entry["tensors"])
        return {name: self.store.later(name) for name in names}, entry

    def kept(self, name: str) -> Later | None:
        """A float tensor that calibration changed, which AWQ does; None for one that is as it was."""
        return self.store.later(name)

    # ---- what quantize_calibrated calls ------------------------------------------------------------------------------

    def enter(self, modules) -> None:
        self.streamed.enter(modules)

    @property
    def blocks(self) -> int:
        return self.store.blocks

    def hidden(self) -> Iterator[torch.Tensor] | None:
        return self.store.hidden()

    def found(self, name: str) -> QuantTensor | None:
        stem = self._stems[name]
        return self.store.quant_tensor(stem) if stem in self.store.entries else None

    def reached(self, blocks: int, hidden: list[torch.Tensor] | None, complete: bool = False) -> None:
        starved = [full for mixture in self._mixtures for full in mixture.starved]
        self.store.finish(blocks, hidden, complete, starved)

    def done(self, modules, made: list[tuple], moved: list[torch.nn.Parameter]) -> None:
        tensors, entries = {}, {}
        for layer, (name, *_), _ in made:
            stem = self._stems[name]
            part, entries[stem] = describe(stem, layer.quant_tensor().cpu().validate(stem))
            tensors |= part
        changed = {id(parameter) for parameter in moved}
        for prefix, module in self.streamed.model.named_modules() if moved else ():
            for local, parameter in module._parameters.items():
                if id(parameter) in changed:
                    turned = local == "weight" and prefix in self.streamed.transposed
                    tensor = parameter.detach().T if turned else parameter.detach()
                    tensors[self._on_disk[f"{prefix}.{local}"]] = tensor.cpu()
        self.streamed.leave(modules)
        self.store.add(tensors, entries)

    # ------------------------------------------------------------------------------------------------------------------

    def _check_scales(self, name: str, choice: layers.Choice) -> None:
        weight = choice.module._parameters["down_proj" if choice.kind == "experts" else "weight"]
        expected = "bfloat16" if weight.dtype == torch.bfloat16 else "float16"
        for options in choice.matrices.values():
            if options["scale_dtype"] not in (None, expected):
                raise SchemeError(
                    f"{name}: methods that need calibration give scales the weight's type: expected scale_dtype "
                    f"{expected}, got {options['scale_dtype']}"
                )


def depends_on(source: Source, calibration: torch.Tensor) -> dict:
    """All that the result depends on beside the settings, as JSON: results of two runs that differ in it do not mix.

    Left out is where it is computed (device, threads): a block that is finished stays as it is, and those behind it
    are calibrated on what it makes, wherever they are.
    """
    import transformers

    tokens = calibration if calibration.is_floating_point() else calibration.long()
    held = tokens.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {
        "tokens": [list(tokens.shape), hashlib.sha256(held).hexdigest()],
        "config": hashlib.sha256(json.dumps(source.config, sort_keys=True).encode()).hexdigest(),
        "files": {shard: stamp_of(source.folder / shard) for shard in source.shards},
        "versions": {"lowbit": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _expect_finite(stem: str, weight: torch.Tensor) -> None:
    # Why before the work: a weight that can't be quantized should be known before an hour of it.
    try:
        expect_finite(weight)
    except LowbitError as error:
        raise type(error)(f"{stem}: {error}") from error


def checked_calibration(method: str | None, calibration) -> None:
    """Raises SchemeError unless calibration is given where a method needs it, and only there; DtypeError."""
    if method is not None and calibration is None:
        raise SchemeError(
            f"method {method!r} needs calibration: token ids [samples, length], or --calibration FILE of the command; "
            "got none"
        )
    if method is None and calibration is not None:
        raise SchemeError(f"calibration is read by the methods {' and '.join(CALIBRATED)}, but no layer uses one")
    if calibration is not None and not isinstance(calibration, torch.Tensor):
        raise DtypeError(f"calibration must be a tensor of token ids, got {type(calibration).__name__}")
