"""lowbit: matrix products with weights of 1 to 8 bits.

``import lowbit`` is cheap: torch is imported when a name that needs it is first used. Where transformers is imported
too, before or after, it knows the quantization method "lowbit"; :func:`register_transformers` does the same by hand.
"""

from __future__ import annotations

from .errors import (
    DeviceError,
    DtypeError,
    EnvironmentVariableError,
    ExtensionError,
    FormatError,
    GraphError,
    InexactError,
    LowbitError,
    QuantizationError,
    SchemeError,
    ShapeError,
)

__version__ = "0.1.0"

#: Public name -> the module that holds it.
_LAZY = {
    "QuantTensor": "tensor",
    "quantize": "quantizers",
    "PackedWeight": "pack",
    "pack_weight": "pack",
    "matmul": "ops.launch",
    "Linear": "nn",
    "prepare": "preparing",
    "unprepare": "preparing",
    "fuse": "fusing",
    "unfuse": "fusing",
    "quantize_model": "convert_model",
    "quantize_checkpoint": "checkpoint.quantize_files",
    "from_pretrained": "checkpoint.load",
    "LowbitConfig": "checkpoint.transformers",
    "register_transformers": "checkpoint.load",
    "tune": "tuning",
    "info": "commands.info",
    "selftest": "commands.selftest",
}

__all__ = [
    "DeviceError",
    "DtypeError",
    "EnvironmentVariableError",
    "ExtensionError",
    "FormatError",
    "GraphError",
    "InexactError",
    "LowbitError",
    "QuantizationError",
    "SchemeError",
    "ShapeError",
    "__version__",
    *_LAZY,
]


def __getattr__(name: str):
    from importlib import import_module

    if name == "graphs":  # a module of its own: lowbit.graphs.capture
        return import_module(f"{__name__}.graphs")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _watch_transformers() -> None:
    from .checkpoint.hook import watch

    watch()


_watch_transformers()
