"""Weights in the layouts that kernels read: ``layout`` has the index formulas, ``packed`` the class and pack_weight."""

from .packed import PackedWeight, pack_weight

__all__ = ["PackedWeight", "pack_weight"]
