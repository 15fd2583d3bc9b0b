"""Risk: a layer gets a product that another one left, of an x that is no longer the same, or keeps it alive."""

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch

import lowbit
from lowbit import SchemeError
from lowbit.fusing import _close, _open

from .models import TOKENS, small
from .test_fused import Products, logits, pair

X = torch.randn(3, 72, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mlps(kind="llama"):
    """(MLP of separate layers, the same fused)."""
    return [model.model.layers[0].mlp.requires_grad_(False) for model in pair(kind)]


def scope(mlp):
    return mlp.fused.scope


def run(how, module, x):
    if how == "compiled":
        with torch.no_grad():
            return torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    with {"eager": torch.no_grad, "inference": torch.inference_mode, "gradients": torch.enable_grad}[how]():
        return module(x.clone())


def write(_module, args):
    args[0].mul_(2).add_(1)


def replace(_module, args):
    return (args[0] * 2 + 1,)


@pytest.mark.parametrize("how", ["eager", "inference", "compiled", "gradients"])
@pytest.mark.parametrize("hook", [write, replace])
def test_a_hook_that_changes_x_between_the_layers_is_seen(how, hook):
    results = []
    for mlp in mlps():
        mlp.up_proj.register_forward_pre_hook(hook)
        results.append(run(how, mlp, X.clone()))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
    assert not torch.allclose(run(how, mlps()[0], X.clone()), results[0])


@pytest.mark.parametrize("how", ["eager", "inference", "compiled"])
def test_a_hook_on_an_output_changes_that_output_alone(how):
    results = []
    for mlp in mlps():
        mlp.gate_proj.register_forward_hook(lambda module, args, y: y.zero_().add_(3))
        results.append(run(how, mlp, X.clone()))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["eager", "inference", "compiled"])
def test_outside_of_their_module_layers_share_nothing(how):
    plain, fused = mlps()
    x = X.clone()
    for name in ("gate_proj", "up_proj", "gate_proj"):
        assert torch.equal(run(how, getattr(fused, name), x), run(how, getattr(plain, name), x))
        x.data.add_(1)  # nobody counts this
    assert scope(fused).held is None


def test_only_the_same_x_in_the_same_state_shares():
    plain, fused = mlps()
    differing = [
        lambda x: x.clone(),
        lambda x: x[:],
        lambda x: x.detach(),
        lambda x: x.add_(1),
        lambda x: x.requires_grad_(),
        lambda x: x.resize_(2, 72),
    ]
    for change in differing:
        x = X.clone()
        _open(fused, ())
        gate = fused.gate_proj(x)
        x = change(x)
        with Products() as products:
            up = fused.up_proj(x)
        assert products.count == 1 and torch.equal(up, plain.up_proj(x)) and up.requires_grad == x.requires_grad
        assert gate.shape == (3, 128)
    for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        for inside in ("gate_proj", "up_proj"):
            x = X.clone().requires_grad_()
            _open(fused, ())
            for name in ("gate_proj", "up_proj"):
                with context if name == inside else contextlib.nullcontext():
                    y, expected = getattr(fused, name)(x), getattr(plain, name)(x)
                assert torch.equal(y, expected) and (y.dtype, y.requires_grad) == (
                    expected.dtype,
                    expected.requires_grad,
                )
    x = X.clone()
    _open(fused, ())
    fused.gate_proj(x)
    fused.up_proj.act = plain.up_proj.act = "int8"
    assert torch.equal(fused.up_proj(x), plain.up_proj(x))
    _close(fused, (), None)


def test_a_part_is_given_once():
    plain, fused = mlps()
    _open(fused, ())
    first = fused.gate_proj(X)
    second = fused.gate_proj(X)  # separate layers make separate results
    first.zero_()
    assert torch.equal(second, plain.gate_proj(X)) and torch.equal(fused.up_proj(X), plain.up_proj(X))
    assert scope(fused).held == ()
    _close(fused, (), None)


def test_products_die_when_they_were_taken_and_after_an_error():
    fused = mlps()[1]
    x = X.clone()
    seen = weakref.ref(x)
    fused(x)
    del x
    gc.collect()
    assert seen() is None and scope(fused).held is None
    handle = fused.up_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fused(X)
    assert scope(fused).held is None
    handle.remove()
    x = torch.randn(3, 71)
    with pytest.raises(lowbit.ShapeError, match="x must end in 72"):
        fused(x)
    assert scope(fused).held is None
    with pytest.raises(lowbit.DtypeError, match=r"x must be a torch.Tensor, got list"):
        fused([1.0])


def test_outputs_may_be_written_in_place_while_gradients_are_taken():
    gradients = []
    for mlp in mlps():
        mlp.gate_proj.register_forward_hook(lambda module, args, y: y.mul_(3))
        x = X.clone().requires_grad_()
        mlp(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_threads_that_run_one_model_get_their_own_results():
    plain, fused = mlps()
    xs = [torch.randn(4, 72) for _ in range(4)]
    expected = [plain(x) for x in xs]
    wrong = []

    def work(x, y):
        for _ in range(200):
            if not torch.equal(fused(x), y):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=pair_) for pair_ in zip(xs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- compiled -------------------------------------------------------------------------------------------------------


def products_in(graph):
    return sum("lowbit.matmul" in str(node.target) for node in graph.graph.nodes)


def test_compiled_models_have_one_graph_with_fewer_products():
    plain, fused = (model.requires_grad_(False) for model in pair("qwen2"))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend=backend)
    for length in (20, 7, 9):
        tokens = torch.arange(40, 40 + length)[None]
        with torch.no_grad():
            assert torch.equal(compiled(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits)
    assert len(graphs) == 1 and products_in(graphs[0]) == 8


def test_inductor_and_export_give_the_eager_result():
    plain, fused = mlps()
    torch.testing.assert_close(torch.compile(fused, fullgraph=True)(X), plain(X), rtol=1e-5, atol=1e-6)
    for strict in (False, True):
        exported = torch.export.export(fused, (X,), strict=strict)
        assert products_in(exported.graph_module) == 2  # gate and up, and down
        torch.testing.assert_close(exported.module()(X), plain(X), rtol=1e-5, atol=1e-6)


def test_compiled_gradients():
    found = []
    for mlp in mlps("qwen2"):
        x = X.clone().requires_grad_()
        compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
        compiled(x).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_graph_break_between_the_layers_changes_nothing():
    plain, fused = mlps()
    for mlp in (plain, fused):
        mlp.gate_proj.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(fused, backend="eager")
    for x in (X, X + 1):
        torch.testing.assert_close(compiled(x), plain(x), rtol=0, atol=1e-6)
        torch.testing.assert_close(fused(x), plain(x), rtol=0, atol=1e-6)
    assert scope(fused).held is None


# ---- what others put on top -----------------------------------------------------------------------------------------


def test_adapters_train_as_on_separate_layers():
    peft = pytest.importorskip("peft", reason="LoRA needs peft, which is no part of any extra")
    found = []
    for model in pair("qwen2"):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config).train()
        with Products() as products:
            loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        found.append((products.count, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (before, plain), (after, fused) = found
    assert (before, after) == (14, 8) and plain.keys() == fused.keys() and len(plain) == 28
    for name, grad in plain.items():
        torch.testing.assert_close(fused[name], grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()) + 1e-7)
    # Out from under the adapters again: the same layers, the same results.
    expected = logits(model.eval())
    inside = [m for m in lowbit.unfuse(model).modules() if isinstance(m, lowbit.Linear)]
    assert len(inside) == 14 and all(type(m) is lowbit.Linear for m in inside)
    assert torch.equal(logits(model), expected)


def test_accelerates_hold_on_forward_is_followed():
    hooks = pytest.importorskip("accelerate.hooks", reason="needs accelerate")
    plain = lowbit.quantize_model(small("llama"), "int4", group_size=16, method="rtn")
    expected, model = logits(plain), copy.deepcopy(plain)
    for module in list(model.modules()):
        if isinstance(module, lowbit.Linear):
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    lowbit.fuse(model)
    with Products() as products:
        assert torch.equal(logits(model), expected)
    assert products.count == 8


def test_a_cut_x_is_refused():
    fused = mlps()[1]

    class Cut(torch.Tensor):
        placements = ()

    with pytest.raises(SchemeError, match=r"call lowbit.unfuse\(model\) before"):
        fused.gate_proj(X.as_subclass(Cut))
