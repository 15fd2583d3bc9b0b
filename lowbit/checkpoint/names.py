"""From the names of a checkpoint's tensors to those of the model that transformers builds, and back."""

from __future__ import annotations

import re

from .safetensors_file import Reader

_SHORT = ("qweight", "scales", "zeros", "perm")


def has_split_experts(files) -> bool:
    """Whether safetensors files hold experts whose gate and up projections are apart."""
    for file in files:
        with Reader(file) as reader:
            if any(re.search(r"\.experts\.\d+\.(gate_proj|w1)\.qweight$", name) for name in reader.entries):
                return True
    return False


def renamings_of_experts(conversions) -> list:
    """Renamings of quantized matrices of experts, where the conversions merge float ones that have other names.

    A conversion of ``mlp.experts.*.w1.weight`` and ``mlp.experts.*.w3.weight`` to ``mlp.experts.gate_up_proj`` becomes
    ``experts.3.w1.`` -> ``experts.3.gate_proj.`` and ``experts.3.w3.`` -> ``experts.3.up_proj.``.
    """
    from transformers.core_model_loading import WeightRenaming

    made = []
    for source, target in merged_experts(conversions).items():
        if source != target:
            # Why the dots stay: transformers takes no more than one group in a pattern.
            made.append(WeightRenaming(rf"{_escaped(source)}\.", f"{target.replace('*', chr(92) + '1')}."))
    return made


def merged_experts(conversions) -> dict[str, str]:
    """Names of matrices on disk -> their names in a quantized model, for the conversions that merge experts.

    ``mlp.experts.*.w1`` -> ``mlp.experts.*.gate_proj``; only conversions that stack experts, or stack and then
    concatenate gate and up, are read: others change values or their order.
    """
    made = {}
    for conversion in conversions:
        operations = [type(operation).__name__ for operation in getattr(conversion, "operations", ())]
        if not operations or len(conversion.target_patterns) != 1:
            continue
        sources, target = list(conversion.source_patterns), conversion.target_patterns[0]
        owner, _, part = target.rpartition(".")
        whole = all(source.endswith(".weight") and source.count("*") == 1 for source in sources)
        if operations == ["MergeModulelist", "Concatenate"] and part == "gate_up_proj" and len(sources) == 2:
            parts = ("gate_proj", "up_proj")
        elif operations == ["MergeModulelist"] and part in ("up_proj", "down_proj") and len(sources) == 1:
            parts = (part,)
        else:
            continue
        if whole:
            for source, name in zip(sources, parts, strict=True):
                made[source.removesuffix(".weight")] = f"{owner}.*.{name}"
    return made


def _escaped(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"(\d+)")


def in_model(model, keys) -> dict[str, tuple[str, bool]]:
    """For names of tensors on disk: (the name in the model, whether it gets there unchanged and alone).

    A matrix of an expert that lies apart on disk gets the name of its layer in a quantized model, and ``True``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    merged, state, prefix = merged_experts(converters), model.state_dict(), model.base_model_prefix
    found = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if pattern is None:
            found[key] = name, True
            continue
        part = merged.get(pattern.removesuffix(".weight"))
        number = re.search(_escaped(pattern.removesuffix(".weight")), key)
        if part is None or number is None:
            found[key] = name, False
        else:
            owner = name.rpartition(".")[0]
            found[key] = f"{owner}.{number[1]}.{part.rpartition('.')[2]}.weight", True
    return found
