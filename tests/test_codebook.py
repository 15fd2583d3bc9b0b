"""Risk: a weight with a codebook is multiplied as if it had none, or loses it on the way to a file, a layer, a copy."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import lowbit
from lowbit import SchemeError, reference
from lowbit.ops import codebook
from lowbit.tensor import QuantTensor


def example(n=40, k=96, perm=False, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    book = torch.randn(16, generator=generator)
    codes = torch.randint(16, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, 3, generator=generator) + 0.5).to(dtype)
    order = torch.randperm(k, generator=generator).int() if perm else None
    return QuantTensor.from_codes(codes, scales, dtype="uint4", group_size=32, codebook=book, perm=order)


X = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(codebook, "_warned", True)


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float16, 5e-4), (torch.bfloat16, 4e-3)])
def test_products_use_the_codebook(perm, dtype, bound):
    qt, bias = example(perm=perm), torch.randn(40)
    x = X.to(dtype)
    expected = reference.matmul(x, qt, bias)
    pw, layer = lowbit.pack_weight(qt), lowbit.Linear.from_quant_tensor(qt, bias, dtype=dtype)
    out = torch.empty(2, 3, 40, dtype=dtype)
    for y in (lowbit.matmul(x, pw, bias), lowbit.matmul(x, pw, bias, out=out), layer(x)):
        assert y.dtype == dtype and y.shape == expected.shape
        assert (y.double() - expected).norm() < bound * expected.norm()
    plain = QuantTensor(
        qt.codes, qt.scales, dtype="uint4", shape=qt.shape, group_size=32, zero_kind="none", perm=qt.perm
    )
    assert (reference.matmul(x, plain, bias) - expected).norm() > expected.norm()


def test_gradients_reach_x_and_bias():
    qt, bias, x = example(), torch.zeros(40, requires_grad=True), X.clone().requires_grad_()
    lowbit.matmul(x, lowbit.pack_weight(qt), bias).sum().backward()
    torch.testing.assert_close(x.grad, qt.dequantize(torch.float32).sum(0).expand(2, 3, 96))
    assert bias.grad.tolist() == [6] * 40
    with pytest.raises(SchemeError, match="out= goes without gradients"):
        lowbit.matmul(x, lowbit.pack_weight(qt), out=torch.empty(2, 3, 40))


def test_layers_keep_it_through_files_copies_and_state():
    qt = example(perm=True)
    layer = lowbit.Linear.from_quant_tensor(qt)
    assert layer.layout is None and lowbit.prepare(nn.Sequential(layer))[0].layout is None
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(torch.bfloat16)):
        assert made.quant_tensor() == qt
    empty = lowbit.Linear(96, 40, bias=False, scheme=qt.scheme, perm=True, codebook=True)
    assert str(empty.load_state_dict(layer.state_dict())) == "<All keys matched successfully>"
    assert empty.quant_tensor() == qt
    assert not layer.codebook.requires_grad and layer.codebook.dtype == torch.float32


def test_what_needs_a_kernel_is_refused():
    with pytest.raises(SchemeError, match="act must be None for a weight with a codebook, got 'int8'"):
        lowbit.matmul(X, lowbit.pack_weight(example()), act="int8")
    with pytest.raises(SchemeError, match="act must be None for a weight with a codebook"):
        lowbit.Linear.from_quant_tensor(example(), act="int8")


def test_it_says_once_that_it_is_slow(monkeypatch):
    monkeypatch.setattr(codebook, "_warned", False)
    pw = lowbit.pack_weight(example())
    with pytest.warns(UserWarning, match="no kernel reads codebooks"):
        lowbit.matmul(X, pw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.matmul(X, pw)


def test_compiled_graphs_take_it_whole():
    layer = lowbit.Linear.from_quant_tensor(example())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), layer(X))
