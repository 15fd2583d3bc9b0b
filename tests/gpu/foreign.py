"""The kernels of foreign.cu, for tensors on the current CUDA stream."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch

from . import build


@dataclass(frozen=True)
class Manners:
    """How a foreign kernel treats its neighbours; foreign.cu says what each field means."""

    overlap: bool = False
    trigger: bool = False
    waits: bool = True
    cycles: int = 0
    blocks: int = 16


#: Lets its successor start at once and touches memory some 10 us later.
EARLY = Manners(overlap=True, trigger=True, cycles=20_000)
#: Of a time before programmatic launches: neither starts early nor lets anyone.
NEVER = Manners()
#: May start early and lets nobody, so that its successor starts when it has ended.
HALF = Manners(overlap=True)
#: Broken on purpose: touches memory at once, whatever its predecessor is doing.
BROKEN = Manners(overlap=True, trigger=True, waits=False)
#: Takes about a millisecond, while the host launches what comes behind it.
LONG = Manners(cycles=2_000_000, blocks=1)

#: Wrong words that a comparison describes, kNoted of foreign.cu.
NOTED = 256

#: What tests are repeated for.
KINDS = {"early": EARLY, "half": HALF, "never": NEVER}


class _Manner(ctypes.Structure):
    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("blocks", ctypes.c_int),
        ("overlap", ctypes.c_int),
        ("trigger", ctypes.c_int),
        ("waits", ctypes.c_int),
        ("cycles", ctypes.c_int64),
    ]


class Turns:
    """A counter on the device that says which row of a table kernels write or expect, and what they have found.

    Nothing here waits for the device except :meth:`verdict`.
    """

    def __init__(self, count: int):
        self.library = build.load("foreign")
        self.count = count
        self.turn = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._verdict = torch.zeros(2 + 2 * NOTED, dtype=torch.int64, device="cuda")

    def write(self, to: torch.Tensor, table: torch.Tensor, manners: Manners, offset: int = 0) -> None:
        """``to = table[turn + offset]``"""
        words = self._words(to, table)
        self._call("write", to, table, words, self.turn, offset, self.count, manners=manners)

    def compare(self, seen: torch.Tensor, table: torch.Tensor, manners: Manners, offset: int = 0) -> None:
        """Note whether ``seen`` has the bits of ``table[turn + offset]``."""
        words = self._words(seen, table)
        self._call("compare", seen, table, words, self.turn, offset, self.count, self._verdict, manners=manners)

    def advance(self, by: int = 1, manners: Manners = NEVER) -> None:
        self._call("advance", self.turn, by, manners=replace(manners, blocks=1))

    def copy(self, to: torch.Tensor, source: torch.Tensor, manners: Manners) -> None:
        """``to = source``: a product's double."""
        self._call("copy", to, source, self._words(to, source[None]), manners=manners)

    def pause(self) -> None:
        """Keep the stream busy, so that what is launched next finds its predecessors still waiting."""
        self.advance(0, LONG)

    def verdict(self) -> tuple[int, int]:
        """``(words that were wrong, comparisons)`` so far; waits for the whole device."""
        torch.cuda.synchronize()
        wrong, compared = self._verdict[:2].tolist()
        return wrong, compared

    def noted(self) -> list[tuple[int, int, int, int]]:
        """Of the first words that were wrong: comparisons before, which word, what was seen, what was expected."""
        torch.cuda.synchronize()
        notes = self._verdict[2:].view(torch.int32).view(-1, 4)[: self._verdict[0].item()].tolist()
        return [(before, word, seen & 0xFFFFFFFF, expected & 0xFFFFFFFF) for word, before, expected, seen in notes]

    def _words(self, one: torch.Tensor, table: torch.Tensor) -> int:
        assert one.is_contiguous() and table.is_contiguous() and one.dtype == table.dtype
        assert table.shape[1:] == one.shape and one.nbytes % 4 == 0
        return one.nbytes // 4

    def _call(self, name: str, *arguments, manners: Manners) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        manner = _Manner(stream, manners.blocks, manners.overlap, manners.trigger, manners.waits, manners.cycles)
        given = []
        for argument, ctype in zip(arguments, _SIGNATURES[name], strict=True):
            given.append(ctype(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument))
        status = getattr(self.library, f"foreign_{name}")(*given, ctypes.byref(manner))
        assert status == 0, f"foreign_{name}: CUDA error {status}"


_P, _WORDS, _COUNT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
_SIGNATURES = {
    "write": (_P, _P, _WORDS, _P, _COUNT, _COUNT),
    "compare": (_P, _P, _WORDS, _P, _COUNT, _COUNT, _P),
    "copy": (_P, _P, _WORDS),
    "advance": (_P, _COUNT),
}
