"""CUDA graphs of one step for many numbers of rows, in the memory of the largest: :func:`capture`."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable

import torch

from .errors import DeviceError, DtypeError, GraphError, ShapeError
from .ops.schema import type_name

#: Why kept: where a capture could not be ended, torch's allocator goes on to ask its graph.
_failed: list[torch.cuda.CUDAGraph] = []


def capture(step: Callable, ms: Iterable[int], *inputs: torch.Tensor) -> Graphs:
    """Capture ``step`` once for each number of rows in ``ms``; the result is called like it, with any number of rows up
    to the largest.

    step: called with as many tensors as there are inputs, all of M rows; returns a tensor, a tuple or list of tensors,
    each of M rows, or None. It may read and write other tensors, such as a cache, whose addresses stay. Rows must not
    depend on each other. inputs: ``[rows, ...]`` on one device, with at least as many rows as the largest M; they are
    what the graphs read, see :class:`Graphs`, and have to hold values that step can run on. For each M step runs twice,
    once to warm up and once to be captured, and only the first run computes.

    The largest M is captured first, and all share one memory pool, so that together they need the memory of the
    largest; the outputs of all are rows of the same tensors. Capturing collects garbage once, not once a graph. On the
    CPU there are no graphs: the same object runs the step.

    Raises DtypeError, ShapeError or DeviceError for inputs or results of step that are not as said, GraphError when
    a graph is being captured already, or step does what cannot be captured, such as waiting for the device; torch may
    be unable to capture anything else in that process.
    """
    sizes = _sizes(ms)
    _check_inputs(inputs, sizes[-1])
    graphs = Graphs(step, sizes, inputs)
    with torch.no_grad():
        if inputs[0].is_cuda:
            graphs._capture()
        else:
            graphs._run(sizes[-1])
    return graphs


class Graphs:
    """A step for several numbers of rows; made by :func:`capture`, called like the step.

    ms: the captured numbers of rows, ascending; a call takes the smallest that holds its rows. inputs, outputs: the
    tensors that every graph reads and writes, those of M rows their first M (outputs: None if the step returns None).

    A call copies its tensors into the first rows of ``inputs``, except one that already lies there: write to
    ``graphs.inputs[0][:m]`` and pass that, or call :meth:`replay`, and nothing is copied. Rows between the call's and
    the graph's keep what earlier calls left in them. What a call returns are the first rows of ``outputs``: they are
    overwritten by the next call, so copy what has to live longer. Parameters and other tensors that step reads must
    stay where they are; writes to them are seen.

    Calls on several streams follow each other, in the order in which they were made: graphs of one pool must not run
    at the same time. What a call returns is ready on the stream of the call. Two threads at once raise GraphError.
    """

    def __init__(self, step: Callable, sizes: tuple[int, ...], inputs: tuple[torch.Tensor, ...]):
        self.ms, self.inputs, self.outputs = sizes, inputs, None
        self.device = inputs[0].device
        self._step, self._single, self._ready = step, True, False
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._stream: torch.cuda.Stream | None = None  # of the last call
        self._busy = threading.Lock()
        # Row counts up to the largest -> the graph that holds them.
        self._bucket = [next(m for m in sizes if m >= rows) for rows in range(sizes[-1] + 1)]

    def __call__(self, *xs: torch.Tensor):
        """The step of tensors of M rows. Raises DtypeError, ShapeError or DeviceError for others than ``inputs`` hold,
        ShapeError for more rows than the largest graph has, GraphError like :meth:`replay`.
        """
        m = self._check_call(xs)
        with self._alone():
            with torch.no_grad():
                for held, x in zip(self.inputs, xs, strict=True):
                    if x.data_ptr() != held.data_ptr() or x.stride() != held.stride():
                        held[:m].copy_(x)
            return self._replay(m)

    def replay(self, m: int):
        """The step of the first m rows of ``inputs``. Raises ShapeError for an m that no graph holds, GraphError when
        another thread is in a call, or a graph is being captured.
        """
        if isinstance(m, bool) or not isinstance(m, int):
            raise ShapeError(f"m must be a whole number, got {m!r}")
        self._check_rows(m)
        with self._alone():
            return self._replay(m)

    def __repr__(self) -> str:
        kind = "graphs" if self._graphs else "no graphs"
        return f"Graphs({kind} for up to {self.ms[-1]} rows, {len(self.ms)} sizes, device={str(self.device)!r})"

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _replay(self, m: int):
        bucket = self._bucket[m]
        if self._graphs:
            self._graphs[bucket].replay()
        else:
            with torch.no_grad():
                self._run(bucket)
        if self.outputs is None:
            return None
        found = tuple(y[:m] for y in self.outputs)
        return found[0] if self._single else found

    @contextlib.contextmanager
    def _alone(self):
        """One call at a time, each after the one before on whatever stream."""
        if not self._busy.acquire(blocking=False):
            raise GraphError("graphs share memory: expected one call at a time, got one from a second thread")
        try:
            if self.device.type == "cuda":
                if torch.cuda.is_current_stream_capturing():
                    raise GraphError("expected to be called outside of a capture, got a call while a graph is captured")
                stream = torch.cuda.current_stream(self.device)
                if self._stream is not None and stream != self._stream:
                    stream.wait_stream(self._stream)
                self._stream = stream
            yield
        finally:
            self._busy.release()

    def _check_call(self, xs: tuple) -> int:
        if len(xs) != len(self.inputs):
            raise ShapeError(f"expected {len(self.inputs)} tensors, as many as inputs, got {len(xs)}")
        for i, (held, x) in enumerate(zip(self.inputs, xs, strict=True)):
            if not isinstance(x, torch.Tensor):
                raise DtypeError(f"input {i} must be a torch.Tensor, got {type(x).__name__}")
            if x.dtype != held.dtype:
                raise DtypeError(f"input {i} must be {type_name(held.dtype)}, got {type_name(x.dtype)}")
            if x.device != self.device:
                raise DeviceError(f"input {i} must be on {self.device}, got {x.device}; move it with .to()")
            if x.dim() != held.dim() or x.shape[1:] != held.shape[1:] or x.shape[0] != xs[0].shape[0]:
                expected = ("M", *held.shape[1:])
                raise ShapeError(
                    f"input {i} must have shape ({', '.join(map(str, expected))}), M that of the first input, "
                    f"got {tuple(x.shape)}"
                )
        self._check_rows(xs[0].shape[0])
        return xs[0].shape[0]

    def _check_rows(self, m: int) -> None:
        if not 1 <= m <= self.ms[-1]:
            raise ShapeError(f"expected 1 to {self.ms[-1]} rows, those of the largest graph, got {m}")

    # ---- the step --------------------------------------------------------------------------------------------------

    def _run(self, m: int) -> None:
        """Run the step for m rows and put its results into the outputs."""
        found = self._step(*(held[:m] for held in self.inputs))
        if not self._ready:
            self._make_outputs(found, m)
        found = _as_tuple(found)
        if len(found) != len(self.outputs or ()):
            raise ShapeError(f"step must return as many tensors for {m} rows as for {self.ms[-1]}, got {len(found)}")
        for i, y in enumerate(found):
            _check_result(i, y, m, self.outputs[i], self.device)
            mine = self.outputs[i][:m]
            if y.data_ptr() != mine.data_ptr() or y.stride() != mine.stride():
                mine.copy_(y)

    def _make_outputs(self, found, m: int) -> None:
        self._ready, self._single = True, isinstance(found, torch.Tensor)
        if found is not None:
            for i, y in enumerate(_as_tuple(found)):
                _check_result(i, y, m, None, self.device)
            # Why not the step's own: those lie in the pool, where the next graph may put something else. Why the
            # caller's stream: that is where they are used when their memory is given back.
            with torch.inference_mode(False), torch.cuda.stream(self._stream):
                self.outputs = tuple(torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in _as_tuple(found))

    def _capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise GraphError("expected to capture outside of a capture, got one while another graph is captured")
        largest_first = self.ms[::-1]
        with torch.cuda.device(self.device):
            caller, stream = torch.cuda.current_stream(), torch.cuda.Stream()
            stream.wait_stream(caller)
            self._stream = caller
            with torch.cuda.stream(stream):
                for m in largest_first:
                    self._run(m)
                # Why: memory of the warm-up would stay with the allocator, as much as the graphs need; and what is
                # collected while a graph is captured may do what must not be done then.
                gc.collect()
                torch.cuda.empty_cache()
                pool, collects = torch.cuda.graph_pool_handle(), gc.isenabled()
                gc.disable()
                try:
                    self._graphs = {m: self._captured(m, pool) for m in largest_first}
                finally:
                    if collects:
                        gc.enable()
            caller.wait_stream(stream)

    def _captured(self, m: int, pool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._run(m)
        except BaseException as why:
            _failed.append(graph)
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            if isinstance(why, RuntimeError):
                first = str(why).splitlines()[0]
                raise GraphError(f"expected a step that can be captured, with {m} rows it raised: {first}") from why
            raise
        graph.capture_end()
        return graph


def _as_tuple(found) -> tuple:
    if found is None:
        return ()
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _sizes(ms: Iterable[int]) -> tuple[int, ...]:
    ms = list(ms) if isinstance(ms, Iterable) else [ms]
    wrong = [m for m in ms if isinstance(m, bool) or not isinstance(m, int) or m < 1]
    if wrong or not ms:
        raise ShapeError(f"ms must be numbers of rows from 1, got {wrong[0] if wrong else 'none'!r}")
    return tuple(sorted(set(ms)))


def _check_inputs(inputs: tuple, rows: int) -> None:
    if not inputs:
        raise ShapeError("expected the tensors that step reads, got none")
    for i, held in enumerate(inputs):
        if not isinstance(held, torch.Tensor):
            raise DtypeError(f"input {i} must be a torch.Tensor, got {type(held).__name__}")
        if held.dim() == 0 or held.shape[0] < rows:
            raise ShapeError(f"input {i} must have {rows} rows, the largest of ms, or more, got {tuple(held.shape)}")
        if held.device != inputs[0].device:
            raise DeviceError(f"input {i} must be on the device of the first, {inputs[0].device}, got {held.device}")
        if held.requires_grad:
            raise DtypeError(f"input {i} must not require a gradient: graphs compute none; detach it")
    if inputs[0].device.type not in ("cpu", "cuda"):
        raise DeviceError(f"inputs must be on a cpu or cuda device, got {inputs[0].device}")


def _check_result(i: int, y, m: int, held: torch.Tensor | None, device: torch.device) -> None:
    if not isinstance(y, torch.Tensor):
        raise DtypeError(f"step must return tensors, result {i} is a {type(y).__name__}")
    if y.dim() == 0 or y.shape[0] != m or (held is not None and y.shape[1:] != held.shape[1:]):
        tail = "..." if held is None else ", ".join(map(str, held.shape[1:]))
        raise ShapeError(f"step must return [{m}, {tail}] for {m} rows, result {i} is {tuple(y.shape)}")
    if y.device != device or (held is not None and y.dtype != held.dtype):
        raise DeviceError(f"step must return the same for every M, on {device}: result {i} is {y.dtype} on {y.device}")
