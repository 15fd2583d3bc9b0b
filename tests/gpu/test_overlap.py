"""Risk: a product reads x before the kernel in front of it has written it, or writes y while that still reads there.

Kernels that were launched programmatically run at the same time as their neighbours, and only griddepcontrol.wait
orders memory. Every test rewrites x for each product and compares bits on the device.
"""

from dataclasses import replace

import pytest
import torch

import lowbit

from . import oracle
from .foreign import BROKEN, EARLY, HALF, KINDS, NEVER, Turns
from .kernels import forced, may_refuse, needs_kernels, product_rows, tokens
from .line import TURNS, Line, calm, captured
from .products import kind_for

pytestmark = needs_kernels

TYPES = ("int1", "int4", "uint3", "float6_e3m2", "int8")
ROWS = [row for row in product_rows() if row["weight"] in TYPES]


# ---- the tests can see it -------------------------------------------------------------------------------------------


def stand_ins(copy, after=NEVER):
    """Rounds with a copy for the product; ``copy`` says how it behaves."""
    turns = Turns(TURNS)
    table = oracle.normal(TURNS, 64, 1024, seed=1)
    x, y = torch.zeros_like(table[0]), torch.zeros_like(table[0])

    def work():
        for offset in range(4):
            turns.write(x, table, EARLY, offset)
            turns.copy(y, x, copy)
            turns.compare(y, table, after, offset)
        turns.advance(4)

    graph = captured(work)
    for _ in range(10):
        graph.replay()
    return turns.verdict()


def test_a_kernel_that_reads_before_it_waits_is_seen():
    wrong, compared = stand_ins(BROKEN)
    assert compared == 44 and wrong > 0, "these tests could not see a product that reads x too early"


def test_a_kernel_that_waits_is_right():
    assert stand_ins(replace(BROKEN, waits=True)) == (0, 44)
    assert stand_ins(replace(BROKEN, waits=True), after=EARLY) == (0, 44)


def test_a_kernel_that_writes_before_it_waits_is_seen():
    turns, table = Turns(TURNS), oracle.normal(TURNS, 64, 1024, seed=1)
    y, zeros = torch.zeros_like(table[0]), torch.zeros_like(table[0])

    def work():
        turns.write(y, table, NEVER)
        turns.compare(y, table, EARLY)
        turns.copy(y, zeros, BROKEN)
        turns.advance()

    graph = captured(work)
    graph.replay()
    assert turns.verdict()[0] > 0, "these tests could not see a product that writes y too early"


# ---- foreign neighbours ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_graph_between_foreign_kernels(row):
    """x rewritten in place by the kernel before, y read by the kernel after, other values in every replay."""
    if may_refuse(row["name"], tokens(row["name"]), 2048):
        pytest.skip(f"{row['name']} is not for this device")
    with forced(row["name"]):
        kind = kind_for(row) if row["weight"].startswith("uint") else "none"
        line = Line(row["weight"], m=tokens(row["name"]), act=getattr(torch, row["act"]), kind=kind)
        compared = 0
        for before in KINDS.values():
            for after in KINDS.values():
                graph = captured(lambda before=before, after=after: line.rounds(before, after))
                for _ in range(20):
                    graph.replay()
                compared += 4 * 21
                line.assert_right(compared)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m", [1, 7, 16, 40, 100, 300])
def test_stream_between_foreign_kernels(dtype, m):
    line = Line(dtype, m=m, act=torch.bfloat16)
    compared = 0
    for before in KINDS.values():
        for after in KINDS.values():
            line.turns.pause()
            for _ in range(3):
                line.rounds(before, after)
            compared += 12
            line.assert_right(compared)


@pytest.mark.parametrize("m", [2, 12, 40, 200])
@pytest.mark.parametrize("shape", [(16, 256), (1, 8200), (8192, 512)], ids=str)
def test_products_of_few_and_of_many_blocks(shape, m):
    """Blocks without work have to wait too."""
    line = Line("int4", shape, m=m, group_size=64)
    graph = captured(lambda: line.rounds(EARLY, EARLY))
    for _ in range(50):
        graph.replay()
    line.assert_right(4 * 51)


@pytest.mark.parametrize("m", [0, 1, 16, 100])
@pytest.mark.parametrize("n", [2, 16, 8192])
def test_waiting_reaches_past_a_product(m, n):
    """The kernel after a product reads what the kernel before it wrote: the product must not end before that has."""
    line = Line("int4", (n, 512), m=max(m, 1))
    x = line.other[:m]
    seen = torch.zeros_like(line.xs[0])
    y = torch.empty(m, n, dtype=x.dtype, device="cuda")

    def work():
        for offset in range(4):
            line.turns.write(seen, line.xs, EARLY, offset)
            lowbit.matmul(x, line.pw, out=y)
            line.turns.compare(seen, line.xs, replace(EARLY, cycles=0), offset)
        line.turns.advance(4, HALF)

    graph = captured(work)
    for _ in range(20):
        graph.replay()
    line.assert_right(4 * 21)


# ---- one after another ----------------------------------------------------------------------------------------------


def square(dtype: str, n: int, seed: int) -> oracle.Weight:
    """A square weight that keeps the size of x: zero mean, rows of length 1."""
    chance, legal = oracle.generator(seed), oracle.legal_codes(dtype)
    codes = legal[torch.randint(len(legal), (n, n), generator=chance, device="cuda")]
    ones = torch.ones(n, n // 128, device="cuda")
    middle = (len(legal) - 1) / 2 * ones if dtype.startswith("uint") else None
    kind = "none" if middle is None else "zero"
    length = oracle.weight_of(dtype, codes, ones, middle, zero_kind=kind).exact.square().sum(1).mean().sqrt()
    return oracle.weight_of(dtype, codes, ones / length, middle, zero_kind=kind)


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m, n", [(1, 1024), (8, 2048), (13, 768), (24, 512), (150, 768), (300, 512)])
def test_one_buffer_is_x_and_y_in_turn_through_a_chain(act, m, n):
    layers = [square(t, n, i) for i, t in enumerate(["int1", "uint4", "uint2", "float6_e3m2", "uint8", "uint3"] * 3)]
    turns, starts = Turns(TURNS), oracle.normal(TURNS, m, n, dtype=act)
    buffers = [torch.empty_like(starts[0]) for _ in range(2)]

    def chain(product):
        for i, layer in enumerate(layers):
            product(lambda i=i, layer=layer: lowbit.matmul(buffers[i % 2], layer.pw, out=buffers[1 - i % 2]))

    ends = []
    for start in starts:
        buffers[0].copy_(start)
        chain(calm)
        ends.append(buffers[len(layers) % 2].clone())
    ends = torch.stack(ends)
    assert ends.isfinite().all() and 0.01 < ends.float().std() < 100

    def work():
        turns.write(buffers[0], starts, EARLY)
        chain(lambda product: product())
        turns.compare(buffers[len(layers) % 2], ends, EARLY)
        turns.advance(1, HALF)

    graph = captured(work)
    for _ in range(50):
        graph.replay()
    assert turns.verdict() == (0, 51)


@pytest.mark.parametrize("m", [4, 12, 100])
def test_outputs_that_the_allocator_hands_out_again(m):
    """Each y, and sums of parts, take the memory of an older one, which kernels in between may still be reading."""
    layers = [square("uint4", 1024, i) for i in range(6)]
    turns, starts = Turns(TURNS), oracle.normal(TURNS, m, 1024, dtype=torch.float16)
    x = torch.empty_like(starts[0])

    def chain(x):
        for layer in layers * 2:
            x = lowbit.matmul(x, layer.pw)
        return x

    ends = torch.stack([calm(lambda start=start: chain(start)) for start in starts])

    def work():
        for offset in range(3):
            turns.write(x, starts, EARLY, offset)
            turns.compare(chain(x), ends, EARLY, offset)
        turns.advance(3, HALF)

    graph = captured(work)
    for _ in range(50):
        graph.replay()
    turns.pause()
    for _ in range(10):
        work()
    assert turns.verdict() == (0, 3 * 61)
