"""Risk: graphs of several sizes run the wrong one, on rows that are not the call's, or take what they cannot hold."""

import gc
import threading
import types

import pytest
import torch

import lowbit
from lowbit import DeviceError, DtypeError, GraphError, LowbitError, ShapeError, graphs

MS = (1, 2, 4, 7)


def made(ms=MS, rows=7, seen=None, dtype=torch.float32):
    """A step of two inputs that notes with how many rows it ran."""
    seen = [] if seen is None else seen

    def step(x, ids):
        seen.append(len(x))
        return x * 2 + ids[:, None], ids + 1

    return graphs.capture(step, ms, torch.zeros(rows, 3, dtype=dtype), torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize("ms", [MS, [7, 2, 4, 1, 2], range(1, 8), (7,)])
def test_the_smallest_size_that_holds_the_rows_runs(ms):
    seen = []
    step = made(ms, seen=seen)
    assert step.ms == tuple(sorted(set(ms)))
    for m in range(1, 8):
        seen.clear()
        x, ids = torch.randn(m, 3), torch.randint(9, (m,))
        y, other = step(x, ids)
        assert seen == [min(s for s in ms if s >= m)]
        assert torch.equal(y, x * 2 + ids[:, None]) and torch.equal(other, ids + 1)


def test_one_tensor_and_lists_come_back_as_they_are():
    x = torch.randn(3, 2)
    assert torch.equal(graphs.capture(lambda x: x + 1, [4], torch.zeros(4, 2))(x), x + 1)
    (only,) = graphs.capture(lambda x: [x + 1], [4], torch.zeros(4, 2))(x)
    assert torch.equal(only, x + 1)


def test_a_step_may_write_where_it_likes_and_return_nothing():
    kept = torch.zeros(4, 2)

    def step(x):
        kept[: len(x)] = x + 1

    silent, x = graphs.capture(step, [2, 4], torch.zeros(4, 2)), torch.randn(3, 2)
    assert silent(x) is None and silent.outputs is None and torch.equal(kept[:3], x + 1)


def test_what_lies_in_the_inputs_already_is_not_copied():
    step = made()
    held, ids = step.inputs
    written = held._version
    held[:3] = torch.randn(3, 3)
    before = held._version
    y, _ = step(held[:3], torch.ones(3, dtype=torch.int64))
    assert held._version == before > written and torch.equal(y, held[:3] * 2 + 1)
    step(torch.randn(3, 3), ids[:3])
    assert held._version > before
    held[:2], ids[:2] = 5, 6
    assert torch.equal(step.replay(2)[0], torch.full((2, 3), 16.0))


def test_results_of_all_sizes_are_rows_of_the_same_tensors():
    step = made()
    places = {step.replay(m)[0].data_ptr() for m in (1, 3, 7)}
    assert places == {step.outputs[0].data_ptr()} and step.outputs[0].shape == (7, 3)


def test_a_result_that_is_there_already_is_not_copied():
    step = graphs.capture(lambda x: x + 1, [4], torch.zeros(4, 2))
    step._step = lambda x: torch.add(x, 1, out=step.outputs[0][: len(x)])
    version = step.outputs[0]._version
    step.replay(4)
    assert step.outputs[0]._version == version + 1  # by the step alone


def test_gradients_are_neither_made_nor_asked_for():
    layer = torch.nn.Linear(3, 2)
    step = graphs.capture(layer, [2], torch.zeros(2, 3))
    x = torch.randn(2, 3, requires_grad=True)
    y = step(x)
    assert not y.requires_grad and torch.allclose(y, layer(x))
    with torch.inference_mode():
        inside = graphs.capture(layer, [2], torch.zeros(2, 3))
    assert not inside.outputs[0].is_inference()


def test_a_quantized_layer_and_writes_to_what_a_step_reads_are_seen():
    layer = lowbit.Linear.from_linear(torch.nn.Linear(64, 32), "int4", group_size=32, method="rtn")
    step, x = graphs.capture(layer, (1, 8), torch.zeros(8, 64)), torch.randn(5, 64)
    assert torch.equal(step(x), layer(torch.cat([x, torch.zeros(3, 64)]))[:5])
    with torch.no_grad():
        layer.bias += 1
    torch.testing.assert_close(step(x), layer(x))


@pytest.mark.parametrize(
    ("xs", "error", "says"),
    [
        ((torch.zeros(8, 3), torch.zeros(8).long()), ShapeError, "expected 1 to 7 rows, .* got 8"),
        ((torch.zeros(0, 3), torch.zeros(0).long()), ShapeError, "expected 1 to 7 rows, .* got 0"),
        ((torch.zeros(2, 4), torch.zeros(2).long()), ShapeError, r"input 0 must have shape \(M, 3\), .* got \(2, 4\)"),
        ((torch.zeros(2, 3), torch.zeros(3).long()), ShapeError, r"input 1 must have shape \(M\), .* got \(3,\)"),
        ((torch.zeros(3), torch.zeros(3).long()), ShapeError, r"input 0 must have shape \(M, 3\), .* got \(3,\)"),
        ((torch.tensor(1.0), torch.zeros(3).long()), ShapeError, r"input 0 must have shape"),
        ((torch.zeros(2, 3).half(), torch.zeros(2).long()), DtypeError, "input 0 must be float32, got float16"),
        ((torch.zeros(2, 3), torch.zeros(2)), DtypeError, "input 1 must be int64, got float32"),
        ((torch.zeros(2, 3), [1, 2]), DtypeError, "input 1 must be a torch.Tensor, got list"),
        ((torch.zeros(2, 3, device="meta"), torch.zeros(2).long()), DeviceError, "input 0 must be on cpu, got meta"),
        ((torch.zeros(2, 3),), ShapeError, "expected 2 tensors, as many as inputs, got 1"),
    ],
)
def test_calls_that_no_graph_holds_say_so_and_change_nothing(xs, error, says):
    step = made()
    step(torch.ones(2, 3), torch.ones(2).long())
    before = [t.clone() for t in (*step.inputs, *step.outputs)]
    with pytest.raises(error, match=says) as caught:
        step(*xs)
    assert isinstance(caught.value, LowbitError)
    assert all(map(torch.equal, before, (*step.inputs, *step.outputs)))


@pytest.mark.parametrize("m", [0, 8, -1, True, 2.0, None])
def test_replay_refuses_rows_that_no_graph_holds(m):
    with pytest.raises(ShapeError, match="rows|whole number"):
        made().replay(m)


@pytest.mark.parametrize(
    ("ms", "inputs", "error", "says"),
    [
        ((), (torch.zeros(4, 2),), ShapeError, "ms must be numbers of rows from 1, got 'none'"),
        ((0, 4), (torch.zeros(4, 2),), ShapeError, "ms must be numbers of rows from 1, got 0"),
        ((True,), (torch.zeros(4, 2),), ShapeError, "got True"),
        (5.0, (torch.zeros(4, 2),), ShapeError, "got 5.0"),
        ((5,), (torch.zeros(4, 2),), ShapeError, r"input 0 must have 5 rows, .* got \(4, 2\)"),
        ((4,), (), ShapeError, "expected the tensors that step reads, got none"),
        ((4,), (torch.tensor(1.0),), ShapeError, "input 0 must have 4 rows"),
        ((4,), ([1, 2],), DtypeError, "input 0 must be a torch.Tensor, got list"),
        ((4,), (torch.zeros(4, 2), torch.zeros(4, device="meta")), DeviceError, "input 1 must be on the device of"),
        ((4,), (torch.zeros(4, 2, device="meta"),), DeviceError, "on a cpu or cuda device, got meta"),
        ((4,), (torch.zeros(4, 2, requires_grad=True),), DtypeError, "must not require a gradient"),
    ],
)
def test_capture_refuses_inputs_that_do_not_fit(ms, inputs, error, says):
    with pytest.raises(error, match=says):
        graphs.capture(lambda *xs: xs[0], ms, *inputs)


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        (lambda x: 3, DtypeError, "result 0 is a int"),
        (lambda x: (x, None), DtypeError, "result 1 is a NoneType"),
        (lambda x: x.sum(), ShapeError, r"must return \[4, ...\] for 4 rows, result 0 is \(\)"),
        (lambda x: x[:1], ShapeError, r"result 0 is \(1, 2\)"),
        (lambda x: x if len(x) == 4 else (x, x), ShapeError, "as many tensors for 2 rows as for 4, got 2"),
        (lambda x: x if len(x) == 4 else x[:, :1], ShapeError, r"must return \[2, 2\] for 2 rows"),
        (lambda x: x if len(x) == 4 else x.half(), DeviceError, "the same for every M"),
        (lambda x: x.to("meta"), DeviceError, "on cpu: result 0 is torch.float32 on meta"),
    ],
)
def test_steps_that_return_something_else_are_refused(step, error, says):
    with pytest.raises(error, match=says):
        graphs.capture(step, (2, 4), torch.zeros(4, 2)).replay(1)


def test_a_second_thread_is_refused_while_a_call_runs_and_welcome_afterwards():
    inside, go, found = threading.Event(), threading.Event(), []

    def step(x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go.wait(30)
        return x + 1

    run = graphs.capture(step, [2], torch.zeros(2, 2))
    thread = threading.Thread(target=lambda: found.append(run(torch.ones(2, 2)).clone()))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(GraphError, match="one call at a time, got one from a second thread"):
        run(torch.zeros(2, 2))
    go.set()
    thread.join()
    assert torch.equal(found[0], torch.full((2, 2), 2.0))
    assert torch.equal(run(torch.zeros(2, 2)), torch.ones(2, 2))


def test_a_step_that_raises_leaves_the_graphs_usable():
    def step(x):
        if x[0, 0] == 3:
            raise KeyError("three")
        return x + 1

    run = graphs.capture(step, [2], torch.zeros(2, 2))
    with pytest.raises(KeyError):
        run(torch.full((1, 2), 3.0))
    assert torch.equal(run(torch.ones(1, 2)), torch.full((1, 2), 2.0))


# ---- captures, with a stand-in for CUDA ------------------------------------------------------------------------------


class Stream:
    def __init__(self, name="new"):
        self.name, self.waited = name, []

    def wait_stream(self, other):
        self.waited.append(other.name)


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda as far as graphs use it: a graph runs its step again when it is replayed."""
    world = types.SimpleNamespace(log=[], capturing=False, current=Stream("caller"), fails=False)

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            world.log.append(("begin", pool, capture_error_mode, gc.isenabled()))
            world.now = self

        def capture_end(self):
            world.log.append("end")
            if world.fails:
                raise RuntimeError("capture was invalidated")

        def replay(self):
            world.log.append(("replay", self.rows))
            run = world.graphs
            run.outputs[0][: self.rows] = run._step(run.inputs[0][: self.rows])

    class Nothing:
        def __init__(self, *args):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            return None

    stand_ins = {
        "CUDAGraph": Graph, "Stream": Stream, "stream": Nothing, "device": Nothing,
        "current_stream": lambda device=None: world.current, "is_current_stream_capturing": lambda: world.capturing,
        "graph_pool_handle": lambda: "pool", "empty_cache": lambda: world.log.append("empty"),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return world


def captured(world, step=lambda x: x + 1, ms=(1, 2, 4)):
    world.graphs = graphs.Graphs(step, ms, (torch.zeros(4, 2),))
    with torch.no_grad():
        world.graphs._capture()
    for rows, graph in world.graphs._graphs.items():
        graph.rows = rows
    world.graphs.device = types.SimpleNamespace(type="cuda")
    return world.graphs


def test_the_largest_is_captured_first_into_one_pool_without_collecting_garbage(cuda):
    ran = []
    run = captured(cuda, lambda x: ran.append(len(x)) or x + 1)
    assert ran == [4, 2, 1, 4, 2, 1] and list(run._graphs) == [4, 2, 1]
    begin = ("begin", "pool", "thread_local", False)
    assert cuda.log == ["empty", begin, "end", begin, "end", begin, "end"] and gc.isenabled()
    run.inputs[0][:3] = x = torch.randn(3, 2)
    assert torch.equal(run.replay(3), x + 1) and cuda.log[-1] == ("replay", 4)
    run.replay(1)
    assert cuda.log[-1] == ("replay", 1)


def test_calls_on_another_stream_wait_for_the_one_before(cuda):
    run = captured(cuda)
    run.replay(1)
    assert cuda.current.waited == ["new"]  # for the capture
    cuda.current = other = Stream("other")
    run.replay(1), run.replay(2)
    assert other.waited == ["caller"]
    cuda.current = Stream("third")
    run.replay(1)
    assert cuda.current.waited == ["other"]


def test_nothing_is_called_or_captured_inside_of_another_capture(cuda):
    run = captured(cuda)
    cuda.capturing = True
    with pytest.raises(GraphError, match="outside of a capture, got a call"):
        run.replay(1)
    with pytest.raises(GraphError, match="outside of a capture, got one while"):
        captured(cuda)
    cuda.capturing, cuda.graphs = False, run
    run.replay(1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_cannot_be_captured_says_why(cuda, fails):
    turns = []

    def step(x):
        turns.append(len(x))
        if len(turns) == 5:
            cuda.fails = fails
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return x + 1

    with pytest.raises(GraphError, match="with 2 rows it raised: operation not permitted when stream is capturing$"):
        captured(cuda, step)
    assert cuda.log[-1] == "end" and gc.isenabled()
