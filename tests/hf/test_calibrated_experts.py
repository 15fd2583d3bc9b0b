"""Risk: experts are calibrated on other tokens than theirs, or transposed layers on the wrong side of the weight.

The oracle is the finished model: what a matrix reads there is what its codes must have been chosen for.
"""

import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file

import lowbit
from lowbit import quantizers
from lowbit.checkpoint import calibrate_experts, calibrated_files
from lowbit.checkpoint import plan as planning
from lowbit.checkpoint.block_store import BlockStore
from lowbit.checkpoint.settings import Settings
from lowbit.checkpoint.source import Source

from .models import small

IDS = torch.randint(0, 128, (12, 48), generator=torch.Generator().manual_seed(3))
OPTIONS = {"group_size": 32, "calibration": IDS}
KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe")


def read_by(model, ids):
    """Name -> second moments of what each quantized layer reads, fp32, and how many tokens."""
    found, handles = {}, []

    def note(name):
        def hook(module, args):
            x = args[0].detach().double().reshape(-1, args[0].shape[-1])
            found.setdefault(name, []).append(x)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, lowbit.Linear):
            handles.append(module.register_forward_pre_hook(note(name)))
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    rows = {name: torch.cat(parts) for name, parts in found.items()}
    return {name: ((x.T @ x / len(x)).float(), len(x)) for name, x in rows.items()}


def float_matrices(model):
    """Name -> float weight [N, K] of every matrix of every expert; gate and up apart, and as one."""
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            for i in range(len(module.down_proj)):
                for part in ("gate_up_proj", "down_proj"):
                    whole = getattr(module, part)[i].detach()
                    found[f"{name}.{i}.{part}"] = whole.T.contiguous() if module.is_transposed else whole
                half = len(found[f"{name}.{i}.gate_up_proj"]) // 2
                found[f"{name}.{i}.gate_proj"] = found[f"{name}.{i}.gate_up_proj"][:half]
                found[f"{name}.{i}.up_proj"] = found[f"{name}.{i}.gate_up_proj"][half:]
    return found


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_expert_is_calibrated_on_the_tokens_that_choose_it(tmp_path, monkeypatch, kind, method):
    monkeypatch.setattr("lowbit.checkpoint.blocks._TOKENS_AT_ONCE", 240)
    monkeypatch.setattr(calibrate_experts, "fewest", lambda *_: 1)
    model = small(kind)
    model.save_pretrained(tmp_path / "src", max_shard_size="60KB")
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int4", method=method, **OPTIONS)
    done = lowbit.from_pretrained(tmp_path / "q", dtype="auto")
    moments, weights, seen = read_by(done, IDS), float_matrices(model), 0
    quantize = {"gptq": quantizers.gptq, "awq": quantizers.clip}[method]
    for name, module in done.named_modules():
        if isinstance(module, lowbit.Linear) and ".experts." in name and name in moments:
            expected = quantize(weights[name], moments[name][0], "int4", group_size=32)
            same = (module.quant_tensor().unpack() == expected.unpack()).float().mean()
            assert same > 0.99, f"{name}: {same}"  # sums in another order may turn a code
            seen += 1
    parts = 2 if kind in ("gpt_oss", "granitemoe") else 3
    assert seen == 2 * 4 * parts, "an expert was not seen"
    # Would it show? The tokens of another expert give other codes.
    name = next(name for name in weights if name.endswith("experts.3.down_proj"))
    other = quantize(weights[name], moments[name.replace(".3.", ".2.")][0], "int4", group_size=32)
    assert (done.get_submodule(name).quant_tensor().unpack() != other.unpack()).float().mean() > 0.01


def test_attention_of_the_next_block_reads_what_quantized_experts_make(tmp_path):
    small("mixtral").save_pretrained(tmp_path / "src")
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int3", method="gptq", **OPTIONS)
    done, model = lowbit.from_pretrained(tmp_path / "q", dtype="auto"), small("mixtral")
    moments = read_by(done, IDS)
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj"):
        weight = model.get_submodule(name).weight.detach()
        expected = quantizers.gptq(weight, moments[name][0], "int3", group_size=32)
        assert (done.get_submodule(name).quant_tensor().unpack() == expected.unpack()).float().mean() > 0.99, name


def test_experts_with_too_few_tokens_are_counted_once_and_need_no_data(tmp_path):
    model = small("qwen3_moe")
    model.save_pretrained(tmp_path / "src")
    ids = IDS[:2, :20]  # 40 tokens, 20 an expert: fewer than the 32 and 64 columns
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"group_size": 32, "method": "gptq", "calibration": ids}
        lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int4", **options)
    done = lowbit.from_pretrained(tmp_path / "q", dtype="auto")
    moments, weights = read_by(done, ids), float_matrices(model)
    matrices = {n: m for n, m in done.named_modules() if isinstance(m, lowbit.Linear) and ".experts." in n}
    few = [n for n, m in matrices.items() if n not in moments or moments[n][1] < m.in_features]
    words = [str(w.message) for w in caught if "calibration tokens" in str(w.message)]
    assert 0 < len(few) and len(words) == 1, words
    assert words[0].startswith(f"{len(few)} of 24 matrices of experts read too few") and few[0] in words[0]
    for name in few:
        assert matrices[name].quant_tensor() == lowbit.quantize(weights[name], "int4", group_size=32, method="mse")


def test_settings_by_matrix_and_experts_left_alone(tmp_path):
    small("qwen3_moe").save_pretrained(tmp_path / "src")
    dynamic = {r"layers\.0\.mlp\.experts": None, r"experts\.(\d+\.)?down_proj": {"dtype": "uint3", "method": "rtn"}}
    steps = []
    lowbit.quantize_checkpoint(
        tmp_path / "src", tmp_path / "q", method="awq", dynamic=dynamic, progress=lambda *s: steps.append(s), **OPTIONS
    )
    held, before = load_file(tmp_path / "q" / "model.safetensors"), load_file(tmp_path / "src" / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj"
    expected = lowbit.quantize(before[f"{name}.weight"], "uint3", group_size=32, method="rtn")
    assert torch.equal(held[f"{name}.qweight"], expected.codes)
    kept = [name for name in before if "layers.0.mlp.experts" in name]
    assert len(kept) == 12 and all(torch.equal(held[name], before[name]) for name in kept)
    layers = [step for step in steps if step[1] == 8 + 12]  # of attention, and of the experts of one block
    assert [step[0] for step in layers] == list(range(1, 21))


def test_a_transposed_layer_that_changed_as_float_is_written_as_it_lay(tmp_path):
    small("gpt2").save_pretrained(tmp_path / "src")
    source = Source(tmp_path / "src")
    plan = planning.make(source, Settings.make(group_size=32))
    store = BlockStore(tmp_path / "blocks", {})
    with calibrated_files.CalibratedModel(source, plan, store, torch.device("cpu")) as model:
        block = model.streamed.model.transformer.h[1]
        modules = list(block.modules())
        model.enter(modules)
        weight = block.mlp.c_fc.weight
        weight.data = weight.data * 2
        model.done(modules, [], [weight])
        key = next(key for key in source.tensors if key.endswith("h.1.mlp.c_fc.weight"))
        before = load_file(tmp_path / "src" / "model.safetensors")[key]
        assert torch.equal(model.kept(key).read(), before * 2)
        assert all(model.kept(other) is None for other in source.tensors if other != key)


def as_linears(model):
    """The same model with nn.Linear for Conv1D, in place."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            linear = torch.nn.Linear(*module.weight.shape)
            linear.weight = torch.nn.Parameter(module.weight.detach().T.contiguous())
            linear.bias = module.bias
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gpt2_is_the_model_with_plain_layers(tmp_path, method):
    small("gpt2").save_pretrained(tmp_path / "src", max_shard_size="60KB")
    skip = [r"h\.1\.attn\.c_attn"]  # it reads a norm, and stays float
    dynamic = {r"h\.0\.mlp\.c_fc": {"method": "rtn"}}
    lowbit.quantize_checkpoint(
        tmp_path / "src", tmp_path / "q", "int3", method=method, skip=skip, dynamic=dynamic, **OPTIONS
    )
    model = as_linears(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "src").eval())
    options = {"method": method, "dynamic": dynamic, **OPTIONS}
    expected = lowbit.quantize_model(model, "int3", skip=[*skip, "lm_head"], **options)
    done = lowbit.from_pretrained(tmp_path / "q", dtype="auto")
    layers = {n: m for n, m in expected.named_modules() if isinstance(m, lowbit.Linear)}
    assert len(layers) == 7
    for name, layer in layers.items():
        assert done.get_submodule(name).quant_tensor() == layer.quant_tensor(), name
    with torch.no_grad():
        torch.testing.assert_close(done(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)
