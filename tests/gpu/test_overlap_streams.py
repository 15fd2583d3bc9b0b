"""Risk: a product goes wrong where streams join, graphs run side by side, or its weight has just been changed."""

import pytest
import torch
from torch import nn

import lowbit

from . import oracle
from .foreign import EARLY, NEVER
from .kernels import needs_kernels
from .line import Line, calm, captured

pytestmark = needs_kernels


# ---- joined streams -------------------------------------------------------------------------------------------------


def product_elsewhere(line, side, offset):
    """x is written here, multiplied on another stream, and compared here."""
    here = torch.cuda.current_stream()
    line.write(EARLY, offset)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        line.multiply()
    here.wait_stream(side)
    line.compare(EARLY, offset)


def product_here(line, side, offset):
    """x is written and y compared on another stream; here another kernel that ends late stands before the product."""
    here, aside = torch.cuda.current_stream(), torch.empty_like(line.x)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        line.write(EARLY, offset)
    line.turns.write(aside, line.xs, EARLY, offset)
    here.wait_stream(side)
    line.multiply()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        line.compare(EARLY, offset)
    line.turns.compare(aside, line.xs, EARLY, offset)
    here.wait_stream(side)


@pytest.mark.parametrize("work, comparisons", [(product_elsewhere, 1), (product_here, 2)])
@pytest.mark.parametrize("m", [1, 16, 40, 300])
def test_joined_streams(work, comparisons, m):
    line, side = Line("int4", m=m), torch.cuda.Stream()

    def rounds():
        for offset in range(4):
            work(line, side, offset)
        line.turns.advance(4)

    line.turns.pause()
    for _ in range(3):
        rounds()
    line.assert_right(12 * comparisons)
    graph = captured(rounds)
    for _ in range(30):
        graph.replay()
    line.assert_right((12 + 4 * 31) * comparisons)


# ---- side by side ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ms", [(3, 16), (16, 100)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["own_weights", "one_weight"])
def test_two_graphs_on_two_streams(shared, ms):
    lines = [
        Line("uint3", m=ms[0]),
        Line("int8" if not shared else "uint3", m=ms[1], act=torch.bfloat16, seed=int(not shared)),
    ]
    if shared:
        lines[1].pw = lines[0].pw
    graphs = [captured(lambda line=line: line.rounds(EARLY, EARLY)) for line in lines]
    streams = [torch.cuda.Stream() for _ in lines]
    for _ in range(100):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    for line in lines:
        line.assert_right(4 * 101)


@pytest.mark.parametrize("m", [4, 8, 64])
def test_one_graph_while_its_weight_is_read_by_eager_products(m):
    line = Line("int2", m=m)
    graph, side = captured(lambda: line.rounds(EARLY, NEVER)), torch.cuda.Stream()
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(side):
            y = lowbit.matmul(line.xs[3], line.pw)
    line.assert_right(4 * 51)
    assert oracle.same_bits(y, line.ys[3])


def test_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(1):
        line = Line("int4", m=5)
    assert line.pw.device.index == 1 and torch.cuda.current_device() == 0
    for x, y in zip(line.xs, line.ys, strict=True):
        assert oracle.same_bits(lowbit.matmul(x, line.pw), y)
    for times in (10, 100):
        x = line.xs[0].repeat(times, 1)
        assert oracle.wrong_rounded(lowbit.matmul(x, line.pw), x, line.weight) is None
    assert lowbit.pack_weight(line.weight.qt, "cuda:1").unpack() == line.weight.qt
    assert torch.cuda.current_device() == 0


# ---- weights that change --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 16, 40, 300])
def test_weights_packed_between_products(m):
    """Each new weight takes the memory of the one before it, and is read at once by a kernel that starts early."""
    weights = [oracle.make("int4", (1536, 2048), seed=i) for i in range(5)]
    x = oracle.normal(m, 2048, dtype=torch.float16)
    expected = [calm(lambda w=w: lowbit.matmul(x, w.pw)) for w in weights]
    side, seen = torch.cuda.Stream(), []
    for i in range(40):
        pw = lowbit.pack_weight(weights[i % 5].qt, "cuda")
        # Packing has ended when pack_weight returns, so that any stream may read the weight.
        with torch.cuda.stream(side if i % 4 == 3 else torch.cuda.current_stream()):
            for _ in range(3):
                y = lowbit.matmul(x, pw)
        if i % 4 == 3:
            side.synchronize()
        seen.append(y)
        if i % 7 == 0:
            assert pw.unpack() == weights[i % 5].qt
        del pw
    for i, y in enumerate(seen):
        assert oracle.same_bits(y, expected[i % 5]), f"product {i}"


def layer(dtype: str, seed: int, prepare: bool) -> lowbit.Linear:
    torch.manual_seed(seed)
    dense = nn.Linear(1024, 768, bias=False, device="cuda", dtype=torch.float16)
    return lowbit.Linear.from_linear(dense, dtype, method="rtn", prepare=prepare)


@pytest.mark.parametrize("prepare", [False, True], ids=["canonical", "packed"])
@pytest.mark.parametrize("m", [1, 40, 300])
def test_layer_whose_weight_is_loaded_between_products(prepare, m):
    layers = [layer("int4", seed, prepare) for seed in range(3)]
    states = [{name: value.clone() for name, value in one.state_dict().items()} for one in layers]
    x, target = oracle.normal(m, 1024, dtype=torch.float16), layer("int4", 9, prepare)
    with torch.no_grad():
        expected = [calm(lambda one=one: one(x)) for one in layers]
        seen = []
        for i in range(20):
            target.load_state_dict(states[i % 3])
            seen.append(target(x))
    for i, y in enumerate(seen):
        assert oracle.same_bits(y, expected[i % 3]), f"product {i}"


@pytest.mark.parametrize("m", [1, 16, 40])
def test_canonical_weight_written_in_place(m):
    """A canonical layer is written by ordinary kernels in its stream: nothing may read it early."""
    layers = [layer("int4", seed, prepare=False) for seed in range(3)]
    x, target = oracle.normal(m, 1024, dtype=torch.float16), layer("int4", 9, prepare=False)
    with torch.no_grad():
        expected = [calm(lambda one=one: one(x)) for one in layers]
        seen = []
        for i in range(30):
            target.qweight.copy_(layers[i % 3].qweight)
            target.scales.copy_(layers[i % 3].scales)
            seen.append(target(x))
    for i, y in enumerate(seen):
        assert oracle.same_bits(y, expected[i % 3]), f"product {i}"


def test_packing_is_refused_inside_a_capture():
    weight, stream = oracle.make("int4", (64, 256)), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for refused in (lambda: lowbit.pack_weight(weight.qt, "cuda"), weight.pw.unpack):
                with pytest.raises(lowbit.DeviceError, match="captured"):
                    refused()
        finally:
            graph.capture_end()
