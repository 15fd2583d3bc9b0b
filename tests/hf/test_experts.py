"""Risk: a mixture's experts get each other's weights, lose their order on disk, or a gate's rows are mixed up."""

import copy
import json
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import LowbitConfig, SchemeError

from .models import TOKENS, rounded, small

KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe")
OPTIONS = {"group_size": 32, "method": "rtn"}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def settings(name):
    return None if "lm_head" in name or "router" in name else ("int4", 32)


@pytest.fixture(params=KINDS)
def source(request, tmp_path):
    model = small(request.param)
    model.save_pretrained(tmp_path / "src", max_shard_size="60KB")
    return model, tmp_path / "src"


def test_on_disk_and_on_the_fly_they_are_what_the_reference_rounds_to(source, tmp_path):
    model, src = source
    oracle = rounded(copy.deepcopy(model), settings)
    lowbit.quantize_checkpoint(src, tmp_path / "q", "int4", **OPTIONS)
    from_disk = lowbit.from_pretrained(tmp_path / "q")
    flying = AutoModelForCausalLM.from_pretrained(src, quantization_config=LowbitConfig("int4", **OPTIONS))
    for found in (from_disk, flying):
        torch.testing.assert_close(logits(found), logits(oracle), rtol=1e-5, atol=3e-6)
        experts = [m for m in found.modules() if hasattr(m, "lowbit_experts")]
        assert len(experts) == 2 and not [
            n for n, _ in found.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))
        ]
        found.save_pretrained(tmp_path / "again", max_shard_size="50KB")
        assert torch.equal(logits(lowbit.from_pretrained(tmp_path / "again")), logits(found))
        for path in (tmp_path / "again").iterdir():
            path.unlink()
        for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
            assert torch.equal(logits(again), logits(found))


def test_they_can_have_settings_of_their_own(tmp_path):
    small("qwen3_moe").save_pretrained(tmp_path / "src")
    dynamic = {r"layers\.0\.mlp\.experts": None, r"experts\.(\d+\.)?down_proj": {"dtype": "uint3"}}
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int4", **OPTIONS, dynamic=dynamic)
    held = load_file(tmp_path / "q" / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.zeros" in held
    assert "model.layers.1.mlp.experts.3.up_proj.qweight" in held
    assert "model.layers.1.mlp.experts.3.up_proj.zeros" not in held
    assert not [name for name in held if "layers.0.mlp.experts" in name and not name.endswith(".weight")]
    found = lowbit.from_pretrained(tmp_path / "q")
    expected = {"down_proj": ("uint3", 32), "gate_proj": ("int4", 32), "up_proj": ("int4", 32)}
    assert {n.rpartition(".")[2]: (m.scheme.weight.name, 32) for n, m in found.named_modules() if ".experts." in n
            and isinstance(m, lowbit.Linear)} == expected  # fmt: skip


def test_a_config_that_does_not_say_how_they_lie_is_enough(tmp_path):
    small("mixtral").save_pretrained(tmp_path / "src")
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int4", **OPTIONS)
    expected = logits(lowbit.from_pretrained(tmp_path / "q"))
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"].pop("experts") == "split"
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(lowbit.from_pretrained(tmp_path / "q")), expected)


def test_all_or_none_of_a_layer(tmp_path):
    small("qwen3_moe").save_pretrained(tmp_path / "src")
    with pytest.raises(SchemeError, match="quantized all or none, got 1 of 12"):
        lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", skip=[r"experts\.2\.up_proj"], group_size=32)
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", skip=["experts"], **OPTIONS)
    found = lowbit.from_pretrained(tmp_path / "q")
    oracle = rounded(small("qwen3_moe"), lambda name: settings(name) if "experts" not in name else None)
    torch.testing.assert_close(logits(found), logits(oracle), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("flying", [False, True])
def test_an_entry_that_no_matrix_of_an_expert_has_is_refused(tmp_path, flying):
    small("qwen3_moe").save_pretrained(tmp_path / "src")

    def made(**settings):
        if flying:
            config = LowbitConfig("int4", **OPTIONS, **settings)
            return AutoModelForCausalLM.from_pretrained(tmp_path / "src", quantization_config=config)
        return lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int4", **OPTIONS, **settings)

    for entry in ("experts.gate", "layers.0.down_proj", "experts$"):
        with pytest.raises(SchemeError, match=f"skip entry '{re.escape(entry)}' matches no"):
            made(skip=[entry])
    made(skip=["layers.0.mlp.experts"], dynamic={r"^layers\.1\.mlp\.experts\.down_proj$": {"dtype": "int8"}})


def test_gradients_reach_the_input_of_the_experts(tmp_path):
    small("qwen3_moe").save_pretrained(tmp_path / "src")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "src", quantization_config=LowbitConfig("int8", **OPTIONS))
    oracle = rounded(small("qwen3_moe"), lambda name: ("int8", 32) if settings(name) else None)
    for found in (model, oracle):
        x = found.model.embed_tokens.weight
        x.grad = None
        found(TOKENS).logits.square().sum().backward()
    a, b = model.model.embed_tokens.weight.grad, oracle.model.embed_tokens.weight.grad
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
