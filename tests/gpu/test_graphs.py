"""Risk: captured graphs compute something else, keep more memory than the largest needs, or wait for the device."""

import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import GraphError, graphs

from . import oracle
from .kernels import needs_kernels

pytestmark = needs_kernels

WIDTH, WIDE = 256, 16384
ROOT = str(Path(lowbit.__file__).parents[1])


def chain(wide=1024, seed=0):
    """A step of three products: x float16 [M, WIDTH] -> the same shape."""
    shapes = ((wide, WIDTH), (WIDTH, wide), (WIDTH, WIDTH))
    weights = [
        oracle.make(kind, shape, 64, seed=seed) for kind, shape in zip(("int4", "int2", "int8"), shapes, strict=True)
    ]

    def step(x):
        for weight in weights:
            x = torch.nn.functional.silu(lowbit.matmul(x, weight.pw))
        return x

    return step


def rows(m: int, seed: int = 1) -> torch.Tensor:
    return oracle.normal(m, WIDTH, dtype=torch.float16, seed=seed)


def buffer(m: int) -> torch.Tensor:
    return torch.zeros(m, WIDTH, dtype=torch.float16, device="cuda")


@torch.no_grad()
def test_every_number_of_rows_has_the_bits_of_the_eager_step():
    step = chain()
    run = graphs.capture(step, range(1, 65), buffer(64))
    for m in random.Random(0).sample(range(1, 65), 64):
        x = rows(m, seed=m)
        assert oracle.same_bits(run(x), step(x)), f"M={m}"


@torch.no_grad()
def test_rows_between_two_sizes_run_in_the_larger_one():
    step = chain()
    run = graphs.capture(step, (1, 2, 4, 8, 16, 32, 64), buffer(64))
    for m in (3, 5, 7, 9, 31, 33, 63, 64):
        bucket = 1 << (m - 1).bit_length()
        y = run(rows(m, seed=m)).clone()
        assert oracle.same_bits(y, step(run.inputs[0][:bucket])[:m]) and oracle.same_bits(run.inputs[0][:m], rows(m, m))


@torch.no_grad()
def test_what_the_caller_writes_in_place_is_not_copied_and_addresses_stay():
    step = chain()
    run = graphs.capture(step, (4, 8), buffer(8))
    held, place = run.inputs[0], run.outputs[0].data_ptr()
    for m in (1, 4, 6, 8):
        held[:m] = rows(m, seed=m)
        version = held._version
        y = run(held[:m])
        assert held._version == version and y.data_ptr() == place and y.shape == (m, WIDTH)
        assert oracle.same_bits(y, step(held[: 4 if m <= 4 else 8])[:m])
        assert oracle.same_bits(run.replay(m), y)


@torch.no_grad()
def test_capture_and_calls_never_wait_for_the_device():
    step, held, x = chain(), buffer(8), rows(5)
    for m in (1, 2, 4, 8):
        step(held[:m])
    torch.cuda.set_sync_debug_mode("error")
    try:
        run = graphs.capture(step, (1, 2, 4, 8), held)
        y = run(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert oracle.same_bits(y, step(run.inputs[0])[:5])


@torch.no_grad()
def test_calls_from_streams_in_turn_do_not_overlap():
    step = chain(WIDE)
    run = graphs.capture(step, (1, 8, 64), buffer(64))
    sizes = [64, 1, 8, 64, 8, 1]
    xs = {m: rows(m, seed=m) for m in sizes}
    ends = {m: step(x) for m, x in xs.items()}
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for turn in range(60):
        m = sizes[turn % 6]
        with torch.cuda.stream(streams[turn % 2]):
            # The copy is ordered after the call on its stream, and the next call after both.
            found.append((m, run(xs[m]).clone()))
    torch.cuda.synchronize()
    assert all(oracle.same_bits(y, ends[m]) for m, y in found)


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def pool_each(step, ms):
    """Graphs in torch's own way, a pool for each."""
    stream, found = torch.cuda.Stream(), []
    for m in ms:
        x, graph = buffer(m), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                found.append((graph, x, step(x)))
            finally:
                graph.capture_end()
    return found


@torch.no_grad()
def test_graphs_of_many_sizes_take_the_memory_of_the_largest():
    step = chain(WIDE)
    for m in range(1, 65):
        step(rows(m))
    taken = {}
    for name, make in (
        ("largest", lambda: graphs.capture(step, (64,), buffer(64))),
        ("all", lambda: graphs.capture(step, range(1, 65), buffer(64))),
        ("apart", lambda: pool_each(step, range(1, 65))),
    ):
        before = reserved()
        made = make()
        taken[name] = reserved() - before
        del made
    assert taken["all"] <= taken["largest"] + (8 << 20), taken
    assert taken["all"] * 10 <= taken["apart"], taken


@torch.no_grad()
def test_memory_comes_back_when_the_graphs_are_gone():
    step = chain(WIDE)
    graphs.capture(step, (1, 64), buffer(64))
    before = reserved()
    run = graphs.capture(step, range(1, 33), buffer(32))
    run(rows(9))
    assert reserved() > before
    del run
    assert reserved() <= before


def test_layers_a_cache_and_two_inputs():
    torch.manual_seed(0)
    layer = lowbit.Linear.from_linear(torch.nn.Linear(WIDTH, 64).half().cuda(), "int4", group_size=64, method="rtn")
    cache = torch.zeros(100, 64, dtype=torch.float16, device="cuda")

    def step(x, place):
        y = layer(x)
        cache.index_copy_(0, place, y)
        return y, place + 1

    places = torch.arange(8, device="cuda")
    run = graphs.capture(step, (2, 8), buffer(8), places)
    x = rows(3)
    with torch.no_grad():
        layer.bias += 1  # a write to what a graph reads is seen
        y, following = run(x, torch.tensor([50, 60, 70], device="cuda"))
        assert following.tolist() == [51, 61, 71] and not y.requires_grad
        assert torch.equal(cache[[50, 60, 70]], y) and oracle.same_bits(y, layer(run.inputs[0])[:3])


def test_wrong_calls_are_refused_and_the_right_one_works():
    run = graphs.capture(chain(), (2, 4), buffer(4))
    for x, error in (
        (rows(5), lowbit.ShapeError),
        (rows(2).float(), lowbit.DtypeError),
        (rows(2).cpu(), lowbit.DeviceError),
        (rows(2)[:, 1:], lowbit.ShapeError),
    ):
        with pytest.raises(error):
            run(x)
    assert run(rows(3)).isfinite().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_graphs_of_a_device_that_is_not_current():
    weight = oracle.make("int4", (WIDTH, WIDTH), 64)
    there = weight.pw.to("cuda:1")
    run = graphs.capture(lambda x: lowbit.matmul(x, there), (1, 4), buffer(4).to("cuda:1"))
    y = run(rows(3).to("cuda:1"))
    assert y.device == torch.device("cuda:1") and torch.equal(y, lowbit.matmul(run.inputs[0], there)[:3])


WAITS = """
import torch, lowbit
try:
    lowbit.graphs.capture(lambda x: x * x.sum().item(), (2, 4), torch.zeros(4, 8, device="cuda"))
except lowbit.GraphError as why:
    print("refused:", why, flush=True)
"""


def test_a_step_that_waits_is_refused():
    # Why another process: torch may not be able to capture after a capture that failed.
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, cwd=ROOT)
    says = "refused: expected a step that can be captured, with 4 rows it raised:"
    assert done.stdout.startswith(says), done.stdout + done.stderr[-3000:]


def test_a_call_inside_a_capture_is_refused():
    run, held, graph = graphs.capture(lambda x: x + 1, (2, 4), buffer(4)), buffer(2), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            with pytest.raises(GraphError, match="outside of a capture"):
                run.replay(1)
            held.add_(1)
        finally:
            graph.capture_end()
    assert run(rows(3)).isfinite().all()


def test_a_capture_inside_a_capture_is_refused():
    graph, held = torch.cuda.CUDAGraph(), buffer(2)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            with pytest.raises(GraphError, match="outside of a capture"):
                graphs.capture(lambda x: x + 1, (2,), held)
            held.add_(1)
        finally:
            graph.capture_end()
