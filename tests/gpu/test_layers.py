"""Risk: a layer, a gradient, autocast or compiled code does on a GPU something else than on the host."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lowbit
from lowbit.ops import gradient

from . import oracle
from .kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("quiet_and_fresh")]

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}


def close(got, expected, dtype):
    return (got.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def layer(kind="int4", device="cuda", dtype=torch.float16, prepare=True):
    torch.manual_seed(0)
    made = nn.Linear(256, 40).to(dtype).to(device)
    return lowbit.Linear.from_linear(made, kind, group_size=32, method="rtn", prepare=prepare)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name, kind", [("int4", "none"), ("uint3", "zero"), ("float6_e3m2", "none")])
def test_gradients_are_those_of_the_dequantized_weight(name, kind, dtype, monkeypatch):
    weight = oracle.make(name, (200, 520), 64, kind)
    for scratch in (64 << 20, 520 * 64 * 4):  # whole, and in pieces
        monkeypatch.setattr(gradient, "_SCRATCH_BYTES", scratch)
        for shape in ((2, 3), (70,), (0,)):
            x = oracle.normal(*shape, 520, dtype=dtype).requires_grad_()
            bias = oracle.normal(200).requires_grad_()
            dy = oracle.normal(*shape, 200, dtype=dtype, seed=2)
            lowbit.matmul(x, weight.pw, bias).backward(dy)
            assert x.grad.dtype == dtype and close(x.grad, dy.double() @ weight.exact, dtype)
            assert close(bias.grad, dy.double().flatten(0, -2).sum(0), dtype)


def test_second_derivatives():
    weight = oracle.make("int4", (40, 96), 32, scale_type="float32")
    x, w = oracle.normal(3, 96).requires_grad_(), weight.exact.float()
    found, expected = [], []
    for product, results in ((lambda t: lowbit.matmul(t, weight.pw), found), (lambda t: t @ w.T, expected)):
        (first,) = torch.autograd.grad(product(x).pow(3).sum(), x, create_graph=True)
        results += [first, *torch.autograd.grad(first.square().sum(), x)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_autocast_casts_x():
    weight = oracle.make("int4", (40, 96), 32)
    x = oracle.normal(3, 96).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = lowbit.matmul(x, weight.pw)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert close(y, x.detach().double() @ weight.exact.T, torch.bfloat16)


def test_kernels_missing_means_torch_operations(monkeypatch):
    monkeypatch.setattr(gradient, "has_kernels", lambda device: False)
    weight = oracle.make("uint3", (40, 96), 32, "zero")
    monkeypatch.setattr(weight.pw, "native", False)
    x, out = oracle.normal(5, 96, dtype=torch.float16), torch.empty(5, 40, dtype=torch.float16, device="cuda")
    assert close(lowbit.matmul(x, weight.pw), x.double() @ weight.exact.T, torch.float16)
    assert lowbit.matmul(x, weight.pw, out=out) is out and close(out, x.double() @ weight.exact.T, torch.float16)
    x.requires_grad_()
    lowbit.matmul(x, weight.pw).sum().backward()
    assert close(x.grad, torch.ones(5, 40, device="cuda").double() @ weight.exact, torch.float16)


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["int4", "uint3", "float6_e3m2", "int1"])
def test_layer_moves_with_its_weight(kind, dtype):
    there = layer(kind, dtype=dtype)
    assert there.layout == "nvidia" and "layout='nvidia'" in repr(there)
    qt = there.quant_tensor().cpu()
    for m in (2, 12, 50, 300):
        x = oracle.normal(m, 256, dtype=dtype)
        w, bias = qt.dequantize(torch.float64).cuda(), there.bias.detach().double()
        assert close(there(x), x.double() @ w.T + bias, dtype)
    here = copy.deepcopy(there).cpu()
    assert here.layout == "cpu" and here.quant_tensor() == qt
    again = here.cuda()
    assert again.layout == "nvidia" and again.quant_tensor() == qt and torch.equal(again(x), there(x))


def test_layer_is_held_once_and_loads_again():
    made = layer()
    state = made.state_dict()
    assert torch.equal(state["qweight"], made.quant_tensor().codes) and state["qweight"].is_cuda
    x, file = oracle.normal(3, 256, dtype=torch.float16), io.BytesIO()
    expected = made(x)
    torch.save(made, file)
    file.seek(0)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(file, weights_only=False)):
        assert other.layout == "nvidia" and torch.equal(other(x), expected)
        for parameter in other.parameters():
            parameter.data.zero_()
        other.load_state_dict(state)
        assert other.layout == "nvidia" and torch.equal(other(x), expected)
    loaded = layer(device="cpu", prepare=False)
    loaded.load_state_dict({name: tensor.cpu() for name, tensor in state.items()})
    assert torch.equal(lowbit.prepare(loaded.cuda())(x), expected)
    packed = sum(p.numel() * p.element_size() for p in made.parameters())
    assert packed <= 1.05 * made.quant_tensor().nbytes + 64 * 256 + 40 * 2  # N is padded to 64


def test_layer_that_is_not_packed_is_right_too(monkeypatch):
    import lowbit.nn

    monkeypatch.setattr(lowbit.nn, "_warned", set())
    made, x = layer(prepare=False), oracle.normal(3, 256, dtype=torch.float16)
    with pytest.warns(UserWarning, match="call lowbit.prepare"):
        y = made(x)
    torch.testing.assert_close(made.prepare()(x), y, rtol=5e-3, atol=5e-3)


def test_weight_on_the_wrong_side_is_named():
    qt = layer().quant_tensor()
    x = oracle.normal(3, 256, dtype=torch.float16)
    with pytest.raises(lowbit.DeviceError, match="packed for a GPU, got layout 'cpu'"):
        lowbit.matmul(x, lowbit.pack_weight(qt, "cuda", layout="cpu"))
    with pytest.raises(lowbit.DeviceError, match="device of the weight"):
        lowbit.matmul(x.cpu(), lowbit.pack_weight(qt, "cuda"))


# ---- compiled code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck_of_every_op(dtype):
    for name, kind in (("int4", "none"), ("uint4", "min")):
        pw = oracle.make(name, (40, 96), 32, kind).pw
        held = (pw.codes, pw.scales, pw.zeros)
        act = FLOATS.index(dtype) + 1 if dtype != torch.float32 else 0
        for m in (3, 20, 300):
            x, bias = oracle.normal(m, 96, dtype=dtype), oracle.normal(40, dtype=dtype)
            out = torch.zeros(m, 40, dtype=dtype, device="cuda")
            torch.library.opcheck(torch.ops.lowbit.matmul_out, (x, *held, bias, *pw.numbers, act, out))
            trained = (x.clone().requires_grad_(), *held, bias.clone().requires_grad_(), *pw.numbers, act)
            torch.library.opcheck(torch.ops.lowbit.matmul_grad, trained)
            dy = oracle.normal(m, 40, dtype=dtype).requires_grad_()
            torch.library.opcheck(torch.ops.lowbit.matmul_grad_x, (dy, *held, *pw.numbers))
        rows = torch.zeros(9, 96, dtype=dtype, device="cuda")
        torch.library.opcheck(torch.ops.lowbit.dequantize_out, (*held, *pw.numbers, 5, rows))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_every_number_of_rows(backend):
    made, counter = layer(), CompileCounterWithBackend(backend)
    compiled = torch.compile(made.requires_grad_(False), fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 5, 16, 17, 129, 300):
        x = oracle.normal(m, 256, dtype=torch.float16, seed=m)
        torch.testing.assert_close(compiled(x), made(x), rtol=2e-3, atol=2e-3)
    assert counter.frame_count == 1


def test_reduce_overhead_captures_the_product():
    made = layer().requires_grad_(False)
    compiled = torch.compile(made, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = oracle.normal(4, 256, dtype=torch.float16, seed=seed)
        torch.testing.assert_close(compiled(x).clone(), made(x), rtol=2e-3, atol=2e-3)
