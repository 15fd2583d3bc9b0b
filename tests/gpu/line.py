"""A product between foreign kernels: one writes its x, one compares its y on the device, nobody waits for the host."""

from __future__ import annotations

import torch

import lowbit

from . import oracle
from .foreign import Manners, Turns

#: Different values of x. A prime, so that a graph of any few rounds sees others in every replay.
TURNS = 7


def calm(call) -> torch.Tensor:
    """The result of ``call`` with nothing else on the device."""
    torch.cuda.synchronize()
    result = call()
    torch.cuda.synchronize()
    return result


def captured(work) -> torch.cuda.CUDAGraph:
    """A graph of what ``work`` launches; it runs once before, so that nothing happens for the first time inside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        # Why not torch.cuda.graph: it collects garbage every time, which takes longer than all else.
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


class Line:
    """x, y and one weight. ``ys[t]`` are the bits that y must have after ``x = xs[t]``, from products made in calm."""

    def __init__(
        self, dtype, shape=(1536, 2048), m=4, act=torch.float16, group_size=128, kind=None, seed=0, turns=None
    ):
        kind = kind or ("zero" if dtype.startswith("uint") else "none")
        self.weight = oracle.make(dtype, shape, group_size, kind, seed=seed)
        self.pw, self.turns = self.weight.pw, turns or Turns(TURNS)
        self.xs = oracle.normal(TURNS, m, shape[1], dtype=act, seed=seed)
        self.x, self.y = torch.zeros_like(self.xs[0]), torch.empty(m, shape[0], dtype=act, device="cuda")
        self.ys = torch.stack([calm(lambda x=x: lowbit.matmul(x, self.pw)) for x in self.xs])
        reason = oracle.wrong_rounded(self.ys, self.xs, self.weight)
        assert reason is None, reason
        # Another x, whose product is put over y while the kernel that compares it may still be reading.
        self.other = oracle.normal(m, shape[1], dtype=act, seed=seed + 1)

    def write(self, before: Manners, offset: int = 0) -> None:
        self.turns.write(self.x, self.xs, before, offset)

    def multiply(self) -> None:
        lowbit.matmul(self.x, self.pw, out=self.y)

    def compare(self, after: Manners, offset: int = 0) -> None:
        self.turns.compare(self.y, self.ys, after, offset)

    def overwrite(self) -> None:
        lowbit.matmul(self.other, self.pw, out=self.y)

    def rounds(self, before: Manners, after: Manners, count: int = 4) -> None:
        """Write, multiply, compare and overwrite, ``count`` times, then go to the turn that follows."""
        for offset in range(count):
            self.write(before, offset)
            self.multiply()
            self.compare(after, offset)
            self.overwrite()
        self.turns.advance(count, after)

    def assert_right(self, compared: int) -> None:
        """Every comparison so far, ``compared`` of them, found the bits it expected."""
        wrong, count = self.turns.verdict()
        assert count == compared, f"expected {compared} comparisons, got {count}"
        first = [
            f"{before}: [{word}] {seen:08x} for {expected:08x}" for before, word, seen, expected in self.turns.noted()
        ]
        assert wrong == 0, f"{wrong} words of y were wrong in {count} comparisons, {first}"
