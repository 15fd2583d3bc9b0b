"""Risk: a gradient is missing, silently zero, or not that of the dequantized weight."""

import pytest
import torch

import lowbit
from lowbit import reference
from lowbit.ops import gradient

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def quantized(kind="int4", n=40, k=96, perm=None):
    torch.manual_seed(0)
    qt = lowbit.quantize(torch.randn(n, k) / 8, kind, group_size=32, method="rtn")
    if perm is not None:
        options = {"dtype": kind, "shape": (n, k), "group_size": 32, "perm": perm}
        qt = lowbit.QuantTensor(qt.codes, qt.scales, qt.zeros, **options)
    return qt, lowbit.pack_weight(qt)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def close(got, expected, dtype):
    return (got.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("act", [None, "int8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["int4", "uint3", "float6_e3m2"])
def test_gradients_are_those_of_the_dequantized_weight(kind, dtype, act):
    qt, pw = quantized(kind)
    w = reference.dequantize(qt)
    x, bias, dy = leaf(2, 5, 96, dtype=dtype), leaf(40), torch.randn(2, 5, 40).to(dtype)
    lowbit.matmul(x, pw, bias, act=act).backward(dy)
    assert x.grad.dtype == dtype and close(x.grad, dy.double() @ w, dtype)
    assert bias.grad.dtype == torch.float32 and close(bias.grad, dy.double().sum((0, 1)), dtype)


def test_value_with_gradients_is_the_value_without():
    _, pw = quantized()
    x, bias = leaf(7, 96), leaf(40)
    with torch.no_grad():
        expected = lowbit.matmul(x, pw, bias)
    y = lowbit.matmul(x, pw, bias)
    assert y.requires_grad and torch.equal(y, expected) and not expected.requires_grad
    assert not lowbit.matmul(x.detach(), pw, bias.detach()).requires_grad
    with torch.inference_mode():
        assert torch.equal(lowbit.matmul(x, pw, bias), expected)


def test_only_what_asks_gets_a_gradient():
    _, pw = quantized()
    x, bias = leaf(3, 96), leaf(40)
    lowbit.matmul(x.detach(), pw, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((40,), 3.0)) and x.grad is None
    lowbit.matmul(x, pw, bias.detach()).sum().backward()
    assert x.grad is not None and torch.equal(bias.grad, torch.full((40,), 3.0))


@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 0, 96), (1, 96)])
def test_gradients_of_odd_batches(shape):
    qt, pw = quantized()
    x, bias = leaf(*shape), leaf(40)
    lowbit.matmul(x, pw, bias).sum().backward()
    assert x.grad.shape == shape and bias.grad.shape == (40,)
    expected = reference.dequantize(qt).sum(0).expand(shape)
    assert close(x.grad, expected, torch.float32)


def test_gradient_passes_gathers_and_strides():
    perm = torch.randperm(96).int()
    qt, pw = quantized(perm=perm)
    x = leaf(96, 6)
    (lowbit.matmul(x.T, pw) * torch.arange(40.0)).sum().backward()
    expected = (torch.arange(40.0).double().expand(6, 40) @ reference.dequantize(qt)).T
    assert close(x.grad, expected, torch.float32)


def test_gradient_takes_the_weight_in_pieces(monkeypatch):
    # 3 row blocks of 16 at two blocks a piece: a short last piece, and a ragged last block.
    qt, pw = quantized()
    monkeypatch.setattr(gradient, "_SCRATCH_BYTES", 2 * 16 * 96 * 4)
    pieces = [(first, len(rows)) for first, rows in gradient.float_rows(pw.codes, pw.scales, pw.zeros, *pw.numbers)]
    assert pieces == [(0, 32), (32, 8)]
    x, dy = leaf(5, 96), torch.randn(5, 40)
    lowbit.matmul(x, pw).backward(dy)
    assert close(x.grad, dy.double() @ reference.dequantize(qt), torch.float32)


@pytest.mark.parametrize("kind", ["int4", "uint3", "float6_e3m2"])
def test_a_gpu_without_kernels_multiplies_with_torch(monkeypatch, kind):
    """The layout of a GPU on the host, and no kernels: what CUDA tensors meet where lowbit's library does not run."""
    monkeypatch.setattr(gradient, "has_kernels", lambda device: False)
    monkeypatch.setattr(gradient, "_SCRATCH_BYTES", 2 * 16 * 96 * 4)
    qt, _ = quantized(kind)
    pw, w = lowbit.pack_weight(qt, layout="nvidia"), reference.dequantize(qt)
    x, bias, dy = torch.randn(2, 5, 96), torch.randn(40).half(), torch.randn(2, 5, 40)
    weight = (pw.codes, pw.scales, pw.zeros)
    y = gradient._matmul_grad(x, *weight, bias, *pw.numbers, 0)
    assert y.dtype == torch.float32 and close(y, x.double() @ w.T + bias.double(), torch.float32)
    assert close(gradient._matmul_grad(x[0, 0], *weight, None, *pw.numbers, 0), x[0, 0].double() @ w.T, torch.float32)
    assert close(gradient._matmul_grad_x(dy, *weight, *pw.numbers), dy.double() @ w, torch.float32)


def test_second_derivatives():
    qt, pw = quantized()
    x, w = leaf(3, 96), reference.dequantize(qt).float()
    found, expected = [], []
    for product, results in ((lambda t: lowbit.matmul(t, pw), found), (lambda t: t @ w.T, expected)):
        (first,) = torch.autograd.grad(product(x).pow(3).sum(), x, create_graph=True)
        results += [first, *torch.autograd.grad(first.square().sum(), x)]
    for own, other in zip(found, expected, strict=True):
        # Why relative to the largest: small values are what large terms leave of each other.
        assert (own - other).abs().max() <= 1e-5 * other.abs().max()


def test_gradient_through_autocast():
    qt, pw = quantized()
    x = leaf(3, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = lowbit.matmul(x, pw)
    dy = torch.randn(3, 40).bfloat16()
    y.backward(dy)
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert close(x.grad, dy.double() @ reference.dequantize(qt), torch.bfloat16)


def test_low_rank_adapter_trains_on_a_packed_layer():
    torch.manual_seed(0)
    layer = lowbit.Linear.from_linear(torch.nn.Linear(96, 40), "int4", group_size=32).requires_grad_(False)
    down, up = torch.nn.Linear(96, 4, bias=False), torch.nn.Linear(4, 96, bias=False)
    held = layer.qweight.clone(), layer.scales.clone()
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters()], lr=0.01)
    x, target, losses = torch.randn(32, 96), torch.randn(32, 40), []
    for _ in range(30):
        loss = (layer(x + up(down(x))) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(layer.qweight, held[0]) and torch.equal(layer.scales, held[1])
