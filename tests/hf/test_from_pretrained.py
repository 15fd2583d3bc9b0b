"""Risk: a model that is only partly what its checkpoint says: random weights, a misread format, a lost tensor."""

import json
import pathlib
import pickle
import shutil
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import DtypeError, FormatError, LowbitConfig

from .models import LLAMA, TOKENS, rounded, small

OPTIONS = {"group_size": 64, "method": "rtn"}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.fixture
def quantized(tmp_path):
    return lowbit.quantize_checkpoint(LLAMA, tmp_path / "q", "uint4", **OPTIONS)


def test_it_loads_in_the_type_it_was_stored_in_or_asked_for(quantized):
    model = lowbit.from_pretrained(quantized)
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float16 and not model.training
    model = lowbit.from_pretrained(str(quantized), dtype=torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float16)
    oracle = rounded(oracle, lambda name: ("uint4", 64) if "proj" in name else None).float()
    assert (logits(model) - logits(oracle)).abs().max() < 0.05
    model, info = lowbit.from_pretrained(quantized, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_float_checkpoint_is_quantized_when_asked_and_else_refused():
    with pytest.raises(FormatError, match="is not quantized; quantize it with"):
        lowbit.from_pretrained(LLAMA)
    model = lowbit.from_pretrained(LLAMA, quantization_config=LowbitConfig("int4", group_size=64))
    assert isinstance(model.model.layers[0].mlp.up_proj, lowbit.Linear)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors, the first is model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), "model.norm.weight"),
        (
            lambda t: t.update({"model.layers.9.x_proj.qweight": torch.ones(2)}),
            "1 quantized weights that the model does not read",
        ),
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.scales"), "q_proj.scales"),
    ],
    ids=["norm missing", "norm of another shape", "stray", "scales missing"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(quantized, change, words):
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=words):
        lowbit.from_pretrained(quantized)


def test_files_that_do_not_parse_are_refused_by_name(quantized, tmp_path):
    path = quantized / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=str(quantized)):
        lowbit.from_pretrained(quantized)
    path.unlink()
    with pytest.raises(FormatError, match=str(quantized)):
        lowbit.from_pretrained(quantized)
    with pytest.raises(FormatError, match="does not exist"):
        lowbit.from_pretrained(tmp_path / "nothing")
    (quantized / "config.json").write_text("{")
    with pytest.raises(FormatError, match="config.json does not load"):
        lowbit.from_pretrained(quantized)


class Evil:
    """What a pickle can do to whoever opens it."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return pathlib.Path.touch, (self.trace,)


@pytest.mark.parametrize("kind", ["lowbit", "on the fly", "gptq"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_is_never_opened(kind, name, tmp_path, monkeypatch):
    shutil.copytree(LLAMA, tmp_path / "q")
    options = {"quantization_config": LowbitConfig("int4", group_size=64)} if kind == "on the fly" else {}
    stored = {"lowbit": LowbitConfig("int4", group_size=64).to_dict(), "gptq": {"quant_method": "gptq", "bits": 4}}
    if kind in stored:
        config = json.loads((tmp_path / "q" / "config.json").read_text())
        (tmp_path / "q" / "config.json").write_text(json.dumps({**config, "quantization_config": stored[kind]}))
    (tmp_path / "q" / "model.safetensors").unlink()
    (tmp_path / "q" / name).write_bytes(pickle.dumps({"model.norm.weight": Evil(tmp_path / "trace")}))
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(
        FormatError, match="pickle|no file named model.safetensors|Error while deserializing|not a safe"
    ):
        lowbit.from_pretrained(tmp_path / "q", **options)
    assert not (tmp_path / "trace").exists()


def test_asking_for_pickles_is_refused(quantized):
    with pytest.raises(lowbit.LowbitError, match="use_safetensors must be true: pickles are never opened, got False"):
        lowbit.from_pretrained(quantized, use_safetensors=False)


def test_a_missing_file_of_several_is_refused(tmp_path):
    AutoModelForCausalLM.from_pretrained(LLAMA).save_pretrained(tmp_path / "src", max_shard_size="600KB")
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", **OPTIONS)
    path = sorted((tmp_path / "q").glob("*.safetensors"))[2]
    path.unlink()
    with pytest.raises(FormatError, match=path.name):
        lowbit.from_pretrained(tmp_path / "q")


DENIED = {
    "dtype": ({"dtype": "int4"}, "down_proj: config.json says that its dtype is int4, the file uint4"),
    "bits": ({"dtype": "uint8"}, "its dtype is uint8, the file uint4"),
    "group size": ({"group_size": 32}, "its group_size is 32, the file 64"),
    "zeros are minima": ({"zero_kind": "min"}, "its zero_kind is min, the file zero"),
    "scales": ({"scale_dtype": "float32"}, "its scale_dtype is float32, the file float16"),
    "order": ({"perm": True}, "its tensors is .'perm', 'qweight', 'scales', 'zeros'., the file .'qweight', 'sc"),
    "floats": ({"skip": ["lm_head", "up_proj"]}, "lacks 4 tensors, the first is .*up_proj.weight"),
    "one layer": ({"dynamic": {"down_proj": {"dtype": "uint3"}}}, "down_proj: .* its dtype is uint3, the file uint4"),
    "a tied head": ({"lm_head": "int8"}, "lm_head cannot be int8 and tied"),
    "a newer format": ({"format": 2}, "format 2 needs a newer lowbit"),
    "an unknown setting": ({"bits": 4}, "quantization_config has no setting 'bits'"),
    "an unknown type": ({"dtype": "uint9"}, "no weight type is called 'uint9'"),
    "an unknown method": ({"quant_method": "lowbit2"}, "no known format is called 'lowbit2'"),
}


@pytest.mark.parametrize("change, words", DENIED.values(), ids=DENIED)
def test_a_config_that_contradicts_the_files_is_refused(quantized, change, words):
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] |= change
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(lowbit.LowbitError, match=words) as caught:
        lowbit.from_pretrained(quantized)
    assert "\n" not in str(caught.value)


def test_zeros_that_a_config_denies_are_refused_without_a_description_too(quantized, tmp_path):
    lowbit.from_pretrained(quantized).save_pretrained(tmp_path / "again")  # transformers' files do not describe weights
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    config["quantization_config"]["dtype"] = "int4"
    (tmp_path / "again" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="parts of quantized weights that config.json denies: .*zeros"):
        lowbit.from_pretrained(tmp_path / "again")


def test_old_folders_are_sent_to_convert(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "q")
    (tmp_path / "q" / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(
        FormatError, match="quantize_config.json says how it is quantized, not config.json; `lowbit conv"
    ):
        lowbit.from_pretrained(tmp_path / "q")


def test_a_wrong_option_is_not_blamed_on_the_checkpoint(quantized):
    with pytest.raises(TypeError):
        lowbit.from_pretrained(quantized, no_such_option=3)


@pytest.fixture
def no_hub(monkeypatch):
    def asked(*_, **__):
        raise AssertionError("it was looked for on the hub")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)


@pytest.mark.parametrize("path", [None, 5, True, b"x"])
def test_what_is_no_path_is_not_looked_for_on_the_hub(no_hub, path):
    with pytest.raises(DtypeError, match=f"path must be a str or an os.PathLike, got {type(path).__name__}"):
        lowbit.from_pretrained(path)


@pytest.mark.parametrize("path", ["/nonexistent", "./nope", "../nope", "a/b/c", pathlib.Path("nope")])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(no_hub, path):
    with pytest.raises(FormatError, match=f"the checkpoint folder {path} does not exist"):
        lowbit.from_pretrained(path)


@pytest.mark.parametrize("path", ["gpt2", "a/b", "a.b/c"])
def test_a_name_is_looked_for_on_the_hub(no_hub, path):
    with pytest.raises(FormatError, match="looked for on the hub"):
        lowbit.from_pretrained(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": 5}, "config must be a transformers.PretrainedConfig, got int"),
        ({"config": "x"}, "config must be a transformers.PretrainedConfig, got str"),
        ({"quantization_config": "int4"}, "quantization_config must be a lowbit.LowbitConfig or a dict, got str"),
        ({"quantization_config": 4}, "quantization_config must be a lowbit.LowbitConfig or a dict, got int"),
    ],
)
def test_a_config_of_another_type_is_named(options, words):
    with pytest.raises(DtypeError, match=words):
        lowbit.from_pretrained(LLAMA, **options)


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(lowbit.LowbitError, match=r"pip install 'lowbit\[hf\]'"):
        lowbit.from_pretrained(LLAMA)


# ---- formats of others ----------------------------------------------------------------------------------------------


class Toy:
    """A format in which every second layer has 8 bits and another group size, and codes lie one a byte."""

    def __init__(self, weights):
        self.weights = weights

    def layers(self, keys, metadata=None):
        assert not metadata or "format" in metadata
        named = [key.removesuffix(".toy") for key in keys if key.endswith(".toy")]
        return [types.SimpleNamespace(name=n, tensors={"toy": f"{n}.toy"}, settings={}) for n in named]

    def decode(self, layer, tensors):
        assert torch.equal(tensors["toy"], self.weights[layer.name].unpack())
        return self.weights[layer.name]


def toy_checkpoint(kind, folder):
    """Save a model whose Linears lie as codes, one a byte; returns what they mean."""
    model = small(kind)
    model.save_pretrained(folder, max_shard_size="60KB")
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for key in [k for k in tensors if k.endswith(".weight") and tensors[k].dim() == 2]:
            name = key.removesuffix(".weight")
            if "embed" in name or name.endswith((".mlp.gate", "_moe.gate")) or "layers.1.self_attn.k_proj" in name:
                continue
            weight = tensors.pop(key)
            odd = name.endswith(("q_proj", "down_proj", "w2"))
            qt = lowbit.quantize(weight, "int8" if odd else "uint3", group_size=16 if odd else 32, method="rtn")
            if name.endswith("v_proj"):  # act-order
                perm = torch.randperm(qt.shape[1], generator=torch.Generator().manual_seed(1)).int()
                more = {"dtype": qt.dtype, "group_size": qt.group_size, "shape": qt.shape, "perm": perm}
                qt = lowbit.QuantTensor(qt.codes, qt.scales, qt.zeros, **more)
            weights[name], tensors[f"{name}.toy"] = qt, qt.unpack()
        save_file(tensors, path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    held = {key: path.name for path in folder.glob("*.safetensors") for key in load_file(path)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": held}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toy", "bits": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_another_format_becomes_lowbits_own(kind, tmp_path, monkeypatch):
    weights = toy_checkpoint(kind, tmp_path / "toy")
    found = types.ModuleType("lowbit.checkpoint.formats")
    found.find = lambda config: Toy(weights) if config["quantization_config"]["quant_method"] == "toy" else None
    monkeypatch.setitem(sys.modules, "lowbit.checkpoint.formats", found)
    model = lowbit.from_pretrained(tmp_path / "toy")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, lowbit.Linear)}
    assert len(layers) == len(weights) and "lm_head" in layers
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, qt in weights.items():
        owner, _, last = name.replace("block_sparse_moe", "mlp").rpartition(".")
        assert layers[f"{owner}.{names.get(last, last)}".strip(".")].quant_tensor() == qt, name
    assert type(model.model.layers[1].self_attn.k_proj) is torch.nn.Linear
    model.save_pretrained(tmp_path / "native")
    monkeypatch.delitem(sys.modules, "lowbit.checkpoint.formats")
    again = lowbit.from_pretrained(tmp_path / "native")
    assert torch.equal(logits(again), logits(model))


def test_an_unknown_format_is_refused(tmp_path, monkeypatch):
    toy_checkpoint("qwen3_moe", tmp_path / "toy")
    found = types.ModuleType("lowbit.checkpoint.formats")
    found.find = lambda config: None
    monkeypatch.setitem(sys.modules, "lowbit.checkpoint.formats", found)
    with pytest.raises(FormatError, match="in a format that this lowbit does not read"):
        lowbit.from_pretrained(tmp_path / "toy")
