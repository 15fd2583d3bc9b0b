"""Risk: a checkpoint on disk gets other weights than its layers do, is left half written, or harms its source.

The oracle quantizes each matrix by itself with lowbit.quantize and reads the files with the safetensors package.
"""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import DtypeError, FormatError, LowbitError, QuantizationError, SchemeError
from lowbit.checkpoint import native
from lowbit.checkpoint.convert import convert
from lowbit.checkpoint.export_files import export_checkpoint
from lowbit.cli import main

from .folders import fingerprint, tensors_of
from .models import LLAMA, small

INDEX = "model.safetensors.index.json"


def expect_weights(src, dst, settings):
    """Every tensor of dst is what settings(name) makes of src: (dtype, group size), or None for a copy."""
    expected, found = {}, tensors_of(dst)
    for name, tensor in tensors_of(src).items():
        stem = name.removesuffix(".weight")
        chosen = settings(stem) if name.endswith(".weight") and tensor.dim() == 2 else None
        if chosen is None:
            expected[name] = tensor
        else:
            qt = lowbit.quantize(tensor, chosen[0], group_size=chosen[1], method="rtn")
            expected |= {f"{stem}.qweight": qt.codes, f"{stem}.scales": qt.scales}
            expected |= {} if qt.zeros is None else {f"{stem}.zeros": qt.zeros}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_every_tensor_is_quantized_by_its_settings_or_copied(sharded, tmp_path):
    before, seen = fingerprint(sharded), []
    dynamic = {r"\.down_proj$": {"dtype": "uint3", "group_size": 32}, "model.layers.1.self_attn": None}
    dst = lowbit.quantize_checkpoint(
        sharded, tmp_path / "q", "int4", group_size=64, method="rtn", skip=[r"layers\.2\..*up_proj"], dynamic=dynamic,
        progress=lambda *step: seen.append(step),
    )  # fmt: skip

    def settings(name):
        if "proj" not in name or "layers.1.self_attn" in name or ("layers.2" in name and "up_proj" in name):
            return None
        return ("uint3", 32) if name.endswith("down_proj") else ("int4", 64)

    expect_weights(sharded, dst, settings)
    assert fingerprint(sharded) == before and [p.name for p in tmp_path.iterdir()] == ["q"]
    size = sum(t.nbytes for t in tensors_of(sharded).values())
    assert seen[-1][:2] == (size, size) and [done for done, *_ in seen] == sorted(done for done, *_ in seen)
    index = json.loads((dst / INDEX).read_text())
    assert index["weight_map"].keys() == tensors_of(dst).keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(dst / file)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(dst).values())
    quantized = {name for path in dst.glob("*.safetensors") for name in native.load(path)}
    assert quantized == {name[:-8] for name in index["weight_map"] if name.endswith(".qweight")}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (dst / name).read_bytes() == (sharded / name).read_bytes()


def test_the_first_entry_of_dynamic_wins_after_json_has_sorted_its_keys(tmp_path):
    dynamic = {r"\.up_proj$": "int8", r"\.layers\.1\.": "int3", r"\.down_proj$": "uint5"}
    dynamic = {pattern: {"dtype": dtype} for pattern, dtype in dynamic.items()}
    lowbit.quantize_checkpoint(LLAMA, tmp_path / "q", "int4", group_size=64, method="rtn", dynamic=dynamic)
    lowbit.from_pretrained(tmp_path / "q", dtype=torch.float32).save_pretrained(tmp_path / "again")
    for name in ("q", "again"):
        mlp = lowbit.from_pretrained(tmp_path / name, dtype=torch.float32).model.layers[1].mlp
        kinds = [layer.scheme.weight.name for layer in (mlp.up_proj, mlp.gate_proj, mlp.down_proj)]
        assert kinds == ["int8", "int3", "int3"]
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["dynamic_order"].pop()
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="dynamic_order must list the entries of dynamic"):
        lowbit.from_pretrained(tmp_path / "q")


def test_gpt2_weights_are_transposed(tmp_path):
    small("gpt2").save_pretrained(tmp_path / "src")
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int4", group_size=32, method="rtn")
    before, after = tensors_of(tmp_path / "src"), tensors_of(tmp_path / "q")
    name = next(name for name in before if name.endswith("0.mlp.c_fc.weight"))
    assert before[name].shape == (64, 256)
    qt = lowbit.quantize(before[name].T, "int4", group_size=32, method="rtn")
    assert torch.equal(after[name[:-6] + "qweight"], qt.codes) and torch.equal(after[name[:-6] + "scales"], qt.scales)
    assert not [name for name in after if "lm_head" in name and name.endswith("qweight")]


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_stays_unless_it_is_asked_for(tied, tmp_path):
    small("qwen3_moe", tie_word_embeddings=tied).save_pretrained(tmp_path / "src")
    options = {"group_size": 32, "method": "rtn"}
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "plain", **options)
    assert ("lm_head.weight" in tensors_of(tmp_path / "plain")) == (not tied)
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", **options, lm_head="int8")
    found, before = tensors_of(tmp_path / "q"), tensors_of(tmp_path / "src")
    weight = before["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(found["lm_head.qweight"], lowbit.quantize(weight, "int8", **options).codes)
    assert torch.equal(found["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert "lm_head.weight" not in found
    assert json.loads((tmp_path / "q" / "config.json").read_text())["tie_word_embeddings"] is False


def test_bfloat16_weights_get_bfloat16_scales(tmp_path):
    small("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "src")
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", "uint4", group_size=32)
    kinds = {t.dtype for name, t in tensors_of(tmp_path / "q").items() if name.endswith((".scales", ".zeros"))}
    assert kinds == {torch.bfloat16}
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q32", "uint4", group_size=32, scale_dtype="float32")
    kinds = {t.dtype for name, t in tensors_of(tmp_path / "q32").items() if name.endswith((".scales", ".zeros"))}
    assert kinds == {torch.float32}


@pytest.mark.parametrize("scale_dtype, group_size", [("float8_e8m0fnu", 32), ("float8_e4m3fn", 16)])
def test_scales_of_8_bits_come_back_as_they_were_made(scale_dtype, group_size, tmp_path):
    made, plain = {"group_size": group_size, "method": "rtn"}, tensors_of(LLAMA)
    options = ["--group-size", str(group_size), "--method", "rtn", "--scale-dtype", scale_dtype]
    assert main(["quantize", str(LLAMA), str(tmp_path / "cli"), "--dtype", "float4_e2m1", *options]) == 0
    lowbit.quantize_checkpoint(LLAMA, tmp_path / "q", "float4_e2m1", **made, scale_dtype=scale_dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "cli" / name).read_bytes() == (tmp_path / "q" / name).read_bytes()
    config = lowbit.LowbitConfig("float4_e2m1", **made, scale_dtype=scale_dtype)
    arrived = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32, quantization_config=config)
    arrived.save_pretrained(tmp_path / "again")
    for folder in ("q", "again"):
        # Why bfloat16 too: transformers makes layers, and casts what it loads, in the type of the model.
        for dtype in (torch.float32, torch.bfloat16):
            loaded = lowbit.from_pretrained(tmp_path / folder, dtype=dtype)
            layers = {name: m for name, m in loaded.named_modules() if isinstance(m, lowbit.Linear)}
            assert len(layers) == 28
            for name, layer in layers.items():
                weight = plain[f"{name}.weight"]
                expected = lowbit.quantize(weight, "float4_e2m1", **made, scale_dtype=getattr(torch, scale_dtype))
                assert layer.quant_tensor() == expected


# ---- what can go wrong with the source -----------------------------------------------------------------------------


def spoil(folder, kind):
    first = sorted(folder.glob("*.safetensors"))[1]
    if kind == "shard missing":
        first.unlink()
    elif kind == "shard cut off":
        first.write_bytes(first.read_bytes()[:-100])
    elif kind == "shard a pickle":
        first.write_bytes(pickle.dumps({"weight": [1] * 1000}))
    elif kind == "index elsewhere":
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = "../model.safetensors"
        (folder / INDEX).write_text(json.dumps(index))
    elif kind == "tensor missing":
        tensors = load_file(first)
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, first, {"format": "pt"})
    elif kind == "tensor misplaced":
        tensors = load_file(first)
        tensors["stray"] = torch.ones(2)
        save_file(tensors, first, {"format": "pt"})
    elif kind == "wrong shape":
        tensors = load_file(first)
        name = next(name for name in tensors if "proj" in name)
        save_file({**tensors, name: tensors[name][:-1].contiguous()}, first, {"format": "pt"})
    elif kind == "whole numbers":
        tensors = load_file(first)
        name = next(name for name in tensors if "proj" in name)
        save_file({**tensors, name: tensors[name].to(torch.int8)}, first, {"format": "pt"})
    elif kind == "not a number":
        tensors = load_file(first)
        next(t for name, t in tensors.items() if "proj" in name)[1, 1] = float("nan")
        save_file(tensors, first, {"format": "pt"})
    elif kind == "only pickles":
        for path in [*folder.glob("*.safetensors"), folder / INDEX]:
            path.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    elif kind == "quantized":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    elif kind == "unknown architecture":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    elif kind == "no config":
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("shard missing", FormatError, "lacks 1 of "),
        ("shard cut off", FormatError, "is cut off"),
        ("shard a pickle", FormatError, "looks like a pickle, which is never opened"),
        ("index elsewhere", FormatError, "must map names of tensors to"),
        ("tensor missing", FormatError, "lacks 1 tensors that"),
        ("tensor misplaced", FormatError, "holds stray, which"),
        ("wrong shape", FormatError, "must have shape"),
        ("whole numbers", FormatError, "must be float16, bfloat16 or float32, got int8"),
        ("not a number", QuantizationError, r"model\.layers\.\d.*proj: .*finite"),
        ("only pickles", FormatError, "holds pickles, which are never opened"),
        ("quantized", FormatError, "is already quantized"),
        ("unknown architecture", FormatError, "'NoSuchModel', which transformers"),
        ("no config", FormatError, "config.json"),
    ],
)
def test_a_bad_source_is_named_and_untouched_and_nothing_is_left(sharded, tmp_path, kind, error, words):
    shutil.copytree(sharded, tmp_path / "src")
    spoil(tmp_path / "src", kind)
    before = fingerprint(tmp_path / "src")
    with pytest.raises(error, match=words) as caught:
        lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", group_size=64, method="rtn")
    assert "\n" not in str(caught.value)
    assert fingerprint(tmp_path / "src") == before and not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int9"}, "int9"),
        ({"group_size": 48}, "48"),
        ({"method": "magic"}, "magic"),
        ({"method": "gptq"}, "'gptq' needs calibration"),
        ({"method": "awq"}, "'awq' needs calibration"),
        ({"lm_head": "int0"}, "int0"),
        ({"skip": ["layers.9"]}, "skip entry 'layers.9' matches no"),
        ({"skip": ["model.layers.3.v_proj"]}, "skip entry 'model.layers.3.v_proj' matches no"),
        ({"dynamic": {"layers.3.v_proj": None}}, "dynamic entry 'layers.3.v_proj' matches no"),
        ({"skip": ["lm_head2"]}, "near: lm_head$"),
        ({"dynamic": {"up_proj": {"method": "magic"}}}, "up_proj: no quantization method is called 'magic'"),
        ({"dynamic": {"up_proj": {"zero_kind": "zero"}}}, "up_proj: int4 is quantized with zero_kind 'none'"),
        ({"dynamic": {"up_proj": {"perm": True}}}, "perm must be false"),
        ({"group_size": None}, "group_size must be a whole number, got None"),
        ({"dynamic": {"upp_proj": None}}, "dynamic entry 'upp_proj' matches no"),
        ({"dynamic": {"up_proj": {"bits": 3}}}, "no setting 'bits'"),
        ({"skip": ["model"]}, "got none"),
        ({"device": "nowhere"}, "nowhere"),
        ({"device": "meta"}, "meta"),
        ({"scale_dtype": "int8"}, "int8"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(tmp_path, options, words):
    with pytest.raises(LowbitError, match=words):
        lowbit.quantize_checkpoint(LLAMA, tmp_path / "q", **{"group_size": 64, "method": "rtn", **options})
    assert not list(tmp_path.iterdir())


def test_the_target_must_be_new_and_outside(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "src")
    (tmp_path / "there").mkdir()
    for dst, words in (
        (tmp_path / "there", "exists already"),
        (tmp_path / "src", "must not lie inside|exists"),
        (tmp_path / "src" / "q", "must not lie inside"),
        (tmp_path / "no" / "q", "does not exist"),
    ):
        with pytest.raises(LowbitError, match=words):
            lowbit.quantize_checkpoint(tmp_path / "src", dst)
    with pytest.raises(FormatError, match="does not exist"):
        lowbit.quantize_checkpoint(tmp_path / "nothing", tmp_path / "q")


@pytest.mark.parametrize("wrong", [None, 5, b"q"])
def test_what_is_no_path_is_named_with_its_argument(tmp_path, wrong):
    got = type(wrong).__name__
    for work in (lowbit.quantize_checkpoint, export_checkpoint, convert):
        with pytest.raises(DtypeError, match=f"^src must be a str or an os.PathLike, got {got}$"):
            work(wrong, tmp_path / "q")
        with pytest.raises(DtypeError, match=f"^dst must be a str or an os.PathLike, got {got}$"):
            work(LLAMA, wrong)
    assert not list(tmp_path.iterdir())


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_quantizes_and_says_how_much(tmp_path, capsys):
    words = ["--dtype", "uint3", "--group-size", "64", "--method", "rtn", "--lm-head", "int8"]
    words += ["--dynamic", '{"down_proj$": {"dtype": "int8"}}', "--skip", "layers.3"]
    assert main(["quantize", str(LLAMA), str(tmp_path / "q"), *words]) == 0
    shown = capsys.readouterr()
    assert "MB of weights, from 2.7 MB" in shown.out and "100%" in shown.err
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "lowbit" and config["format"] == 1
    held = native.load(tmp_path / "q" / "model.safetensors")
    assert {qt.dtype.name for qt in held.values()} == {"uint3", "int8"} and "lm_head" in held
    assert not [name for name in held if "layers.3" in name]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing", "q"], "does not exist"),
        ([str(LLAMA), "q", "--dynamic", "{"], "--dynamic must be JSON"),
        ([str(LLAMA), "q", "--method", "gptq"], "needs calibration"),
        ([str(LLAMA), "q", "--dtype", "int9"], "int9"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(tmp_path, capsys, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("lowbit quantize: ") and expected in shown.err


def test_method_of_one_layer_needs_calibration_too(tmp_path):
    with pytest.raises(SchemeError, match="needs calibration"):
        lowbit.quantize_checkpoint(LLAMA, tmp_path / "q", dynamic={"up_proj$": {"method": "gptq"}})
