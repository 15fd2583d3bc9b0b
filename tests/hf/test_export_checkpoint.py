"""Risk: an exported checkpoint is one that another program loads with other values, or cannot load, or half of one."""

import hashlib
import json
import shutil

import pytest
import torch
import transformers
from formats import test_convert, test_gptq
from formats.words import int32, planes
from safetensors.torch import load_file, save_file

import lowbit
from lowbit import FormatError, LowbitError, reference
from lowbit.checkpoint import export_files, native
from lowbit.checkpoint.convert import convert
from lowbit.checkpoint.export_files import export_checkpoint
from lowbit.cli import main

from .models import LLAMA, TOKENS, small

INDEX = "model.safetensors.index.json"
ALIKE = {"dtype": "uint4", "group_size": 64, "method": "rtn", "scale_dtype": "float16"}
#: Scheme of all, another of some, a third of one layer, floats among quantized layers, the output layer.
MIXED = {
    "dtype": "int4", "group_size": 64, "method": "rtn", "scale_dtype": "float16", "skip": [r"layers\.0\.mlp\.up_proj"],
    "dynamic": {r"\.down_proj$": {"dtype": "uint3"},
        r"layers\.1\.self_attn\.q_proj": {"dtype": "int8", "group_size": -1}},
    "lm_head": "int8",
}  # fmt: skip
#: Without zeros, and of widths that compressed-tensors lays out alike in all of its versions; of others.
EVEN = {**MIXED, "dynamic": {r"\.down_proj$": {"dtype": "int8"}, r"\.v_proj$": {"dtype": "int2", "group_size": 32}}}
#: Floats in MX formats, of two widths, beside integers.
MX = {
    **MIXED, "dtype": "float4_e2m1", "group_size": 32, "scale_dtype": "float8_e8m0fnu",
    "dynamic": {r"\.down_proj$": {"dtype": "float8_e4m3"}, r"\.v_proj$": {"dtype": "float6_e2m3"}},
    "lm_head": "float8_e4m3",
}  # fmt: skip
ODD = {**MIXED, "dynamic": {r"\.down_proj$": {"dtype": "int3"}, r"\.v_proj$": {"dtype": "int5", "group_size": -1}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of lowbit by name; "mixed" lies in several files."""
    made = tmp_path_factory.mktemp("export")
    transformers.AutoModelForCausalLM.from_pretrained(LLAMA).save_pretrained(made / "src", max_shard_size="600KB")
    transformers.AutoTokenizer.from_pretrained(LLAMA).save_pretrained(made / "src")
    (made / "src" / "generation_config.json").write_text('{"eos_token_id": 12}')
    for name, settings in (("mixed", MIXED), ("even", EVEN), ("odd", ODD), ("mx", MX)):
        lowbit.quantize_checkpoint(made / "src", made / name, **settings)
    lowbit.quantize_checkpoint(LLAMA, made / "alike", **ALIKE)
    return made


def weights(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= native.load(path)
    return found


def digest(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


BACK = [(name, format) for name in ("mixed", "alike", "odd") for format in export_files.FORMATS]


@pytest.mark.parametrize("name, format", [*BACK, ("mx", "compressed-tensors")])
def test_what_is_exported_converts_back_to_the_same_weights(folders, name, format, tmp_path):
    before, seen = digest(folders / name), []
    export_checkpoint(folders / name, tmp_path / "out", format, progress=lambda *a: seen.append(a))
    assert digest(folders / name) == before and seen[-1][0] == seen[-1][1]
    convert(tmp_path / "out", tmp_path / "back")
    expected = weights(folders / name)
    assert weights(tmp_path / "back") == expected
    model = lowbit.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(model), logits(lowbit.from_pretrained(folders / name, dtype=torch.float32)))
    layers = {name for name, module in model.named_modules() if isinstance(module, lowbit.Linear)}
    assert layers == expected.keys()


def test_the_folder_is_whole(folders, tmp_path, capsys):
    assert main(["export", str(folders / "mixed"), str(tmp_path / "out"), "--format", "gptq"]) == 0
    assert "MB of weights as gptq" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (folders / "mixed").iterdir()}
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folders / "mixed" / name).read_bytes()
    listed, size = json.loads((tmp_path / "out" / INDEX).read_text()), 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        held = load_file(path)
        assert held and all(listed["weight_map"].pop(key) == path.name for key in held)
        size += sum(t.numel() * t.element_size() for t in held.values())
    assert not listed["weight_map"] and listed["metadata"]["total_size"] == size
    config, before = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", folders / "mixed"))
    settings = config.pop("quantization_config")
    del before["quantization_config"]
    assert config == before and config["tie_word_embeddings"] is False
    down = {f"+:^model\\.layers\\.{i}\\.mlp\\.down_proj$": (3, False, 64) for i in range(4)}
    others = {r"+:^model\.layers\.1\.self_attn\.q_proj$": (8, True, -1), r"+:^lm_head$": (8, True, 64)}
    got = {key: (s["bits"], s["sym"], s["group_size"]) for key, s in settings.pop("dynamic").items() if s}
    assert got == down | others and settings == {
        "quant_method": "gptq", "checkpoint_format": "gptq_v2", "pack_dtype": "int32", "bits": 4, "group_size": 64,
        "sym": True, "desc_act": False, "lm_head": True,
    }  # fmt: skip


def test_five_bits_make_all_of_gptq_planar(folders, tmp_path):
    export_checkpoint(folders / "odd", tmp_path / "out", "gptq")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["checkpoint_format"] == "gptq_p"
    three = weights(folders / "odd")["model.layers.0.mlp.down_proj"]
    held = {
        name: tensor for path in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    words = held["model.layers.0.mlp.down_proj.qweight"]
    assert words[:, 0].tolist() == int32([planes(three.unpack()[0].tolist(), 3)])[0].tolist()


def test_floats_are_left_alone_by_name(folders, tmp_path):
    for name, format in (("mixed", "gptq"), ("mixed", "compressed-tensors"), ("alike", "compressed-tensors")):
        export_checkpoint(folders / name, tmp_path / f"{name}-{format}", format)
    held = json.loads((tmp_path / "mixed-gptq" / "config.json").read_text())["quantization_config"]
    assert [key for key in held["dynamic"] if key.startswith("-:")] == [r"-:^model\.layers\.0\.mlp\.up_proj$"]
    held = json.loads((tmp_path / "mixed-compressed-tensors" / "config.json").read_text())["quantization_config"]
    assert sorted(held["ignore"]) == ["model.embed_tokens", "model.layers.0.mlp.up_proj"]
    held = json.loads((tmp_path / "alike-compressed-tensors" / "config.json").read_text())["quantization_config"]
    assert sorted(held["ignore"]) == ["lm_head", "model.embed_tokens"]
    assert [group["targets"] for group in held["config_groups"].values()] == [["Linear"]]


@pytest.mark.parametrize("name", ["alike", "even", "odd", "mx"])
def test_compressed_tensors_loads_it_into_transformers(folders, name, tmp_path):
    package = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    if name in ("odd", "mx") and tuple(map(int, package.__version__.split(".")[:2])) < (0, 18):
        pytest.skip("before 0.18 three and five bits are laid out otherwise, and some MX formats are not known")
    export_checkpoint(folders / name, tmp_path / "out")
    options = {}
    if name == "alike":
        # Why: modules of 0.20 have no room for packed zeros; such weights can only be dequantized while they load.
        if not hasattr(transformers.CompressedTensorsConfig(), "dequantize"):
            pytest.skip("this transformers does not dequantize them while it loads")
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    # Why: its weights in MX formats are bfloat16, whatever x is.
    dtype = torch.bfloat16 if name == "mx" else torch.float32
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype, **options)
    expected = lowbit.from_pretrained(folders / name, dtype=dtype)
    # Why wider with options: weights are rounded to the type of their scales, float16.
    close = {"rtol": 1e-2, "atol": 1e-2} if options else {"rtol": 1e-4, "atol": 1e-4}
    close = {"rtol": 5e-2, "atol": 5e-2} if name == "mx" else close
    torch.testing.assert_close(logits(loaded), logits(expected), **close)
    for full, qt in weights(folders / name).items() if options else ():
        weight = loaded.get_submodule(full).weight.float()
        torch.testing.assert_close(weight, reference.dequantize(qt).float(), rtol=1e-3, atol=1e-6)


class Stop(Exception):
    pass


def stop_after(count):
    def progress(*_):
        nonlocal count
        count -= 1
        if count == 0:
            raise Stop

    return progress


def test_a_run_that_was_cut_off_goes_on_and_leaves_nothing_that_loads(folders, tmp_path, monkeypatch):
    export_checkpoint(folders / "mixed", tmp_path / "whole")
    with pytest.raises(Stop):
        export_checkpoint(folders / "mixed", tmp_path / "out", progress=stop_after(40))
    assert [p.name for p in tmp_path.iterdir() if p.name != "whole"] == [".out.partial"]
    kept = {p.name for p in (tmp_path / ".out.partial").glob("*.safetensors")}
    assert kept and not (tmp_path / ".out.partial" / "config.json").exists()
    made, real = [], export_files._write_shard
    monkeypatch.setattr(export_files, "_write_shard", lambda path, *rest: made.append(path.name) or real(path, *rest))
    export_checkpoint(folders / "mixed", tmp_path / "out")
    assert sorted([*kept, *made]) == sorted(p.name for p in (folders / "mixed").glob("*.safetensors"))
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_another_format_does_not_use_what_the_first_one_left(folders, tmp_path):
    with pytest.raises(Stop):
        export_checkpoint(folders / "mixed", tmp_path / "out", progress=stop_after(40))
    export_checkpoint(folders / "mixed", tmp_path / "out", "gptq")
    convert(tmp_path / "out", tmp_path / "back")
    assert weights(tmp_path / "back") == weights(folders / "mixed")


def quantized(**settings):
    def make(folder):
        lowbit.quantize_checkpoint(LLAMA, folder, **{"group_size": 64, "method": "rtn", **settings})

    return make


def fused(folder):
    small("gpt_oss").save_pretrained(folder / "src")
    lowbit.quantize_checkpoint(folder / "src", folder / "q", group_size=32, method="rtn")


def saved_by_transformers(folder):
    """As quantize_checkpoint writes it, but without what only lowbit writes into the header."""
    quantized()(folder)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})


def foreign(folder):
    quantized()(folder.with_name("first"))
    export_checkpoint(folder.with_name("first"), folder)


def cut(folder):
    quantized()(folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


REFUSED = {
    "floats": (lambda folder: shutil.copytree(LLAMA, folder), "lowbit', got None; quantize it first"),
    "another format": (foreign, "got 'compressed-tensors'; `lowbit convert` it first"),
    "no descriptions": (saved_by_transformers, "expected files whose metadata describe each weight, .* got none"),
    "cut off": (cut, "model.safetensors: .*"),
    "float codes": (quantized(dtype="float4_e2m1"), r"model\.layers\.\d\.\w+\.\w+: .* got float4_e2m1"),
    "minimum": (quantized(dtype="uint4", zero_kind="min"), r"model\.layers\.\d\.\w+\.\w+: .* zero_kind 'min'"),
    "one layer of floats": (
        quantized(dynamic={r"1\.mlp\.up_proj": {"dtype": "float5_e2m2"}}),
        r"^model\.layers\.1\.mlp\.up_proj: .* got fl",
    ),
    "zeros with a fraction": (quantized(dtype="uint4", method="hqq"), r"model\.layers\.\d\.\w+\.\w+: .* whole zeros"),
}  # fmt: skip


@pytest.mark.parametrize("make, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(make, words, tmp_path):
    make(tmp_path / "q")
    for format in export_files.FORMATS:
        with pytest.raises(FormatError, match=words):
            export_checkpoint(tmp_path / "q", tmp_path / "out", format)
        assert not (tmp_path / "out").exists()


def test_experts_whose_gate_and_up_are_one_matrix_are_refused(tmp_path):
    fused(tmp_path)
    with pytest.raises(FormatError, match=r"experts\.0\.gate_up_proj: gate and up projection are one matrix"):
        export_checkpoint(tmp_path / "q", tmp_path / "out")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_that_lie_apart_are_exported(kind, tmp_path):
    small(kind).save_pretrained(tmp_path / "src")
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", group_size=32, method="rtn")
    export_checkpoint(tmp_path / "q", tmp_path / "out")
    first, second = (lowbit.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("q", "out"))
    assert torch.equal(logits(first), logits(second))


def test_an_order_of_columns_goes_to_gptq_alone(tmp_path):
    expected = test_convert.folder(tmp_path / "gptq", order=test_gptq.shuffled(96), version="gptq_v2")
    convert(tmp_path / "gptq", tmp_path / "q")
    assert all(qt.perm is not None for qt in weights(tmp_path / "q").values())
    export_checkpoint(tmp_path / "q", tmp_path / "out", "gptq")
    convert(tmp_path / "out", tmp_path / "back")
    found = weights(tmp_path / "back")
    assert all(torch.equal(reference.dequantize(found[name]), weight) for name, weight in expected.items())
    with pytest.raises(FormatError, match=r"model\.layers\.\d\.\w+: pack-quantized holds columns in their order, got"):
        export_checkpoint(tmp_path / "q", tmp_path / "ct")


def test_names_and_places_are_checked_first(folders, tmp_path):
    with pytest.raises(FormatError, match="no format to export to is called 'gptp'; expected gptq"):
        export_checkpoint(folders / "alike", tmp_path / "out", "gptp")
    with pytest.raises(LowbitError, match="must not lie inside"):
        export_checkpoint(folders / "alike", folders / "alike" / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(LowbitError, match="exists already"):
        export_checkpoint(folders / "alike", tmp_path / "out")
