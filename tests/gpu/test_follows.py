"""Risk: a product takes the kernel before it for one of lowbit's, or for another one, and asks for weights when they
stand in the way; or what comes before changes its bits."""

import pytest
import torch

import lowbit
from lowbit import extension
from lowbit.autotune import log

from . import oracle
from .kernels import needs_kernels
from .line import calm, captured

pytestmark = needs_kernels


@pytest.fixture
def follows():
    """Of every product that is launched: whether it is one behind a product, as far as is known."""
    found = []
    library, watcher = extension.cuda(), log._WATCHER(lambda pointer: found.append(pointer.contents.follows))
    library.lowbit_cuda_watch(watcher)
    yield found
    library.lowbit_cuda_watch(None)


def make(dtype="int4", shape=(1024, 1024), m=2):
    weight = oracle.make(dtype, shape, zero_kind="zero" if dtype.startswith("uint") else "none")
    return weight, oracle.normal(m, shape[1], dtype=torch.float16)


def captured_part(follows):
    """Those of the second half: ``captured`` runs its work once before."""
    return follows[len(follows) // 2 :]


def test_a_product_behind_a_product_of_the_same_graph_follows(follows):
    weight, x = make()
    captured(lambda: [lowbit.matmul(x, weight.pw) for _ in range(3)])
    assert follows == [0, 0, 0, 0, 1, 1], "without a graph nobody knows"


def test_a_product_behind_another_kernel_does_not_follow(follows):
    weight, x = make()

    def work():
        y = lowbit.matmul(x, weight.pw)
        y = lowbit.matmul(y.add(1), weight.pw)
        y = lowbit.matmul(y, weight.pw)
        lowbit.matmul(y.float(), weight.pw)  # which torch multiplies
        lowbit.matmul(y, weight.pw)

    captured(work)
    assert captured_part(follows) == [0, 0, 1, 0, 0]


def test_a_product_behind_a_copy_of_its_x_does_not_follow(follows):
    weight, _ = make()
    x = oracle.normal(2, 1025, dtype=torch.float16)[:, 1:]  # at no multiple of 16 bytes
    captured(lambda: [lowbit.matmul(x, weight.pw) for _ in range(2)])
    assert captured_part(follows) == [0, 0]


def test_the_first_product_of_a_graph_does_not_follow_the_last_one_of_another(follows):
    weight, x = make()
    for _ in range(3):
        captured(lambda: lowbit.matmul(x, weight.pw))
    assert not any(follows)


def test_a_product_behind_two_streams_does_not_follow(follows):
    weight, x = make()
    other = torch.cuda.Stream()

    def work():
        lowbit.matmul(x, weight.pw)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            x.add(1)
        lowbit.matmul(x, weight.pw)
        torch.cuda.current_stream().wait_stream(other)
        lowbit.matmul(x, weight.pw)

    captured(work)
    assert captured_part(follows) == [0, 1, 0]


@pytest.mark.parametrize("dtype", ["int1", "int4", "int6", "uint8", "float4_e2m1"])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 32])
def test_bits_are_the_same_whatever_comes_before(dtype, m):
    """By shapes that the plan gives halves of a multiprocessor, two each and whole ones."""
    for shape in ((2048, 1024), (4096, 2048), (8192, 4096), (4096, 8192)):
        weight, x = make(dtype, shape, m)
        alone = calm(lambda: lowbit.matmul(x, weight.pw))  # noqa: B023
        ys = torch.zeros(3, m, shape[0], dtype=x.dtype, device=x.device)

        def work():
            for y in ys:  # noqa: B023
                lowbit.matmul(x, weight.pw, out=y)  # noqa: B023

        graph = captured(work)
        ys.fill_(float("nan"))
        graph.replay()
        assert all(oracle.same_bits(y, alone) for y in ys), shape
