"""Risk: code for a GPU cannot be traced, or tracing accepts what the GPU refuses. Runs without one, on fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowbit
import lowbit.ops.launch
from lowbit import extension
from lowbit.dtypes import WEIGHT_TYPES
from lowbit.pack.layout import codes_shape

extension.load()
N, K = 40, 96
GIVEN = {"n": N, "k": K, "weight": 3, "group_size": 32, "zero_kind": 1}


def held(layout="nvidia", bits=4, **changes):
    """Tensors of a packed weight on a GPU that need not exist."""
    blocks = 4 if layout == "nvidia" else 3
    shapes = {"codes": codes_shape(layout, N, K, bits), "scales": (blocks, 3, 16), "zeros": (blocks, 3, 16)} | changes
    types = {"codes": torch.uint8}
    return [torch.empty(shape, dtype=types.get(name, torch.float16), device="cuda") for name, shape in shapes.items()]


@pytest.fixture(autouse=True)
def fake():
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)
def test_every_weight_type_is_traced_in_its_layout(wtype):
    numbers = (N, K, WEIGHT_TYPES.index(wtype), 32, 1)
    weight = held(bits=wtype.bits)
    for dtype, act in ((torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 2)):
        x = torch.empty(2, 5, K, dtype=dtype, device="cuda")
        y = torch.ops.lowbit.matmul_grad(x, *weight, None, *numbers, act)
        assert (y.shape, y.dtype, y.device) == ((2, 5, N), dtype, x.device)
        assert torch.ops.lowbit.matmul_grad_x(y, *weight, *numbers).shape == x.shape
        torch.ops.lowbit.matmul_out(x, *weight, None, *numbers, act, torch.empty_like(y))
        torch.ops.lowbit.dequantize_out(*weight, *numbers, 7, torch.empty(33, K, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks_are_traced_and_judged(bits):
    numbers, weight = (N, K, 7 + bits, 32, 1), held(bits=bits)
    x, book = torch.empty(2, 5, K, dtype=torch.float16, device="cuda"), torch.empty(2**bits, device="cuda")
    y = torch.ops.lowbit.matmul_grad(x, *weight, None, *numbers, 1, book)
    assert torch.ops.lowbit.matmul_grad_x(y, *weight, *numbers, book).shape == x.shape
    torch.ops.lowbit.matmul_out(x, *weight, None, *numbers, 1, torch.empty_like(y), book)
    torch.ops.lowbit.dequantize_out(*weight, *numbers, 7, torch.empty(33, K, device="cuda"), book)
    for size, dtype, error in ((2**bits, torch.half, lowbit.DtypeError), (3, torch.float, lowbit.ShapeError)):
        wrong = torch.empty(size, dtype=dtype, device="cuda")
        with pytest.raises(error, match="codebook must"):
            torch.ops.lowbit.matmul_grad(x, *weight, None, *numbers, 1, wrong)
    with pytest.raises(lowbit.SchemeError, match="a codebook goes with"):
        torch.ops.lowbit.matmul_grad(x, *weight, None, N, K, bits - 1, 32, 1, 1, book)


def test_what_the_gpu_refuses_is_refused():
    numbers, x = tuple(GIVEN.values()), torch.empty(5, K, dtype=torch.float16, device="cuda")
    out = torch.empty(5, N, dtype=torch.float16, device="cuda")
    for weight, act, error in (
        (held("cpu"), 1, lowbit.ShapeError),
        (held(scales=(3, 3, 16)), 1, lowbit.ShapeError),
        (held(), 3, lowbit.SchemeError),  # int8 activations
    ):
        with pytest.raises(error):
            torch.ops.lowbit.matmul_out(x, *weight, None, *numbers, act, out)
    for first, rows in ((8, 33), (-1, 4)):
        with pytest.raises(lowbit.ShapeError, match="rows of 96 inside the 40"):
            torch.ops.lowbit.dequantize_out(*held(), *numbers, first, torch.empty(rows, K, device="cuda"))


def test_int8_activations_are_refused_by_name():
    x = torch.empty(5, K, dtype=torch.float16, device="cuda")
    with pytest.raises(lowbit.SchemeError, match="act='int8' has no CUDA kernels yet"):
        lowbit.ops.launch.product(x, *held(), None, None, None, None, tuple(GIVEN.values()), "int8")
