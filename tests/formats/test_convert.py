"""Risk: a converted checkpoint has other values, lacks tensors, or is half there; the original changes."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import FormatError, InexactError, QuantTensor, reference
from lowbit.checkpoint import convert as module
from lowbit.checkpoint import native
from lowbit.checkpoint.convert import convert, quantization_config
from lowbit.checkpoint.foreign import INDEX
from lowbit.checkpoint.safetensors_file import Reader, write
from lowbit.checkpoint.settings import Settings
from lowbit.cli import main

from . import test_bitsandbytes, test_gguf, test_gptq

FLOATS = {
    "model.embed_tokens.weight": torch.randn(7, 32).bfloat16(),
    "model.norm.weight": torch.ones(32).bfloat16(),
    "model.layers.0.up.bias": torch.ones(32),
    "lm_head.weight": torch.randn(7, 32).half(),
}


def folder(path: Path, layers=("model.layers.0.up", "model.layers.0.down", "model.layers.1.up"), shards=3, **options):
    """A GPTQ checkpoint; its tensors take turns in the shards. Returns the weights by layer."""
    path.mkdir()
    tensors, weights = dict(FLOATS), {}
    for layer in layers:
        config, held, weights[layer] = test_gptq.checkpoint(4, **options)
        tensors.update({f"{layer}.{role}": tensor for role, tensor in held.items()})
    files = [f"model-{i}.safetensors" for i in range(shards)]
    where = {key: files[i % shards] for i, key in enumerate(tensors)}
    for file in files:
        write(path / file, {key: t for key, t in tensors.items() if where[key] == file}, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"a pickle")
    return weights


def read(path: Path) -> tuple[dict[str, QuantTensor], dict[str, torch.Tensor]]:
    """The weights and the other tensors of a converted folder."""
    weights, others = {}, {}
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        with Reader(file) as reader:
            held = native.load(file) if "lowbit" in reader.metadata else {}
            names = {f"{name}.{part}" for name in held for part in native.FIELDS}
            others.update({key: reader.read(key) for key in reader.entries if key not in names})
        weights.update(held)
    if len(files) > 1:
        listed = json.loads((path / INDEX).read_text())["weight_map"]
        assert set(listed.values()) == {file.name for file in files}
        for file in files:
            with Reader(file) as reader:
                assert all(listed[key] == file.name for key in reader.entries)
    return weights, others


def digest(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}


@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000])
def test_values_stay_and_everything_comes_along(tmp_path, shard_bytes):
    weights = folder(tmp_path / "src")
    before, seen = digest(tmp_path / "src"), []
    counts = convert(tmp_path / "src", tmp_path / "dst", shard_bytes=shard_bytes, progress=lambda *a: seen.append(a))
    assert counts == {"exact": 3, "requantized": 0, "widened": 0, "copied": 4} and digest(tmp_path / "src") == before
    made, others = read(tmp_path / "dst")
    assert made.keys() == weights.keys() and others.keys() == FLOATS.keys()
    assert all(torch.equal(reference.dequantize(made[name]), weights[name]) for name in weights)
    assert all(torch.equal(others[key], FLOATS[key]) and others[key].dtype == FLOATS[key].dtype for key in FLOATS)
    files = {p.name for p in (tmp_path / "dst").iterdir()}
    assert {"config.json", "tokenizer.json"} < files and not files & {"pytorch_model.bin"}
    assert (len(list((tmp_path / "dst").glob("*.safetensors"))) > 1) == (shard_bytes == 3000)
    assert [done for done, _, _ in seen] == list(range(1, 8)) and {total for _, total, _ in seen} == {7}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "src"]


def test_the_config_says_what_the_layers_are(tmp_path):
    folder(tmp_path / "src", layers=["a.up", "a.down"])
    convert(tmp_path / "src", tmp_path / "dst")
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    config["quantization_config"]["skip"].sort()
    assert config == {
        "model_type": "llama",
        "quantization_config": {
            "quant_method": "lowbit", "format": 1, "dtype": "uint4", "group_size": 32, "zero_kind": "zero",
            "scale_dtype": "float16", "skip": ["lm_head", "model.embed_tokens"],
        },
    }  # fmt: skip


def test_an_output_layer_that_differs_in_more_than_its_type_says_so():
    plain = {"dtype": "uint4", "group_size": 32, "zero_kind": "min", "scale_dtype": "float32", "perm": False}
    head = {**plain, "dtype": "int6", "group_size": 16, "zero_kind": "none"}
    made = quantization_config({"a.up": plain, "b.up": plain, "lm_head": head}, [])
    assert made["lm_head"] == "int6" and made["dynamic"] == {"^lm_head$": {"group_size": 16}}
    made = quantization_config({"a.up": plain, "b.up": plain, "lm_head": plain}, [])
    assert made["dynamic"] == {"^lm_head$": {"zero_kind": "min"}}
    assert Settings.make(**made).of(["lm_head"], head=True)["zero_kind"] == "min"


def test_an_output_layer_with_zeros_goes_beside_scales_that_have_none():
    plain = {"dtype": "float4_e2m1", "group_size": 32, "zero_kind": "none", "scale_dtype": "float8_e8m0fnu"}
    head = {**plain, "dtype": "uint4", "zero_kind": "zero", "scale_dtype": "bfloat16"}
    made = quantization_config({"a.up": plain, "b.up": plain, "lm_head": head}, [])
    found = Settings.make(**made).of(["lm_head"], head=True)
    assert found["scale_dtype"] == "bfloat16" and Settings.scheme(found).zero_kind == "zero"
    with pytest.raises(lowbit.SchemeError, match="scales of float8_e8m0fnu go without zeros"):
        Settings.make(**{**made, "dynamic": {}})


def test_layers_that_differ_stand_under_dynamic():
    plain = {"dtype": "int4", "group_size": 128, "zero_kind": "none", "scale_dtype": "float16", "perm": False}
    plain["codebook"] = False
    other, ordered = {**plain, "dtype": "int8"}, {**plain, "perm": True}
    schemes = {f"l.{i}.up": plain for i in range(3)} | {"l.0.down": other, "l.1.down": other, "l.0.q": ordered}
    schemes |= {"l.1.q": plain, "lm_head": other}
    made = quantization_config(schemes, ["l", "embed"])
    assert made["dynamic"] == {r"(^|\.)down$": {"dtype": "int8"}, r"^l\.0\.q$": {"perm": True}}
    assert made["lm_head"] == "int8" and made["skip"] == ["^l$", "embed"]
    assert "perm" not in made and "codebook" not in made


def test_act_order_and_codebooks_are_kept(tmp_path):
    weights = folder(tmp_path / "src", order=test_gptq.shuffled(96))
    convert(tmp_path / "src", tmp_path / "dst")
    made, _ = read(tmp_path / "dst")
    assert all(torch.equal(reference.dequantize(made[name]), weights[name]) for name in weights)
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]["perm"] is True

    tensors, weight = test_bitsandbytes.four_bits(8, 128, 64)
    (tmp_path / "nf4").mkdir()
    write(tmp_path / "nf4" / "model.safetensors", {f"a.{role}": t for role, t in tensors.items()}, {})
    (tmp_path / "nf4" / "config.json").write_text(json.dumps({"quantization_config": test_bitsandbytes.CONFIG}))
    convert(tmp_path / "nf4", tmp_path / "nf4_dst")
    made, others = read(tmp_path / "nf4_dst")
    assert torch.equal(reference.dequantize(made["a"]), weight) and not others
    settings = json.loads((tmp_path / "nf4_dst" / "config.json").read_text())["quantization_config"]
    assert settings["codebook"] is True and settings["dtype"] == "uint4" and settings["zero_kind"] == "none"


def test_what_cannot_be_exact_needs_to_be_asked_for(tmp_path):
    weights = folder(tmp_path / "src", size=8)
    with pytest.raises(InexactError, match=r"^model\.layers\.\d\.\w+: groups must be .* got 8; .*--requantize"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]
    counts = convert(tmp_path / "src", tmp_path / "dst", requantize="int8", group_size=32, method="rtn")
    assert counts["requantized"] == 3
    made, _ = read(tmp_path / "dst")
    for name, weight in weights.items():
        assert made[name] == lowbit.quantize(weight.float(), "int8", group_size=32, method="rtn")


def test_the_command_that_the_error_names_does_it(tmp_path, capsys):
    folder(tmp_path / "src", size=8)
    command = ["convert", str(tmp_path / "src"), str(tmp_path / "dst")]
    assert main(command) == 2
    named = re.search(r"`lowbit (\w+) (--\w+) TYPE`", capsys.readouterr().err)
    assert main([named[1], *command[1:], named[2], "int8", "--group-size", "32"]) == 0
    assert "3 quantized anew" in capsys.readouterr().out
    # `lowbit quantize` has no such option, and says where one is needed
    assert main(["quantize", *command[1:2], str(tmp_path / "x")]) == 2
    assert "is already quantized; " in (said := capsys.readouterr().err) and "`lowbit convert`" in said


def test_old_configs_beside_config_json_count(tmp_path):
    folder(tmp_path / "src")
    config = json.loads((tmp_path / "src" / "config.json").read_text())
    (tmp_path / "src" / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    assert convert(tmp_path / "src", tmp_path / "dst")["exact"] == 3
    assert not (tmp_path / "dst" / "quantize_config.json").exists()


def test_gguf_files_keep_their_names_where_asked(tmp_path):
    data = test_gguf.data_of("Q4_K", 4)
    tensors = {"blk.0.attn_q.weight": (12, (2, 512), data), "norm.weight": (0, (2,), bytes(8))}
    (tmp_path / "m.gguf").write_bytes(test_gguf.file(tensors))
    convert(tmp_path / "m.gguf", tmp_path / "dst", gguf_names=True)
    made, others = read(tmp_path / "dst")
    assert torch.equal(reference.dequantize(made["blk.0.attn_q"]), test_gguf.values_of("Q4_K", data, 2, 512))
    assert list(others) == ["norm.weight"]
    assert not (tmp_path / "dst" / "config.json").exists()
    metadata = json.loads((tmp_path / "dst" / "gguf_metadata.json").read_text())
    assert metadata == {"general.architecture": "llama", "n": 7}


def rewrite(name, change):
    def apply(src):
        held = json.loads((src / name).read_text())
        (src / name).write_text(json.dumps(change(held) or held))

    return apply


def without(*names):
    return lambda src: [(src / name).unlink() for name in names]


SHARDS = [f"model-{i}.safetensors" for i in range(3)]
BAD = {
    "not a folder": (lambda src: os.rename(src, src.with_name("gone")), "expected a folder with config.json"),
    "no config": (without("config.json"), "has no config.json"),
    "float model": (
        rewrite("config.json", lambda c: {"model_type": "llama"}),
        "expected quantization_config of a format",
    ),
    "unknown format": (rewrite("config.json", lambda c: {"quantization_config": {"quant_method": "x"}}), "called 'x'"),
    "other format": (
        rewrite("config.json", lambda c: {"quantization_config": {"quant_method": "fp8"}}),
        "got none in 16",
    ),
    "shard missing": (without(SHARDS[1]), "names files that are not there: model-1.safetensors"),
    "only pickles": (without(INDEX, *SHARDS), r"got pytorch_model\.bin, which may hold a pickle and is never opened"),
    "outside": (rewrite(INDEX, lambda i: {"weight_map": {"a": "../x.safetensors"}}), "names files outside the folder"),
    "index of numbers": (rewrite(INDEX, lambda i: {"weight_map": {"a": 1}}), "must map the names of tensors to files"),
    "tensor lost": (
        rewrite(INDEX, lambda i: i["weight_map"].update(b=SHARDS[0])),
        "lacks 1 tensors that .* first is b",
    ),
    "a pickle as a shard": (lambda src: (src / SHARDS[0]).write_bytes(b"\x80\x04K\x01."), "a pickle|not a safetensors"),
    "a shard cut off": (lambda src: os.truncate(src / SHARDS[0], 2000), "cut off|leaves a hole|not a safetensors"),
    "a tensor twice": (lambda src: shutil.copy(src / SHARDS[0], src / SHARDS[1]), "which .* holds too"),
}


@pytest.mark.parametrize("damage, words", BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, damage, words, capsys):
    folder(tmp_path / "src")
    damage(tmp_path / "src")
    with pytest.raises(FormatError, match=words):
        convert(tmp_path / "src", tmp_path / "dst")
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "dst")]) == 2
    assert "lowbit convert: " in capsys.readouterr().err
    assert not [p for p in tmp_path.iterdir() if p.name not in ("src", "gone")]


def test_what_is_there_is_not_written_over(tmp_path):
    folder(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    with pytest.raises(FormatError, match="dst exists already"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not list((tmp_path / "dst").iterdir())


@pytest.mark.parametrize("step", ["_write_config", "quantize"])
def test_a_failure_at_any_step_leaves_nothing(tmp_path, monkeypatch, step):
    folder(tmp_path / "src", size=8)

    def fail(*_, **__):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(module, step, fail)
    with pytest.raises(OSError, match="No space"):
        convert(tmp_path / "src", tmp_path / "dst", requantize="int8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_the_command(tmp_path):
    folder(tmp_path / "src")
    command = [sys.executable, "-m", "lowbit", "convert", str(tmp_path / "src"), str(tmp_path / "dst")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(lowbit.__file__).parents[1])
    assert done.returncode == 0 and "3 weights, exact; 4 other tensors copied" in done.stdout, done.stderr
    for words, extra in {"int9": ["--requantize", "int9"], "--shard-size": ["--shard-size", "0"]}.items():
        done = subprocess.run([*command[:-1], str(tmp_path / "x"), *extra], capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
