"""Risk: layers that share a product compute something else, lose their weights or names, or share nothing."""

import ast
import copy
import inspect
import io
import pickle
import textwrap
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import DtypeError, LowbitConfig, SchemeError
from lowbit.fused import Fused, FusedLinear
from lowbit.fusing import _GROUPS, _KNOWN

from .models import LLAMA, TOKENS, small

KINDS = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]


class Products(TorchDispatchMode):
    """Counts the products that run."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith(("lowbit.matmul_out", "lowbit.matmul_grad."))
        return func(*args, **(kwargs or {}))


def pair(kind="llama", dtype="int4", **options):
    """A quantized model, and a fused copy of it."""
    model = lowbit.quantize_model(small(kind), dtype, group_size=16, method="rtn", **options)
    return model, lowbit.fuse(copy.deepcopy(model))


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens).logits


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def bytes_of(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


# ---- the same, in fewer products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fused_models_compute_the_same_bits_in_fewer_products(kind):
    plain, fused = pair(kind)
    with Products() as before:
        expected = logits(plain)
    with Products() as after:
        assert torch.equal(logits(fused), expected)
    saved = 3 if kind in ("llama", "mistral", "qwen2", "qwen3") else 2  # mixtures: q, k and v alone
    assert before.count - after.count == 2 * saved
    if saved == 3:
        assert (before.count, after.count) == (14, 8)  # two blocks, 7 -> 4
    generated = [m.generate(TOKENS, max_new_tokens=12, do_sample=False) for m in (plain, fused)]
    assert torch.equal(*generated)
    with torch.inference_mode(), Products() as after:
        assert torch.equal(fused(TOKENS).logits, expected)
    assert before.count - after.count == 2 * saved


@pytest.mark.parametrize("dtype", ["int1", "uint3", "float6_e3m2", "int8"])
@pytest.mark.parametrize("float_type", [torch.float32, torch.bfloat16])
def test_every_layout_of_codes_is_stacked_without_padding(dtype, float_type):
    plain, fused = (model.to(float_type) for model in pair(dtype=dtype))
    sizes = {layer.out_features % 16 for layer in fused.modules() if isinstance(layer, FusedLinear)}
    assert sizes == {8, 0} and torch.equal(logits(fused), logits(plain)) and same_state(plain, fused)
    for act in ("int8", None):
        for model in (plain, fused):
            for layer in model.modules():
                if isinstance(layer, lowbit.Linear):
                    layer.act = act
        assert torch.equal(logits(fused), logits(plain))


def test_any_number_of_rows_gives_the_same_bits_up_to_torchs_own():
    plain = lowbit.quantize_model(small("llama", intermediate_size=100), "int4", group_size=16, method="rtn")
    fused = lowbit.fuse(copy.deepcopy(plain))
    a, b = plain.model.layers[0].mlp, fused.model.layers[0].mlp
    x = torch.randn(2, 5, 72)
    assert torch.equal(a.gate_proj(x), b.gate_proj(x)) and torch.equal(a.up_proj(x), b.up_proj(x))
    # torch's silu of a slice and of a dense tensor rounds some last bits otherwise, at the ends of rows of 100.
    torch.testing.assert_close(logits(fused), logits(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_known_modules_call_their_layers_with_one_tensor_that_they_do_not_write(kind):
    """What sharing in compiled code rests on, read from the code of the installed transformers."""
    module, checked = import_module(f"transformers.models.{kind}.modeling_{kind}"), 0
    for suffix, names in _GROUPS.items():
        cls = getattr(module, _KNOWN[kind] + suffix, None)
        if cls is None:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("self.")]
        read = {ast.unparse(n.func): [ast.unparse(a) for a in n.args] for n in calls}
        arguments = [read[f"self.{name}"] for name in names]
        assert len({a[0] for a in arguments}) == 1 and all(len(a) == 1 for a in arguments)
        x = arguments[0][0]
        written = [
            n
            for n in ast.walk(tree)
            if (isinstance(n, ast.Name) and n.id == x and not isinstance(n.ctx, ast.Load))
            or (isinstance(n, ast.Attribute) and ast.unparse(n.value) == x and n.attr.endswith("_"))
            or (isinstance(n, ast.Subscript) and ast.unparse(n.value) == x and not isinstance(n.ctx, ast.Load))
        ]
        assert not written and [ast.unparse(n.func) for n in calls if ast.unparse(n.func)[5:] in names] != []
        assert len([n for n in calls if ast.unparse(n.func)[5:] in names]) == len(names)
        checked += 1
    assert checked


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_gradients_are_those_of_separate_layers(kind):
    found = []
    for model in pair(kind):
        embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        model.train()
        model(inputs_embeds=embedded).logits.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"x": embedded.grad, **grads})
    assert found[0].keys() == found[1].keys() and (kind == "llama" or any("q_proj.bias" in n for n in found[0]))
    for name, grad in found[0].items():  # sums over the rows of three weights are taken in another order
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    plain, fused = pair()
    for model in (plain, fused):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model(TOKENS, use_cache=False).logits.square().sum().backward()
    weights = [model.get_input_embeddings().weight.grad for model in (plain, fused)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5 * float(weights[0].abs().max()))


# ---- what is fused --------------------------------------------------------------------------------------------------


def test_layers_of_other_schemes_stay_apart():
    dynamic = {"0.self_attn.v_proj": {"dtype": "int8"}, "0.mlp.gate_proj": {"group_size": 32}, "1.mlp": {"act": "int8"}}
    dynamic |= {"layers.1.self_attn.k_proj": None}
    plain, fused = pair(dynamic={f"layers.{n}" if n[0].isdigit() else n: s for n, s in dynamic.items()})
    names = {name for name, m in fused.named_modules() if isinstance(m, FusedLinear)}
    assert names == {f"model.layers.0.self_attn.{n}_proj" for n in "qk"} | {
        f"model.layers.1.{n}_proj" for n in ("self_attn.q", "self_attn.v", "mlp.gate", "mlp.up")
    }
    with Products() as before:
        expected = logits(plain)
    with Products() as after:
        assert torch.equal(logits(fused), expected)
    assert (before.count, after.count) == (13, 10)


def test_an_order_of_columns_is_shared_or_keeps_layers_apart():
    model = small("llama")
    attention = model.model.layers[0].self_attn
    perms = [torch.randperm(72, generator=torch.Generator().manual_seed(i)).int() for i in (1, 1, 2)]
    for name, perm in zip(("q_proj", "k_proj", "v_proj"), perms, strict=True):
        qt = lowbit.quantize(getattr(attention, name).weight.detach(), "int4", group_size=16, method="rtn")
        qt = lowbit.QuantTensor(qt.codes, qt.scales, dtype="int4", shape=qt.shape, group_size=16, perm=perm)
        setattr(attention, name, lowbit.Linear.from_quant_tensor(qt, dtype=torch.float32))
    fused = lowbit.fuse(copy.deepcopy(model))
    kinds = [type(getattr(fused.model.layers[0].self_attn, f"{n}_proj")) for n in "qkv"]
    assert kinds == [FusedLinear, FusedLinear, lowbit.Linear]
    assert torch.equal(logits(fused), logits(model)) and same_state(model, fused)
    state = model.state_dict()
    state["model.layers.0.self_attn.q_proj.perm"] = perms[2]
    with pytest.raises(RuntimeError, match=r"perm must be that of the layers it is fused with; call lowbit.unfuse"):
        fused.load_state_dict(state)


def test_a_missing_bias_is_zeros():
    plain = small("qwen2")
    for layer in plain.model.layers:
        layer.self_attn.k_proj.bias = None
    lowbit.quantize_model(plain, "uint4", group_size=16, method="rtn")
    fused = lowbit.fuse(copy.deepcopy(plain))
    assert torch.equal(logits(fused), logits(plain)) and same_state(plain, fused)
    for model in (plain, fused):  # a bias is read when it is needed
        model.model.layers[1].self_attn.v_proj.bias.data.add_(1)
    assert torch.equal(logits(fused), logits(plain))


def test_what_cannot_be_fused_says_so():
    model = small("gpt2")
    with pytest.raises(SchemeError, match="fuse expects attention or MLP modules of transformers' Llama, .*GPT2LMHead"):
        lowbit.quantize_model(model, fuse=True)
    assert not any(isinstance(m, lowbit.Linear) for m in model.modules())
    for call in (lowbit.fuse, lowbit.unfuse):
        with pytest.raises(DtypeError, match="expected an nn.Module, got int"):
            call(3)
    plain, fused = pair()
    children = [id(m) for m in fused.modules()]
    assert [id(m) for m in lowbit.fuse(fused).modules()] == children  # twice is once
    shared = plain.model.layers[0].mlp
    shared.up_proj = shared.gate_proj
    assert type(lowbit.fuse(plain).model.layers[0].mlp.up_proj) is lowbit.Linear


# ---- names, copies, files -------------------------------------------------------------------------------------------


def test_names_stay_and_the_weight_is_held_once():
    plain, fused = pair("qwen2", "uint3")
    before, after = dict(plain.named_modules()), dict(fused.named_modules())
    assert before.keys() == {name for name, m in after.items() if not isinstance(m, Fused)}
    assert sum(isinstance(m, Fused) for m in after.values()) == 4 and same_state(plain, fused)
    assert bytes_of(fused) <= bytes_of(plain)  # less padding
    for name, module in after.items():
        if isinstance(module, FusedLinear):
            assert module.quant_tensor() == before[name].quant_tensor() and module.scheme == before[name].scheme
            assert [n for n, _ in module.named_parameters()] in ([], ["bias"])
            assert module.weight.dtype == torch.float32 and "fused" in repr(module) and module.layout == "cpu"


def test_quantize_model_fuses_the_layers_themselves():
    model = small("llama")
    assert lowbit.quantize_model(model, "int4", group_size=16, method="rtn", fuse=True) is model
    assert same_state(model, pair()[0]) and isinstance(model.model.layers[0].mlp.up_proj, FusedLinear)
    plain = pair()[0]
    layer = plain.model.layers[1].self_attn.q_proj
    lowbit.fuse(plain)
    assert plain.model.layers[1].self_attn.q_proj is layer


def test_copies_and_pickles_stay_fused_and_apart_from_the_model():
    plain, fused = pair("qwen2")
    expected, file = logits(plain), io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    for made in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(file, weights_only=False)):
        with Products() as products:
            assert torch.equal(logits(made), expected)
        assert products.count == 8 and same_state(made, plain)
        for child in made.modules():
            if isinstance(child, Fused):
                assert child.qweight is child.whole.qweight
                child.qweight.data.zero_()
    assert torch.equal(logits(fused), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_go_both_ways(assign):
    plain, fused = pair("qwen2", "uint3")
    other = lowbit.quantize_model(small("qwen2").apply(_shift), "uint3", group_size=16, method="rtn")
    expected = logits(other)
    assert not torch.equal(logits(plain), expected)
    assert str(fused.load_state_dict(other.state_dict(), assign=assign)) == "<All keys matched successfully>"
    assert torch.equal(logits(fused), expected) and same_state(fused, other)
    plain.load_state_dict(fused.state_dict())
    assert torch.equal(logits(plain), expected)


def _shift(module):
    if isinstance(module, torch.nn.Linear):
        module.weight.data.mul_(1.5).add_(0.01)


def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing():
    plain, fused = pair()
    expected, name = logits(plain), "model.layers.0.mlp.up_proj"
    for change, words in (
        (lambda state: state.pop(f"{name}.scales"), f'Missing key.*"{name}.scales"'),
        (lambda state: state.update({f"{name}.zeros": torch.ones(3)}), f'Unexpected key.*"{name}.zeros"'),
        (lambda state: state.update({f"{name}.scales": torch.ones(100, 5)}), f"{name}.scales must be float16"),
        (lambda state: state.update({f"{name}.qweight": torch.ones(1, 1).byte()}), f"size mismatch for {name}.qweight"),
    ):
        state = plain.state_dict()
        change(state)
        with pytest.raises(RuntimeError, match=words):
            fused.load_state_dict(state)
        assert torch.equal(logits(fused), expected)


def test_files_are_those_of_the_separate_layers(tmp_path):
    settings = LowbitConfig("int4", group_size=64, method="rtn")
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32, quantization_config=settings)
    expected = logits(model)
    model.save_pretrained(tmp_path / "plain")
    lowbit.fuse(model).save_pretrained(tmp_path / "fused")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "fused" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    again = lowbit.fuse(lowbit.from_pretrained(tmp_path / "fused", dtype=torch.float32))
    with Products() as products:
        assert torch.equal(logits(again), expected)
    assert products.count == 4 * again.config.num_hidden_layers
    floats = again.dequantize()
    assert not any(isinstance(m, Fused | lowbit.Linear) for m in floats.modules())
    torch.testing.assert_close(logits(floats), expected, rtol=1e-4, atol=1e-4)


# ---- and back -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a lowbit.Linear is not packed")
@pytest.mark.parametrize("packed", [True, False])
def test_unfused_layers_are_what_they_were(packed):
    plain, fused = pair("qwen2", "uint3", prepare=packed)
    same = [m for m in fused.modules() if isinstance(m, lowbit.Linear)]
    assert any(type(m) is FusedLinear for m in same) and torch.equal(logits(fused), logits(plain))
    assert lowbit.unfuse(fused) is fused and all(type(m) is lowbit.Linear for m in same)
    assert [n for n, _ in fused.named_modules()] == [n for n, _ in plain.named_modules()] and same_state(plain, fused)
    for module, before in zip(fused.modules(), plain.modules(), strict=True):
        assert module.__dict__.keys() == before.__dict__.keys() and not module._forward_hooks
        assert not module._forward_pre_hooks and not module._forward_hooks_always_called
    for (name, p), (_, q) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(p, q) and p.untyped_storage().nbytes() == p.numel() * p.element_size(), name
    assert lowbit.unfuse(fused) is fused and torch.equal(logits(lowbit.fuse(fused)), logits(plain))


@pytest.mark.filterwarnings("ignore:a lowbit.Linear is not packed")
def test_prepare_and_unprepare_reach_the_weight():
    plain, fused = pair("qwen2")
    for change in (lowbit.unprepare, lowbit.prepare):
        layouts = {m.layout for m in change(fused).modules() if isinstance(m, lowbit.Linear)}
        assert layouts == {None if change is lowbit.unprepare else "cpu"}
        torch.testing.assert_close(logits(fused), logits(plain), rtol=1e-5, atol=1e-5)
        assert same_state(plain, fused)


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.share_memory()])
def test_moves_of_the_model_are_moves_of_the_weight(move):
    plain, fused = (move(model) for model in pair("qwen2"))
    assert torch.equal(logits(fused), logits(plain)) and same_state(plain, fused)
    assert {p.dtype for p in fused.parameters()} == {p.dtype for p in plain.parameters()}
    layer = fused.model.layers[0].self_attn.k_proj
    assert layer.weight.dtype == layer.bias.dtype and layer.dequantize().dtype == layer.bias.dtype
