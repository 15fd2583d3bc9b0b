"""Times kernels of one weight on its GPU: a CUDA graph launches every copy of the weight once, back to back.

Why a graph: launched one by one, kernels of a few microseconds wait for the host. Why copies: a weight that is read
again comes from the cache, in a model it never does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from . import extension
from .dtypes import act_id, act_type
from .pack import PackedWeight
from .pack.packed import finish

#: The copies of a weight take this many times the last cache together.
CACHES = 3
#: From so many rows of x on the weight is not what counts, and so many copies do.
MANY_ROWS, FEW_COPIES = 512, 4
#: Milliseconds of a trial, at least.
TRIAL_MS = 0.6


class GraphTimer:
    """Kernel and rows of x -> a function that returns microseconds of one trial: autotune.tuner's ``Ready``.

    pw: a weight that lowbit's kernels multiply on its GPU; act: the type of x. Holds copies of the weight, of three
    times the size of the last cache, as long as it lives. Raises torch.OutOfMemoryError where they have no room.
    """

    def __init__(self, pw: PackedWeight, act: str):
        self.pw, self.act = pw, getattr(torch, act)
        self.device = pw.device
        held = (pw.codes, pw.scales, pw.zeros)
        cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 64 << 20)
        count = max(1, math.ceil(CACHES * cache / max(1, pw.nbytes)))
        with torch.cuda.device(self.device), torch.no_grad():
            self.copies = [held, *(tuple(t if t is None else t.clone() for t in held) for _ in range(count - 1))]
            self.stream = torch.cuda.Stream()
        finish(self.device)  # kernels read packed bytes before they wait for the kernel in front of them
        self.op, self.act_number = torch.ops.lowbit.matmul_out.default, act_id(act_type(act))
        self.x = self.y = torch.empty(0)

    def __call__(self, kernel: str, m: int) -> Callable[[], float] | None:
        """None where the kernel can't hold the product. Raises SchemeError for one that the build lacks."""
        with torch.cuda.device(self.device), torch.no_grad(), torch.cuda.stream(self.stream):
            self._rows(m)
            copies = self.copies if m < MANY_ROWS else self.copies[:FEW_COPIES]
            with extension.try_cuda_kernel(kernel):
                try:
                    self._product(copies[0])  # what is done once only, such as loading the kernel, is not captured
                except RuntimeError as error:
                    if "can't hold" in str(error):
                        return None
                    raise
                graph = self._captured(copies)
        self._replay(graph, 1)  # the first one uploads the graph
        each = self._replay(graph, 1)
        turns = max(1, math.ceil(TRIAL_MS / max(each, 1e-3)))
        return lambda: self._replay(graph, turns) * 1e3 / len(copies)

    def _rows(self, m: int) -> None:
        if self.x.shape[0] != m:
            n, k = self.pw.shape
            self.x = self.y = torch.empty(0)  # the old ones make room first
            self.x = torch.randn(m, k, dtype=self.act, device=self.device)
            self.y = torch.empty(m, n, dtype=self.act, device=self.device)

    def _product(self, held) -> None:
        codes, scales, zeros = held
        self.op(self.x, codes, scales, zeros, None, *self.pw.numbers, self.act_number, self.y, None)

    def _captured(self, copies) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Why not torch.cuda.graph: it collects garbage and empties the allocator's cache each time. Why thread_local:
        # other threads may go on to allocate memory meanwhile.
        self.stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for held in copies:
                self._product(held)
        finally:
            graph.capture_end()
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, turns: int) -> float:
        """Milliseconds of one replay of several."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(turns):
                graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / turns
