"""The errors of lowbit: one sentence each, naming what was expected, what came, and what to do.

Every error is a :class:`LowbitError` and also the built-in error that a user of PyTorch would expect.
"""

from __future__ import annotations


class LowbitError(Exception):
    """Base class of every error that lowbit raises on purpose."""


class SchemeError(LowbitError, ValueError):
    """A weight type, group size, zero kind or scale type that does not exist or does not go together."""


class DtypeError(LowbitError, TypeError):
    """A tensor or argument of the wrong type."""


class ShapeError(LowbitError, ValueError):
    """A tensor of the wrong shape."""


class DeviceError(LowbitError, ValueError):
    """Tensors on different devices, or on a device that lowbit has no kernels for."""


class GraphError(LowbitError, RuntimeError):
    """A step that cannot be captured in a CUDA graph, or graphs that are called when they must not be."""


class QuantizationError(LowbitError, ValueError):
    """A weight that cannot be quantized: NaN, infinity, or a scale that overflows its type."""


class FormatError(LowbitError, ValueError):
    """Stored data that breaks the canonical form; the message names the tensor."""


class InexactError(FormatError):
    """A weight of another format that the canonical form cannot hold without a change.

    ``dequantize()`` gives its values, float32 ``[N, K]``, to be quantized anew.
    """

    def __init__(self, message: str, dequantize):
        super().__init__(f"{message}; `lowbit convert --requantize TYPE` quantizes its values anew")
        self.reason, self.dequantize = message, dequantize


class EnvironmentVariableError(LowbitError, ValueError):
    """A ``LOWBIT_*`` variable with a value that does not exist, or that this machine can't keep."""


class ExtensionError(LowbitError, ImportError):
    """The compiled libraries are missing or do not load on this machine."""


#: Most names that a sentence lists.
_FEW = 40


def nearest(name: str, known) -> str:
    """A short hint for a misspelt name: the known names that begin with it, else those that look most like it, or all
    of a few if none does.
    """
    import difflib

    known = list(known)
    begun = [one for one in known if name and one.startswith(str(name))]
    if begun:
        return ", ".join(begun[:3])
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    if not close and len(known) > _FEW:
        close = difflib.get_close_matches(str(name), known, n=3, cutoff=0)
    return ", ".join(close or known)
