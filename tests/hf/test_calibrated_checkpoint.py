"""Risk: a checkpoint quantized with calibration is not the model that quantize_model makes, or is left half written.

The oracle is the model in memory; its layers are tested in test_calibrate.py.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import lowbit
from lowbit import DtypeError, LowbitError
from lowbit.checkpoint import quantize_files
from lowbit.cli import main

from .models import LLAMA

IDS = torch.randint(0, 256, (12, 48), generator=torch.Generator().manual_seed(3))
SKIP = ("lm_head", "layers.0")


def float_model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(LLAMA, dtype="auto").eval()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_checkpoint_is_the_model_that_quantize_model_makes(tmp_path, method):
    settings = {"group_size": 64, "method": method, "dynamic": {"down_proj$": {"dtype": "uint4", "method": "rtn"}}}
    done = []
    lowbit.quantize_checkpoint(
        LLAMA,
        tmp_path / "q",
        "int3",
        skip=SKIP[1:],
        calibration=IDS,
        progress=lambda *step: done.append(step),
        **settings,
    )
    expected = lowbit.quantize_model(float_model(), "int3", skip=SKIP, calibration=IDS, **settings)
    loaded = lowbit.from_pretrained(tmp_path / "q", dtype="auto")
    layers = {name: m for name, m in expected.named_modules() if isinstance(m, lowbit.Linear)}
    assert layers and all(loaded.get_submodule(n).quant_tensor() == m.quant_tensor() for n, m in layers.items())
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected(IDS).logits), "a float weight that AWQ changed is missing"
    before = dict(float_model().named_parameters())
    norms = [name for name in before if "norm" in name]
    changed = any(not torch.equal(loaded.get_parameter(name), before[name]) for name in norms)
    assert changed == (method == "awq"), "the test sees no fold"
    assert done[-1][0] == done[-1][1] and any(name in layers for _, _, name in done)


def test_two_runs_write_the_same_bytes(tmp_path):
    for name in "ab":
        lowbit.quantize_checkpoint(LLAMA, tmp_path / name, "int2", group_size=32, method="gptq", calibration=IDS)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


def test_run_that_fails_leaves_nothing_and_the_next_one_goes_on_from_its_files(tmp_path, monkeypatch):
    settings = {"group_size": 32, "method": "gptq", "calibration": IDS}
    folder = tmp_path / "src"
    float_model().save_pretrained(folder, max_shard_size="600KB")
    write, calls = quantize_files.write, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(quantize_files, "write", failing)
    with pytest.raises(LowbitError, match="No space left"):
        lowbit.quantize_checkpoint(folder, tmp_path / "q", "int4", **settings)
    assert not (tmp_path / "q").exists()
    monkeypatch.setattr(quantize_files, "write", lambda *args: (calls.append(args), write(*args)))
    calls.clear()
    lowbit.quantize_checkpoint(folder, tmp_path / "q", "int4", **settings)
    assert len(calls) == len(list(folder.glob("*.safetensors"))) - 2
    calls.clear()
    with pytest.raises(LowbitError, match="exists already"):
        lowbit.quantize_checkpoint(folder, tmp_path / "q", "int4", **settings)
    assert not calls


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "gptq"}, "'gptq' needs calibration"),
        ({"method": "mse", "calibration": IDS}, "calibration is read by the methods gptq and awq"),
        ({"method": "gptq", "calibration": [1, 2]}, "must be a tensor of token ids, got list"),
        ({"method": "gptq", "calibration": IDS, "scale_dtype": "float32"}, "expected scale_dtype float16, got float32"),
        ({"method": "gptq", "calibration": IDS + 5000}, "calibration ids must be in 0..255"),
        ({"method": "gptq", "calibration": IDS, "dtype": "int9"}, "int9"),
    ],
)
def test_what_can_not_be_calibrated_is_one_sentence(tmp_path, settings, words):
    with pytest.raises(LowbitError, match=words) as error:
        lowbit.quantize_checkpoint(LLAMA, tmp_path / "q", settings.pop("dtype", "int4"), **settings)
    assert str(error.value).count("\n") == 0 and not (tmp_path / "q").exists()


def test_calibration_of_another_type_is_the_error_that_quantize_model_gives(tmp_path):
    for wrong in (5, [1, 2]):
        with pytest.raises(DtypeError, match=f"must be a tensor of token ids, got {type(wrong).__name__}"):
            lowbit.quantize_checkpoint(LLAMA, tmp_path / "q", method="gptq", calibration=wrong)


def test_command_reads_a_text(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    arguments = [
        "quantize",
        str(LLAMA),
        str(tmp_path / "q"),
        "--dtype",
        "int3",
        "--group-size",
        "64",
        "--method",
        "gptq",
    ]
    assert main([*arguments, "--calibration", str(text)]) == 0
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["method"] == "gptq"
    assert any(name.endswith("qweight") for name in load_file(tmp_path / "q" / "model.safetensors"))
    assert main([*arguments[:2], str(tmp_path / "r"), *arguments[3:]]) == 2
    assert "needs calibration" in capsys.readouterr().err
