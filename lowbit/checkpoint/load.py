"""from_pretrained: a quantized checkpoint to a model that is whole, or an error."""

from __future__ import annotations

from pathlib import Path

from ..errors import DtypeError, FormatError, LowbitError
from ..tensor_checks import checked_path


def register_transformers() -> None:
    """Make transformers know the quantization method "lowbit".

    Nobody has to call this: ``import lowbit`` sees to it, before or after transformers is imported. Raises LowbitError
    without transformers.
    """
    _transformers()
    from .transformers import register

    register()


def from_pretrained(path, **options):
    """Load a quantized HuggingFace checkpoint as the model class that its config.json names; returns the model.

    path: a folder, or a name on the hub. options: those of transformers' ``from_pretrained`` (dtype, device_map,
    attn_implementation, ...); ``quantization_config`` may quantize a float checkpoint while it is loaded. Checkpoints
    of other tools are read where lowbit knows their format, and are then weights of lowbit: same codes, same values.

    Every tensor is checked: one that is missing, of another shape or type, or damaged raises FormatError, and nothing
    is filled with random numbers. Raises FormatError for a checkpoint that is not quantized or of no known format;
    DtypeError for a path, config or quantization_config of another type.
    """
    register_transformers()
    transformers = _transformers()
    wanted = bool(options.pop("output_loading_info", False))
    options.pop("ignore_mismatched_sizes", None)
    hub = {key: options[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in options}
    _expect_folder(path)
    config = _given(transformers, options)
    config = _config_of(transformers, path, hub) if config is None else config
    if options.get("dtype") is None:
        options["dtype"] = "auto"
    if options.setdefault("use_safetensors", True) is not True:
        raise LowbitError(f"use_safetensors must be true: pickles are never opened, got {options['use_safetensors']!r}")
    method = _method(config)
    cls = _class_of(transformers, config, path)
    if method is None and options.get("quantization_config") is None:
        from .foreign import OLD_CONFIGS

        old = next((name for name in OLD_CONFIGS if (Path(path) / name).is_file()), None)
        if old:
            raise FormatError(f"{path}: {old} says how it is quantized, not config.json; `lowbit convert` it first")
        raise FormatError(
            f"{path} is not quantized; quantize it with lowbit.quantize_checkpoint, or pass "
            "quantization_config=lowbit.LowbitConfig(...) to do so while it is loaded"
        )
    if method in (None, "lowbit"):
        model, info = _load(cls, path, config=config, **options)
    else:
        from .adopt import state_of

        config, state = state_of(path, config, cls, hub)
        model, info = _load(cls, None, config=config, state_dict=state, **options)
    _expect_whole(path, info)
    return (model, info) if wanted else model


def _load(cls, path, **options):
    try:
        # Why ignored: what does not fit is then reported by name, and refused below.
        return cls.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except LowbitError as error:
        raise type(error)(f"{path or 'the checkpoint'}: {error}") from error
    except OSError as error:
        raise FormatError(f"{path}: {_first_line(error)}") from error
    # Why so wide: a damaged file raises whatever its parser raises; the user needs to know which.
    except Exception as error:
        if isinstance(error, TypeError | NotImplementedError | ImportError):
            raise  # a wrong option
        raise FormatError(f"{path or 'the checkpoint'} does not load: {_first_line(error)}") from error


def _expect_whole(path, info: dict) -> None:
    """Raises FormatError for tensors that the checkpoint lacks, has in another shape, or has too many of."""
    conversion = info.get("conversion_errors") or info.get("error_msgs")
    for what, found in (
        ("lacks", info.get("missing_keys")),
        ("has, in a shape that does not fit,", info.get("mismatched_keys")),
        ("does not convert", conversion),
    ):
        if found:
            first = sorted(map(str, found))[0]
            raise FormatError(f"{path} {what} {len(found)} tensors, the first is {first}")
    # Why only these: other tensors that nobody reads are common, such as buffers of older versions.
    found = sorted(map(str, info.get("unexpected_keys") or ()))
    lost = [key for key in found if key.endswith(".qweight")]
    if lost:
        raise FormatError(
            f"{path} has {len(lost)} quantized weights that the model does not read, the first is {lost[0]}"
        )
    from .native import FIELDS

    lost = [key for key in found if key.rpartition(".")[2] in FIELDS]
    if lost:
        raise FormatError(f"{path} has {len(lost)} parts of quantized weights that config.json denies: {lost[0]}")


def _expect_folder(path) -> None:
    """Raises DtypeError for what is no path, FormatError for one that is no folder and can't be a name on the hub."""
    folder = checked_path(path, "path")
    named = isinstance(path, str) and not folder.is_absolute() and not path.startswith(".") and path.count("/") < 2
    if not named and not folder.is_dir():
        raise FormatError(f"the checkpoint folder {path} does not exist")


def _given(transformers, options: dict):
    """The config among the options, taken out, or None. Raises DtypeError for it and for quantization_config."""
    from transformers.utils.quantization_config import QuantizationConfigMixin

    config, asked = options.pop("config", None), options.get("quantization_config")
    if config is not None and not isinstance(config, transformers.PretrainedConfig):
        raise DtypeError(f"config must be a transformers.PretrainedConfig, got {type(config).__name__}")
    if asked is not None and not isinstance(asked, QuantizationConfigMixin | dict):
        raise DtypeError(f"quantization_config must be a lowbit.LowbitConfig or a dict, got {type(asked).__name__}")
    return config


def _config_of(transformers, path, hub: dict):
    try:
        return transformers.AutoConfig.from_pretrained(path, **hub)
    except Exception as error:
        raise FormatError(f"{path}: its config.json does not load: {_first_line(error)}") from error


def _method(config) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    if found is None:
        return None
    found = found if isinstance(found, dict) else found.to_dict()
    return str(found.get("quant_method") or "unknown")


def _class_of(transformers, config, path):
    name = str((getattr(config, "architectures", None) or ["none"])[0])
    cls = getattr(transformers, name, None)
    if cls is None:
        raise FormatError(
            f"{path}: its config.json names the architecture {name!r}, which transformers {transformers.__version__} "
            "does not have"
        )
    return cls


def _transformers():
    try:
        import transformers
    except ImportError:
        raise LowbitError("this needs transformers, which is not installed: pip install 'lowbit[hf]'") from None
    return transformers


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
