"""Risk: compiled or exported code computes something else, recompiles for each batch, or cannot be made at all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lowbit


def linear(n=40, k=96, bias=True):
    torch.manual_seed(0)
    return lowbit.Linear.from_linear(torch.nn.Linear(k, n, bias=bias), "int4", group_size=32).requires_grad_(False)


def model():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.GELU(), torch.nn.Linear(64, 96, bias=False))
    return lowbit.quantize_model(layers, "uint3", group_size=32, method="rtn").requires_grad_(False)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packed(kind="int4", zero_kind=None):
    torch.manual_seed(0)
    qt = lowbit.quantize(torch.randn(40, 96), kind, group_size=32, method="rtn", zero_kind=zero_kind)
    return lowbit.pack_weight(qt)


def arguments(pw, x, bias=None, act=0):
    return (x, pw.codes, pw.scales, pw.zeros, bias, *pw.numbers, act)


@pytest.mark.parametrize("act", range(4))
def test_opcheck_of_every_op(act):
    dtype = (torch.float32, torch.float16, torch.bfloat16, torch.float32)[act]
    x, bias = torch.randn(3, 96).to(dtype), torch.randn(40).to(dtype)
    for pw in (packed(), packed("uint4"), packed("uint4", "min")):
        given = arguments(pw, x, bias, act)
        torch.library.opcheck(torch.ops.lowbit.matmul_out, (*given, torch.zeros(3, 40, dtype=dtype)))
        trained = (x.clone().requires_grad_(), *given[1:4], bias.clone().requires_grad_(), *given[5:])
        torch.library.opcheck(torch.ops.lowbit.matmul_grad, trained)
        dy = torch.randn(2, 2, 40).to(dtype).requires_grad_()
        torch.library.opcheck(torch.ops.lowbit.matmul_grad_x, (dy, *given[1:4], *given[5:-1]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_serves_every_batch_size(backend):
    pw, bias, counter = packed(), torch.randn(40), CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x: lowbit.matmul(x, pw, bias), fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 5, 7, 40, 129):
        x = torch.randn(m, 4, 96)
        assert torch.equal(compiled(x), lowbit.matmul(x, pw, bias))
    assert counter.frame_count == 1


def test_sizes_of_the_weight_are_not_taken_for_batch_sizes():
    # 3 row blocks, 3 groups, 3 chunks: a batch of 3 must not tie the graph to itself.
    pw, counter = packed(), CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: lowbit.matmul(x, pw), fullgraph=True, dynamic=True, backend=counter)
    for m in (3, 5, 16):
        assert compiled(torch.randn(m, 96)).shape == (m, 40)
    assert counter.frame_count == 1


@pytest.mark.parametrize("act", [None, "int8"])
def test_module_compiles_into_one_graph(act):
    layer, counter = linear(), CompileCounterWithBackend("aot_eager")
    layer.act = act
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for m in (3, 4, 6, 33):
        x = torch.randn(m, 96)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_out_is_written_by_compiled_code():
    pw, x = packed(), torch.randn(3, 96)
    compiled = torch.compile(lambda x, out: lowbit.matmul(x, pw, out=out), fullgraph=True, backend="aot_eager")
    for out in (torch.zeros(3, 40), torch.zeros(40, 3).T, torch.zeros(3, 50)[:, 4:44]):
        compiled(x, out)
        assert torch.equal(out, lowbit.matmul(x, pw))


def test_first_use_of_matmul_may_be_inside_compiled_code():
    pw = packed()
    saved = vars(lowbit).pop("matmul", None)
    try:
        y = torch.compile(lambda x: lowbit.matmul(x, pw), backend="eager")(torch.ones(2, 96))
        assert torch.equal(y, lowbit.matmul(torch.ones(2, 96), pw))
    finally:
        if saved is not None:
            lowbit.matmul = saved


def test_inductor_gives_the_eager_result():
    net, x = model(), torch.randn(5, 96)
    compiled = torch.compile(net, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
    # A tensor that the graph made before the product, not dense in its last dimension.
    pw = packed()
    turned = torch.compile(lambda x: lowbit.matmul((x * 2).T, pw), fullgraph=True, dynamic=True)
    x = torch.randn(96, 7)
    torch.testing.assert_close(turned(x), lowbit.matmul((x * 2).T, pw))


@pytest.mark.parametrize("scale_type", [torch.float8_e8m0fnu, torch.float8_e4m3fn], ids=str)
def test_inductor_takes_scales_of_8_bits(scale_type):
    torch.manual_seed(0)
    qt = lowbit.quantize(torch.randn(40, 96), "float4_e2m1", group_size=32, scale_dtype=scale_type)
    layer, pw, x = lowbit.Linear.from_quant_tensor(qt, torch.randn(40)), lowbit.pack_weight(qt), torch.randn(5, 96)
    compiled = torch.compile(torch.nn.Sequential(layer, torch.nn.GELU()), fullgraph=True, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), torch.nn.functional.gelu(layer(x)))
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(found).sum().backward()
    torch.nn.functional.gelu(layer(expected)).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    out = torch.empty(5, 40)
    torch.compile(lambda x, out: lowbit.matmul(x, pw, out=out), fullgraph=True)(x, out)
    assert torch.equal(out, lowbit.matmul(x, pw))
    layer.unprepare()
    torch.testing.assert_close(torch.compile(layer, dynamic=True)(x), layer(x), rtol=1e-4, atol=1e-4)


def test_gradients_of_compiled_code():
    pw, bias = packed(), torch.randn(40, requires_grad=True)
    x = torch.randn(3, 96, requires_grad=True)
    lowbit.matmul(x, pw, bias).square().sum().backward()
    expected = x.grad.clone(), bias.grad.clone()
    x.grad = bias.grad = None
    compiled = torch.compile(lambda x, b: lowbit.matmul(x, pw, b).square().sum(), fullgraph=True, backend="aot_eager")
    compiled(x, bias).backward()
    torch.testing.assert_close((x.grad, bias.grad), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_free_batch_size(strict):
    net, x = model(), torch.randn(3, 96)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
    for m in (2, 3, 50):
        x = torch.randn(m, 96)
        torch.testing.assert_close(program.module()(x), net(x))
    decomposed = program.run_decompositions()
    torch.testing.assert_close(decomposed.module()(x), net(x))


def test_exported_program_runs_in_another_process(tmp_path):
    net, x = model(), torch.randn(3, 96)
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "net.pt2")
    torch.save((x, net(x)), tmp_path / "x.pt")
    code = (
        "import torch; from lowbit import extension; extension.load(); x, y = torch.load('x.pt');"
        "torch.testing.assert_close(torch.export.load('net.pt2').module()(x), y)"
    )
    root = Path(lowbit.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}, check=True)


def test_autocast_inside_compiled_code():
    pw, x = packed(), torch.randn(3, 96)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return lowbit.matmul(x, pw)

    y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, run(x))


def test_weight_type_may_be_read_inside_compiled_code():
    layer = linear()

    def like_t5(x):
        return layer(x.to(layer.weight.dtype) if x.dtype != layer.weight.dtype else x)

    y = torch.compile(like_t5, fullgraph=True, backend="eager")(torch.ones(2, 96).half())
    assert y.dtype == torch.float32


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="AOTInductor needs a C++ compiler")
def test_a_package_of_aot_inductor_runs_with_any_batch_size(tmp_path):
    net = model()
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(net, (torch.randn(3, 96),), dynamic_shapes=shapes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for m in (2, 3, 50):
        x = torch.randn(m, 96)
        torch.testing.assert_close(package(x), net(x), rtol=1e-4, atol=1e-4)
