"""Risk: a model that transformers loads, saves, moves or compiles has other weights than the checkpoint says.

Runs against whatever transformers is installed; 5.17 and 5.23 differ in every hook. The oracle is a float model whose
weights are rounded by the slow reference.
"""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import lowbit
from lowbit import FormatError, LowbitConfig, SchemeError

from .models import LLAMA, TOKENS, rounded, small

DYNAMIC = {r"\.down_proj$": {"dtype": "int8"}, "model.layers.1.self_attn": None}


def chosen(name):
    if "proj" not in name or "layers.1.self_attn" in name:
        return None
    return ("int8", 64) if name.endswith("down_proj") else ("uint4", 64)


def config(**changes):
    return LowbitConfig("uint4", group_size=64, method="rtn", dynamic=DYNAMIC, **changes)


def loaded(path=LLAMA, dtype=torch.float32, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def pair(request, tmp_path_factory):
    """(quantized on the fly, folder it was saved to)."""
    model = loaded(dtype=request.param, quantization_config=config())
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder, max_shard_size="300KB")
    return model, folder


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, lowbit.Linear)}


def test_on_the_fly_is_what_the_reference_rounds_to(pair):
    model, _ = pair
    assert {name: (m.scheme.weight.name, m.scheme.group_size) for name, m in layers_of(model).items()} == {
        name: chosen(name)
        for name, m in loaded().named_modules()
        if isinstance(m, torch.nn.Linear) and chosen(name) is not None
    }
    oracle = rounded(loaded(dtype=model.dtype), chosen)
    bound = 1e-4 if model.dtype == torch.float32 else 0.3
    assert (logits(model) - logits(oracle)).abs().max() < bound
    assert all(m.layout == "cpu" and not m.qweight.requires_grad for m in layers_of(model).values())
    assert model.is_quantized and model.hf_quantizer.is_trainable and model.dtype == oracle.dtype


@pytest.mark.parametrize("settings", [config, lambda: config(lm_head="int8")], ids=["tied", "head"])
def test_bytes_are_counted_as_for_a_gpu_while_it_is_quantized_on_the_fly(monkeypatch, settings):
    """transformers asks every parameter by name for its bytes before it loads to a GPU, floats to be quantized too."""
    counted = []
    count = transformers.modeling_utils.get_total_byte_count
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerator_device", lambda device: True)
    monkeypatch.setattr(
        transformers.modeling_utils, "get_total_byte_count", lambda *given: counted.append(count(*given)) or counted[-1]
    )
    assert layers_of(loaded(device_map="cpu", quantization_config=settings()))
    assert len(counted) == 1


def test_saved_and_loaded_it_is_the_same_to_the_bit(pair):
    model, folder = pair
    assert len(list(folder.glob("*.safetensors"))) > 1
    again = loaded(folder, dtype=model.dtype)
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert torch.equal(logits(model), logits(again))
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "lowbit" and stored["format"] == 1
    assert set(stored["skip"]) == {f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"}


def test_scales_keep_their_type_whatever_the_model_is_loaded_as(pair):
    model, folder = pair
    kind = next(iter(layers_of(model).values())).scales.dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        again = loaded(folder, dtype=dtype)
        for name, layer in layers_of(again).items():
            assert layer.scales.dtype == kind and layer.weight.dtype == dtype
            assert layer.quant_tensor() == layers_of(model)[name].quant_tensor()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_head_is_untied_and_stays_so(dtype, tied, tmp_path):
    path = LLAMA
    if not tied:
        float_ = loaded()
        float_.config.tie_word_embeddings = False
        float_.lm_head.weight = torch.nn.Parameter(float_.lm_head.weight.detach() * 0.5)
        float_.save_pretrained(path := tmp_path / "untied")
    model = loaded(path, dtype, quantization_config=config(lm_head="int8"))
    weight = loaded(path, dtype).lm_head.weight
    expected = lowbit.quantize(weight.detach(), "int8", group_size=64, method="rtn")
    assert model.lm_head.quant_tensor() == expected and not model.config.tie_word_embeddings
    assert torch.equal(model.model.embed_tokens.weight, loaded(path, dtype).model.embed_tokens.weight)
    model.save_pretrained(tmp_path / "q")
    again = loaded(tmp_path / "q", dtype)
    assert again.lm_head.quant_tensor() == expected and torch.equal(logits(again), logits(model))


def test_generate_gives_what_the_rounded_model_gives():
    model = loaded(quantization_config=config())
    oracle = rounded(loaded(), chosen)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(TOKENS, **options), oracle.generate(TOKENS, **options))


def test_compiled_whole_it_is_the_same():
    model = loaded(quantization_config=config())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "gpt_oss"])
def test_dequantize_gives_an_ordinary_model(kind, tmp_path):
    if kind == "llama":
        model, oracle = loaded(quantization_config=config()), rounded(loaded(), chosen)
    else:
        small(kind).save_pretrained(tmp_path / "src")
        options = {"group_size": 32, "method": "rtn"}
        model = loaded(tmp_path / "src", quantization_config=LowbitConfig("int4", **options))
        oracle = rounded(small(kind), lambda name: None if "lm_head" in name or "router" in name else ("int4", 32))
    model.dequantize()
    assert not layers_of(model) and not getattr(model, "is_quantized", False)
    mine, expected = model.state_dict(), oracle.state_dict()
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-6, atol=1e-7)
    model.save_pretrained(tmp_path / "float")
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())
    assert torch.equal(logits(loaded(tmp_path / "float")), logits(model))


def test_on_cpu_and_disk_it_is_the_same(pair, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model, folder = pair
    whole = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places = whole | {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    options = {"device_map": places, "offload_folder": tmp_path / "off", "dtype": model.dtype}
    split = AutoModelForCausalLM.from_pretrained(folder, **options)
    on_disk = [m for name, m in layers_of(split).items() if ".1." in name or ".3." in name]
    assert all(m.qweight.is_meta for m in on_disk) and on_disk
    torch.testing.assert_close(logits(split), logits(model), rtol=0, atol=1e-4 if model.dtype == torch.float32 else 0.3)
    split.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again", model.dtype)), logits(model))


@pytest.mark.parametrize("kind", [None, "qwen3_moe", "gpt2"])
def test_quantized_on_the_fly_to_cpu_and_disk_it_is_the_same(kind, tmp_path):
    """accelerate puts hooks on the layers before loading has ended: no placeholder of a float weight may be left."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    source = LLAMA
    if kind:
        source = tmp_path / "src"
        small(kind).save_pretrained(source)
    settings = {"quantization_config": LowbitConfig("int4", group_size=32, method="rtn")}
    model = loaded(source)
    root, blocks = ("transformer", "h") if kind == "gpt2" else ("model", "layers")
    parts = [f"{root}.{name}" for name, _ in model.get_submodule(root).named_children() if name != blocks]
    places = dict.fromkeys(["lm_head", *parts], "cpu")
    places |= {f"{root}.{blocks}.{i}": "disk" if i == 1 else "cpu" for i in range(model.config.num_hidden_layers)}
    split = loaded(source, device_map=places, offload_folder=tmp_path / "off", **settings)
    assert any(m.qweight.is_meta for m in layers_of(split).values())
    torch.testing.assert_close(logits(split), logits(loaded(source, **settings)), rtol=0, atol=1e-4)


def test_copies_and_pickles_are_the_same(pair):
    model, _ = pair
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), logits(model))


def test_the_base_model_reads_the_checkpoint_of_the_whole(pair):
    model, folder = pair
    base = AutoModel.from_pretrained(folder, dtype=model.dtype)
    with torch.no_grad():
        assert torch.equal(base(TOKENS).last_hidden_state, model.model(TOKENS).last_hidden_state)


# ---- what a damaged checkpoint does -------------------------------------------------------------------------------


def one_file(folder, change):
    """Save a quantized model as one file, its tensors changed."""
    loaded(quantization_config=config()).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


LAYER = "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{LAYER}.qweight"), "qweight"),
        (lambda t: t.pop(f"{LAYER}.scales"), "scales"),
        (lambda t: t.pop(f"{LAYER}.zeros"), "zeros"),
        (lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"][:, :-1].contiguous()}), "scales"),
        (lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"][:-8].contiguous()}), "qweight"),
        (lambda t: t[f"{LAYER}.scales"].fill_(float("nan")), r"scales: .*NaN"),
        (lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].view(torch.int8)}), "uint8"),
    ],
    ids=["no codes", "no scales", "no zeros", "short scales", "short codes", "not a number", "other integers"],
)
@pytest.mark.parametrize("how", ["transformers", "lowbit"])
def test_a_damaged_tensor_is_an_error_that_names_it(tmp_path, change, words, how):
    one_file(tmp_path, change)
    if how == "lowbit":
        with pytest.raises(FormatError, match=words):
            lowbit.from_pretrained(tmp_path)
    else:  # 5.23 has an error of its own for shapes, which refers to its log for the name
        with pytest.raises((FormatError, RuntimeError), match=f"{words}|ignore_mismatched_sizes"):
            loaded(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "int9"}, "int9"),
        ({"format": 2}, "format 2 needs a newer lowbit"),
        ({"format": "1"}, "format '1' needs"),
        ({"group_size": 48}, "48"),
        ({"group_size": None}, "group_size must be a whole number, got None"),
        ({"bits": 4}, "no setting 'bits'"),
        ({"dynamic": {"(": None}}, "not a regular expression"),
        ({"dynamic": {"up_proj": {"bits": 4}}}, "no setting 'bits'"),
        ({"skip": 3}, "skip must be"),
        ({"experts": "half"}, "half"),
        ({"lm_head": "int8"}, "needs tie_word_embeddings false"),
        ({"perm": 1}, "perm must be"),
        ({"act": "int9"}, "int9"),
        ({"skip": ["model"]}, "got none"),
    ],
)
def test_a_hostile_config_is_refused(tmp_path, changes, words):
    one_file(tmp_path, lambda tensors: None)
    whole = json.loads((tmp_path / "config.json").read_text())
    whole["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(lowbit.LowbitError, match=words):
        loaded(tmp_path)
    with pytest.raises(lowbit.LowbitError, match=words):
        lowbit.from_pretrained(tmp_path)


def test_weights_that_cannot_be_quantized_are_named(tmp_path):
    model = loaded()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(lowbit.QuantizationError, match=r"^model\.layers\.1\.mlp\.up_proj: .*finite"):
        loaded(tmp_path, quantization_config=LowbitConfig("int4", group_size=64))
    with pytest.raises(SchemeError, match="got none"):
        loaded(quantization_config=LowbitConfig("int4", skip=["model"]))


@pytest.mark.parametrize("argument", ["skip", "dynamic"])
def test_a_misspelt_entry_does_not_pass_while_it_is_quantized_on_the_fly(argument):
    entry = {"skip": ["nope"], "dynamic": {"nope": {"dtype": "int8"}}}[argument]
    with pytest.raises(SchemeError, match=f"{argument} entry 'nope' matches no nn.Linear; near: "):
        loaded(quantization_config=LowbitConfig("int4", group_size=64, **{argument: entry}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "foo"}, "no quantization method is called 'foo'"),
        ({"method": "gptq"}, "'gptq' needs calibration data"),
        ({"method": None}, "got None"),
        ({"zero_kind": "zero"}, "int4 is quantized with zero_kind 'none', got 'zero'"),
        ({"dtype": "uint4", "zero_kind": "none"}, "uint4 is quantized with zero_kind 'zero' or 'min', got 'none'"),
        ({"group_size": None}, "group_size must be a whole number, got None"),
        ({"codebook": True}, "codebook must be false"),
        ({"perm": True}, "perm must be false"),
    ],
)
def test_settings_that_no_method_makes_are_refused_before_weights_load(monkeypatch, settings, words):
    with pytest.raises(SchemeError, match=words):
        LowbitConfig(**settings)
    monkeypatch.setattr("lowbit.checkpoint.on_the_fly.Quantize.convert", None)  # no weight may get there
    with pytest.raises(SchemeError, match=words):
        loaded(quantization_config={"quant_method": "lowbit", **settings})
    with pytest.raises(SchemeError, match=words):
        loaded(quantization_config=LowbitConfig(dynamic={"up_proj": settings}))


@pytest.mark.parametrize("dynamic", [{"method": "foo"}, {"perm": True}])
def test_settings_of_a_tied_head_are_judged_before_weights_load(monkeypatch, dynamic):
    monkeypatch.setattr("lowbit.checkpoint.on_the_fly.Quantize.convert", None)
    with pytest.raises(SchemeError, match="'foo'|perm must be false"):
        loaded(quantization_config=LowbitConfig("int4", lm_head="int8", dynamic={"lm_head": dynamic}))


def test_a_config_is_left_as_it_was_and_serves_another_model(tmp_path):
    small("llama").save_pretrained(tmp_path)
    settings = LowbitConfig(dtype=lowbit.dtypes.weight_type("int4"), group_size=64, skip=["layers.1"])
    before = settings.to_dict()
    for path in (LLAMA, tmp_path):
        model = loaded(path, quantization_config=settings)
        assert settings.to_dict() == before and model.config.quantization_config.scale_dtype == "float16"
        assert any(name.startswith("model.layers.1.") for name in model.config.quantization_config.skip)


# ---- registration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [
        "import lowbit, transformers",
        "import transformers, lowbit",
        "import transformers\nfrom transformers import AutoModelForCausalLM\nimport lowbit",
        "from transformers import AutoModel\nimport lowbit\nlowbit.register_transformers()\nlowbit.LowbitConfig",
        "import lowbit\nlowbit.register_transformers()\nlowbit.register_transformers()",
    ],
)
def test_importing_both_is_enough_and_neither_waits(pair, order):
    _, folder = pair
    code = (
        f"{order}\nimport sys, transformers\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        "assert type(model.model.layers[0].mlp.up_proj).__module__ == 'lowbit.nn'\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(lowbit.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_lowbit_imports_no_transformers():
    code = "import sys, lowbit; sys.exit(any(name.split('.')[0] in ('torch', 'transformers') for name in sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(Path(lowbit.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


def test_a_config_goes_through_json_and_back():
    made = LowbitConfig("uint3", group_size=32, zero_kind="min", act="int8", dynamic=DYNAMIC, lm_head="int8", skip="x")
    again = LowbitConfig.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.settings == made.settings and again.to_dict() == made.to_dict()
    assert transformers.quantizers.AutoQuantizationConfig.from_dict(made.to_dict()).settings == made.settings
