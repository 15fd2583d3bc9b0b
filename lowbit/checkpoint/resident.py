"""Where the weights are while a model is calibrated: in memory, all of them. calibrated_files.py has another place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..tensor import QuantTensor


class Resident:
    """A model that is in memory whole. Another kind reads the weights of modules when they are entered, and takes what
    became of them when they are done; what it took can't be set back (``keeps``), but an earlier run may have left it:
    ``blocks`` says how many decoder blocks are finished before the work begins."""

    keeps, blocks = True, 0

    def enter(self, modules: Iterable[nn.Module]) -> None:
        """These modules, without what lies inside them, will run."""

    def done(self, modules: Iterable[nn.Module], made: list[tuple], moved: list[nn.Parameter]) -> None:
        """These modules will not run again. made: (layer, names, training flag); moved: changed float parameters."""

    def reached(self, blocks: int, hidden: list[torch.Tensor] | None, complete: bool = False) -> None:
        """So many blocks are done. hidden: what enters the next, where anybody reads it; complete: nothing is left."""

    def hidden(self) -> Iterator[torch.Tensor] | None:
        """What enters the block behind the finished ones, a tensor a batch; None where nobody reads it."""

    def found(self, name: str) -> QuantTensor | None:
        """What an earlier run made of a layer."""
