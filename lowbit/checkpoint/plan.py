"""What becomes of every tensor of a checkpoint: decided from its headers and the architecture, before any work."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..errors import FormatError, LowbitError, SchemeError
from . import layers
from .names import in_model
from .settings import Settings
from .source import Source


@dataclass
class Job:
    """One tensor on disk that is quantized. outputs: name on disk, settings, and which expert (None: all of it)."""

    transposed: bool
    outputs: list[tuple[str, dict, int | None]]
    keep: bool = False  # the tensor itself is written too


@dataclass
class Plan:
    """settings: as config.json will hold them; jobs: name of a tensor -> Job; the others are copied."""

    settings: Settings
    jobs: dict[str, Job] = field(default_factory=dict)
    untie: bool = False


def make(source: Source, settings: Settings) -> Plan:
    """Decide what is quantized. Raises SchemeError for settings that fit no layer, FormatError for wrong shapes."""
    model, untie = skeleton(source, settings)
    names = in_model(model, source.tensors)
    split = any(
        ".experts." in name and name.endswith(".weight") and _is_expert(model, name) for name, _ in names.values()
    )
    settings = settings.with_(experts="split" if split else "fused")
    chosen, left = layers.choose(model, settings)
    layers.expect_possible(model, settings, chosen, calibrated=True)
    plan = Plan(settings, untie=untie)
    for key, (name, alone) in names.items():
        job = _job(source, key, name, chosen) if alone else None
        if job is not None:
            plan.jobs[key] = job
    _tied_head(source, model, names, chosen, plan)
    _drop_incomplete(plan, names, chosen, left)
    if not plan.jobs:
        raise SchemeError(f"expected layers to quantize, got none: {type(model).__name__} has {len(left)} left alone")
    plain = [name for name in left if name != layers.output_layer(model)[0]]
    skip = dict.fromkeys(
        [*settings.skip, *layers.as_patterns(plain, [full for c in chosen.values() for full in c.matrices])]
    )
    plan.settings = settings.with_(skip=tuple(skip), scale_dtype=settings.scale_dtype or _scale_dtype(source, plan))
    for job in plan.jobs.values():
        for _, options, _ in job.outputs:
            options["scale_dtype"] = options["scale_dtype"] or plan.settings.scale_dtype
    return plan


def skeleton(source: Source, settings: Settings):
    """(the model of the checkpoint, on meta; whether its output layer is to be untied from the embedding)."""
    cls, config = architecture(source)
    untie = settings.lm_head is not None and bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    for part in (config, config.get_text_config()) if untie else ():
        part.tie_word_embeddings = False
    with torch.device("meta"):
        return cls(config), untie


def architecture(source: Source):
    """(the model class that config.json names, the config). Raises FormatError, or LowbitError without transformers."""
    try:
        import transformers
    except ImportError:
        raise LowbitError(
            "quantizing a checkpoint needs transformers, which is not installed: pip install 'lowbit[hf]'"
        ) from None
    name = str((source.config.get("architectures") or ["none"])[0])
    cls = getattr(transformers, name, None)
    if cls is None:
        raise FormatError(
            f"{source.folder}: its config.json names the architecture {name!r}, which transformers "
            f"{transformers.__version__} does not have"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Why: a broken config raises whatever its parser raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"{source.folder}: its config.json does not fit {name}: {reason}") from error
    return cls, config


def _is_expert(model, name: str) -> bool:
    """Whether a parameter is called like a matrix of one expert: ``...experts.3.up_proj.weight``."""
    owner, *rest = name.rsplit(".", 3)
    if len(rest) != 3 or not rest[0].isdigit() or rest[2] != "weight":
        return False
    try:
        return layers.kind_of(model.get_submodule(owner)) == "experts"
    except AttributeError:
        return False


def _job(source: Source, key: str, name: str, chosen: dict[str, layers.Choice]) -> Job | None:
    owner, _, last = name.rpartition(".")
    stored, stem = source.tensors[key], key.removesuffix(".weight")
    choice = chosen.get(owner)
    if choice is not None and choice.kind == "experts":
        module, count = choice.module, layers.count_of(choice.module)
        if last not in layers.parts_of(module.has_gate, "fused") or f"{owner}.0.{last}" not in choice.matrices:
            return None
        _expect_shape(key, stored, tuple(module._parameters[last].shape))
        # Why: another name on disk is of the whole stack, and says nothing to whoever loads the parts.
        before = key.rpartition(".")[0] if key.endswith(f".{owner.rpartition('.')[2]}.{last}") else owner
        outputs = [(f"{before}.{i}.{last}", dict(choice.matrices[f"{owner}.{i}.{last}"]), i) for i in range(count)]
        return Job(module.is_transposed, outputs)
    if last != "weight":
        return None
    if choice is not None:
        _expect_shape(key, stored, tuple(choice.module.weight.shape))
        return Job(choice.kind == "conv1d", [(stem, dict(choice.matrices[owner]), None)])
    experts = chosen.get(owner.rpartition(".")[0].rpartition(".")[0])
    if experts is None or experts.kind != "experts" or owner not in experts.matrices:
        return None
    _expect_shape(key, stored, layers.shape_of(experts.module, owner.rpartition(".")[2]))
    return Job(False, [(stem, dict(experts.matrices[owner]), None)])


def _expect_shape(key: str, stored, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise FormatError(f"{stored.file}: {key} must have shape {shape} by config.json, got {stored.shape}")
    if not stored.quantizable:
        kind = str(stored.dtype).removeprefix("torch.")
        raise FormatError(f"{stored.file}: {key} must be float16, bfloat16 or float32, got {kind}")


def _tied_head(source: Source, model, names: dict, chosen: dict, plan: Plan) -> None:
    """An output layer that is not on disk is made from the embedding."""
    head = layers.output_layer(model)[0]
    if not plan.untie or head not in chosen or any(name == f"{head}.weight" for name, _ in names.values()):
        return
    embedding = model.get_input_embeddings()
    owner = next(name for name, module in model.named_modules() if module is embedding)
    key = next((key for key, (name, alone) in names.items() if name == f"{owner}.weight" and alone), None)
    if key is None:
        raise FormatError(f"{source.folder} holds neither {head}.weight nor the embedding that it is tied to")
    _expect_shape(key, source.tensors[key], tuple(chosen[head].module.weight.shape))
    plan.jobs[key] = Job(False, [(head, dict(chosen[head].matrices[head]), None)], keep=True)


def _drop_incomplete(plan: Plan, names: dict, chosen: dict, left: list[str]) -> None:
    """Layers of which not every matrix lies on disk as it is in the model stay as they are, and are named so."""
    made: dict[str, list[str]] = {}
    for key, job in plan.jobs.items():
        name = names[key][0]
        owner = _owner(name, chosen) if not job.keep else job.outputs[0][0]
        made.setdefault(owner, []).extend([key] * len(job.outputs))
    for owner, choice in chosen.items():
        if len(made.get(owner, ())) < len(choice.matrices):
            left.append(owner)
            for key in set(made.get(owner, ())):
                del plan.jobs[key]


def _owner(name: str, chosen: dict) -> str:
    """The chosen module that a parameter or a matrix of an expert belongs to."""
    while name and name not in chosen:
        name = name.rpartition(".")[0]
    return name


def _scale_dtype(source: Source, plan: Plan) -> str:
    """bfloat16 where most weights are, else float16."""
    kinds = [source.tensors[key].dtype == torch.bfloat16 for key in plan.jobs]
    return "bfloat16" if 2 * sum(kinds) > len(kinds) else "float16"
