"""What a layer reads, in bounded memory: the second moments of its inputs and their mean size."""

from __future__ import annotations

import torch

from ..errors import DeviceError, DtypeError, QuantizationError, ShapeError


class Moments:
    """Sums over tokens x ``[K]``: of x x^T and of |x|, both fp32, on one device; any number of calls of :meth:`add`."""

    def __init__(self, k: int, device="cpu"):
        self.tokens = 0
        self._products = torch.zeros(k, k, dtype=torch.float32, device=device)
        self._sizes = torch.zeros(k, dtype=torch.float32, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Count tokens ``[..., K]`` of any float type. Raises ShapeError."""
        k = len(self._sizes)
        if x.shape[-1] != k:
            raise ShapeError(f"x must have {k} columns, got shape {tuple(x.shape)}")
        x = x.detach().reshape(-1, k).to(self._sizes.device, torch.float32)
        self._products.addmm_(x.T, x)
        self._sizes += x.abs().sum(0)
        self.tokens += len(x)

    @property
    def second(self) -> torch.Tensor:
        """The mean of x x^T, fp32 ``[K, K]``: for a change D of the weight, tr(D second D^T) is the mean of |D x|^2.

        Raises QuantizationError when a token was NaN or infinite, or too large to square.
        """
        mean = self._products / max(1, self.tokens)
        if not bool(mean.isfinite().all()):
            raise QuantizationError(
                "what the layer reads must be finite with squares in float32's range, got NaN or infinity"
            )
        return mean

    @property
    def mean_abs(self) -> torch.Tensor:
        """The mean of |x|, fp32 ``[K]``."""
        return self._sizes / max(1, self.tokens)


def output_error(difference: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """tr(D M D^T) in fp32, a scalar: the mean squared change of the output ``D x`` for D ``[N, K]``, M ``[K, K]``."""
    difference = difference.float()
    return ((difference @ moments) * difference).sum()


def checked_moments(moments, weight: torch.Tensor) -> torch.Tensor:
    """Second moments for a weight, fp32. Raises DtypeError, ShapeError, DeviceError, QuantizationError."""
    if not isinstance(moments, torch.Tensor) or not moments.is_floating_point():
        got = str(moments.dtype) if isinstance(moments, torch.Tensor) else type(moments).__name__
        raise DtypeError(f"moments must be a float tensor [K, K], got {got.removeprefix('torch.')}")
    k = weight.shape[1]
    if tuple(moments.shape) != (k, k):
        raise ShapeError(f"moments must have shape ({k}, {k}) for a weight of {k} columns, got {tuple(moments.shape)}")
    if moments.device != weight.device:
        raise DeviceError(f"moments must be on the device of the weight, {weight.device}, got {moments.device}")
    if not bool(moments.isfinite().all()) or bool((moments.diagonal() < 0).any()):
        raise QuantizationError("moments must be finite sums of x x^T, got NaN, infinity or a negative square")
    return moments.detach().float()
