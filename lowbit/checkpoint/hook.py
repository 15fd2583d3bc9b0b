"""lowbit is known to transformers as soon as both are imported, in either order, and neither waits for the other.

Why: transformers loads a checkpoint of a method that it does not know with random weights, and says so only in its log.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings

_TARGET = "transformers.quantizers.auto"


def watch() -> None:
    """Register with transformers now if it is imported, else right after its table of quantizers is."""
    if _TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    try:
        from . import transformers  # noqa: F401
    except Exception as error:  # Why: a broken lowbit must not keep anybody from importing transformers
        warnings.warn(f"lowbit could not register with transformers: {error}", stacklevel=2)


class _Finder:
    """Finds one module, once, by asking the finders behind it; its loader then registers lowbit."""

    def find_spec(self, name, path=None, target=None):
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _register()

        spec.loader.exec_module = exec_module
        return spec
