"""Risk: a weight with a codebook is multiplied as if it had none, or loses it on the way to a file, a layer, a copy."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import lowbit
from lowbit import DeviceError, DtypeError, SchemeError, ShapeError, extension, kernel_list, reference
from lowbit.scheme import GROUP_SIZES, ZERO_KINDS
from lowbit.tensor import QuantTensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BITS = range(1, 9)


def table(bits, generator, dtype=torch.float32):
    """Values from 1e-3 to 1e3 of either sign, in no order; the first ones are the ends, and 0 where there is room."""
    sizes = 10 ** (6 * torch.rand(2**bits, generator=generator) - 3)
    book = sizes * (torch.randint(2, (2**bits,), generator=generator) * 2 - 1)
    ends = torch.tensor([-1e3, 1e-3, 0.0, 1e3, -1e-3])[: 2**bits]
    book[: len(ends)] = ends
    return book[torch.randperm(2**bits, generator=generator)].to(dtype)


def example(n=40, k=96, bits=4, group=32, kind="none", scales=torch.float16, book=torch.float32, perm=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (n, k), generator=generator, dtype=torch.uint8)
    groups = 1 if group == -1 else -(-k // group)
    factor = ((torch.rand(n, groups, generator=generator) + 0.5) / 32).to(scales)
    zeros = None if kind == "none" else (4 * torch.randn(n, groups, generator=generator)).to(scales)
    order = torch.randperm(k, generator=generator).int() if perm else None
    options = {"dtype": f"uint{bits}", "group_size": group, "zero_kind": kind, "perm": order}
    return QuantTensor.from_codes(codes, factor, zeros, codebook=table(bits, generator, book), **options)


X = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(1))


def assert_product(y, x, qt, bias=None):
    """Every value is the float64 product of the reference but for one rounding and the sums' share of |x| @ |W|.T; a
    weight counts with what it is the sum or difference of.
    """
    w = reference.dequantize(qt)
    size = w.abs()
    if qt.zeros is not None:
        zeros = qt.zeros.double() * (qt.scales.double() if qt.zero_kind == "zero" else 1)
        group = qt.shape[1] if qt.group_size == -1 else qt.group_size
        spread = 2 * zeros.abs().repeat_interleave(group, 1)[:, : qt.shape[1]]
        size += spread if qt.perm is None else torch.zeros_like(spread).index_copy_(1, qt.perm.long(), spread)
    exact = x.double() @ w.T + (0 if bias is None else bias.double())
    bound = torch.finfo(y.dtype).eps / 2 * exact.abs() + 2e-6 * (x.double().abs() @ size.T) + 1e-7
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all(), ((y.double() - exact).abs() / bound).max()


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ZERO_KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("isa", ["amx", "avx512", "avx2", "scalar"])
def test_every_kernel_agrees_with_the_reference(isa, bits, kind):
    if isa not in extension.isas():
        pytest.skip(f"this CPU lacks {isa}")
    with extension.force_isa(isa):
        for i, group in enumerate((*GROUP_SIZES, -1)):
            qt = example(37, 301, bits, group, kind, FLOATS[i % 3], seed=group + bits)
            pw, bias = lowbit.pack_weight(qt), torch.randn(37, generator=torch.Generator().manual_seed(3))
            for dtype in FLOATS:
                assert kernel_list.kernel_name(f"codebook{bits}", str(dtype)[6:]).endswith(f"_cpu_{isa}")
                for m in (1, 2, 19):
                    x = torch.randn(m, 301, generator=torch.Generator().manual_seed(m)).to(dtype)
                    assert_product(lowbit.matmul(x, pw, bias), x, qt, bias)
                    assert_product(lowbit.matmul(x.abs(), pw), x.abs(), qt)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (17, 31), (33, 33), (64, 2081)])
def test_ragged_shapes(shape):
    for bits in (3, 4, 5, 6):
        qt = example(*shape, bits, 16, "min", seed=bits)
        for m in (0, 1, 13):
            x = torch.randn(m, shape[1], generator=torch.Generator().manual_seed(m))
            assert_product(lowbit.matmul(x, lowbit.pack_weight(qt)), x, qt)


def test_each_code_has_its_own_value():
    """One entry of the table moves only the weights that name it."""
    for bits in BITS:
        codes = torch.arange(2**bits, dtype=torch.uint8).repeat(16, -(-64 // 2**bits))
        k = codes.shape[1]
        for isa in extension.isas():
            with extension.force_isa(isa):
                for m in (1, 3):
                    made = {"dtype": f"uint{bits}", "group_size": -1, "codebook": torch.arange(2.0**bits).flip(0) + 1}
                    pw = lowbit.pack_weight(QuantTensor.from_codes(codes, torch.ones(16, 1), **made))
                    x = torch.eye(k)[:m] if m == 1 else torch.eye(k)
                    assert torch.equal(lowbit.matmul(x, pw), pw.dequantize().T[: len(x)])


@pytest.mark.parametrize("book", FLOATS, ids=str)
@pytest.mark.parametrize("perm", [False, True])
def test_perm_and_the_type_of_the_table(perm, book):
    qt, bias = example(perm=perm, book=book), torch.randn(40)
    pw, layer = lowbit.pack_weight(qt), lowbit.Linear.from_quant_tensor(qt, bias, dtype=torch.float32)
    assert pw.codebook.dtype == torch.float32 and pw.unpack() == qt and pw.unpack().codebook.dtype == book
    assert copy.deepcopy(pw).unpack() == qt and lowbit.pack_weight(qt, layout="nvidia").unpack() == qt
    for x in (X, X[:1, :1], X.half()):
        out = torch.empty(*x.shape[:-1], 40, dtype=x.dtype)
        for y in (lowbit.matmul(x, pw, bias), lowbit.matmul(x, pw, bias, out=out), layer(x)):
            assert_product(y, x, qt, bias)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("perm", [False, True])
def test_gradients_reach_x_and_bias(perm):
    qt, bias, x = example(perm=perm), torch.zeros(40, requires_grad=True), X.clone().requires_grad_()
    dy = torch.randn(2, 3, 40)
    layer = lowbit.Linear.from_quant_tensor(qt, nn.Parameter(bias.detach()))
    (found,) = torch.autograd.grad(layer(x), x, dy)
    y = lowbit.matmul(x, lowbit.pack_weight(qt), bias)
    (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
    exact = dy.detach().double() @ reference.dequantize(qt)
    assert (dx - exact).norm() < 1e-6 * exact.norm() and torch.equal(found, dx)
    (ddy,) = torch.autograd.grad(dx.sum(), dy)
    ones = torch.ones(2, 3, 96)
    assert_product(ddy, ones, qt)
    lowbit.matmul(x, lowbit.pack_weight(qt), bias).sum().backward()
    assert bias.grad.tolist() == [6] * 40
    with pytest.raises(SchemeError, match="out= goes without gradients"):
        lowbit.matmul(x, lowbit.pack_weight(qt), out=torch.empty(2, 3, 40))


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("book", FLOATS, ids=str)
def test_layers_keep_it_through_files_copies_and_state(book):
    qt = example(perm=True, book=book)
    layer = lowbit.Linear.from_quant_tensor(qt)
    assert layer.layout == "cpu" and layer.codebook.dtype == torch.float32 and not layer.codebook.requires_grad
    y = layer(X.half())
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(torch.bfloat16)):
        assert made.layout == "cpu" and made.quant_tensor() == qt
        assert torch.equal(made(X.half()), y)
    assert layer.state_dict()["codebook"].dtype == book
    assert layer.unprepare().codebook.dtype == book and layer.quant_tensor() == qt
    assert lowbit.prepare(nn.Sequential(layer))[0].layout == "cpu" and torch.equal(layer(X.half()), y)


def test_a_new_layer_loads_it():
    qt = example(perm=True)
    empty = lowbit.Linear(96, 40, bias=False, scheme=qt.scheme, perm=True, codebook=True)
    for layer in (empty, lowbit.prepare(copy.deepcopy(empty))):
        state = lowbit.Linear.from_quant_tensor(qt).state_dict()
        assert str(layer.load_state_dict(state)) == "<All keys matched successfully>"
        assert layer.quant_tensor() == qt
        assert_product(layer.prepare()(X), X, qt)


def test_compiled_graphs_take_it_whole():
    layer = lowbit.Linear.from_quant_tensor(example(), torch.randn(40)).float()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for x in (X, X[:1], X.clone().requires_grad_()):
        torch.testing.assert_close(compiled(x), layer(x))
    found, expected = (torch.autograd.grad(y.sum(), x) for y in (compiled(x), layer(x)))
    assert torch.equal(*found, *expected)
    torch._dynamo.reset()


def test_nothing_warns_that_it_is_slow():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.matmul(X, lowbit.pack_weight(example()))
        lowbit.Linear.from_quant_tensor(example())(X)


def test_info_and_selftest_name_its_kernels():
    facts = lowbit.info(lowbit.pack_weight(example()))
    assert facts["kernel for x float16"] == kernel_list.kernel_name("codebook4", "float16")
    assert facts["kernel for act='int8'"] == "none in this build"
    usable = [
        row for row in kernel_list.kernel_rows() if row.startswith("wc4") and row.split("_")[-1] in extension.isas()
    ]
    assert lowbit.selftest("wc4*_cpu_*").passed == len(usable) == 3 * len(extension.isas())


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_int8_activations_are_refused():
    with pytest.raises(SchemeError, match="act must be None for a weight with a codebook, got 'int8'"):
        lowbit.matmul(X, lowbit.pack_weight(example()), act="int8")
    with pytest.raises(SchemeError, match="act must be None for a weight with a codebook"):
        lowbit.Linear.from_quant_tensor(example(), act="int8")


PW = lowbit.pack_weight(example())
REFUSED = {
    "another type": ({"codebook": PW.codebook.half()}, DtypeError, "codebook must be float32"),
    "too short": ({"codebook": PW.codebook[:8]}, ShapeError, "codebook must have shape"),
    "strided": ({"codebook": torch.ones(32)[::2]}, None, "codebook must be contiguous"),
    "of int4": ({"weight": 3}, SchemeError, "a codebook goes with"),
    "of a float": ({"weight": 17}, SchemeError, "a codebook goes with"),
    "int8 activations": ({"act": 3}, SchemeError, "no kernel for weight type 11 and a codebook with activation type 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_op_and_fake_refuse_the_same(case):
    change, error, words = REFUSED[case]
    x = torch.ones(3, 96)
    given = {"n": 40, "k": 96, "weight": 11, "group_size": 32, "zero_kind": 0, "act": 0, "codebook": PW.codebook}
    given |= {"x": x, "codes": PW.codes, "scales": PW.scales, "zeros": None, "bias": None, "out": torch.zeros(3, 40)}
    torch.ops.lowbit.matmul_out(**given)
    assert torch.equal(given["out"], lowbit.matmul(x, PW))
    with pytest.raises(RuntimeError, match=words):
        torch.ops.lowbit.matmul_out(**given | change)
    if error is not None:
        on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in (given | change).items()}
        with pytest.raises(error):
            torch.ops.lowbit.matmul_out(**on_meta)


def test_a_table_elsewhere_is_refused():
    with pytest.raises(DeviceError, match="codebook must be on the device of codes"):
        torch.ops.lowbit.matmul_grad(
            X.to("meta"), PW.codes.to("meta"), PW.scales.to("meta"), None, None, *PW.numbers, 0, PW.codebook
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ZERO_KINDS)
def test_opcheck_of_every_op(kind, dtype):
    pw, act = lowbit.pack_weight(example(kind=kind)), FLOATS.index(dtype)
    weight, x, bias = (pw.codes, pw.scales, pw.zeros), torch.randn(3, 96).to(dtype), torch.randn(40).to(dtype)
    out = torch.zeros(3, 40, dtype=dtype)
    torch.library.opcheck(torch.ops.lowbit.matmul_out, (x, *weight, bias, *pw.numbers, act, out, pw.codebook))
    trained = (x.clone().requires_grad_(), *weight, bias.clone().requires_grad_(), *pw.numbers, act, pw.codebook)
    torch.library.opcheck(torch.ops.lowbit.matmul_grad, trained)
    dy = torch.randn(2, 2, 40).to(dtype).requires_grad_()
    torch.library.opcheck(torch.ops.lowbit.matmul_grad_x, (dy, *weight, *pw.numbers, pw.codebook))
