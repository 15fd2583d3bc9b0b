"""Risk: adapters on packed weights get wrong gradients, change frozen weights, or are merged into nothing."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import LowbitConfig, SchemeError

from .models import LLAMA, TOKENS, rounded

peft = pytest.importorskip("peft", reason="LoRA needs peft, which is no part of any extra")

OPTIONS = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


def chosen(name):
    return ("int4", 64) if "proj" in name else None


def adapted(model):
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **OPTIONS))


@pytest.fixture(params=["int4"])
def pair():
    """The adapted quantized model, and the adapted float model of the same weights."""
    settings = LowbitConfig("int4", group_size=64, method="rtn")
    quantized = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32, quantization_config=settings)
    float_ = rounded(AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32), chosen)
    return adapted(quantized), adapted(float_)


def frozen(model):
    return {n: t.clone() for n, t in model.state_dict().items() if "lora" not in n}


def adapters(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def test_gradients_and_training_are_those_of_the_float_model(pair):
    before = frozen(pair[0])
    for model in pair:
        model.train()
        optimizer = torch.optim.SGD(adapters(model).values(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model.loss = model(TOKENS, labels=TOKENS).loss
            model.loss.backward()
            optimizer.step()
    mine, theirs = adapters(pair[0]), adapters(pair[1])
    assert mine.keys() == theirs.keys() and len(mine) == 2 * 28
    for name, parameter in mine.items():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=2e-2, atol=1e-3)
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-3, atol=1e-4)
    after = frozen(pair[0])
    assert before.keys() == after.keys() and all(torch.equal(t, after[n]) for n, t in before.items())


def test_preparing_for_training_leaves_scales_alone(pair):
    settings = LowbitConfig("int4", group_size=64, method="rtn")
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.bfloat16, quantization_config=settings)
    layer = model.model.layers[0].mlp.up_proj
    before, packed = layer.quant_tensor(), layer.layout
    model = adapted(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))
    assert layer.quant_tensor() == before and layer.layout == packed
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for n, p in adapters(model).items() if "lora" in n)


@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter", "safe"])
def test_merging_is_refused_and_harms_nothing(pair, how):
    model = pair[0].eval()
    with torch.no_grad():
        before = model(TOKENS).logits
    with pytest.raises(SchemeError, match="no float weight to change or merge into; dequantize the model first"):
        if how == "merge_adapter":
            model.merge_adapter()
        else:
            copy.deepcopy(model).merge_and_unload(safe_merge=how == "safe")
    if how != "merge_adapter":
        with torch.no_grad():
            assert torch.equal(model(TOKENS).logits, before)


def test_an_adapter_is_saved_and_loaded_again(pair, tmp_path):
    model = pair[0].eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
    model.save_pretrained(tmp_path / "adapter")
    lowbit.quantize_checkpoint(LLAMA, tmp_path / "q", "int4", group_size=64, method="rtn")
    base = lowbit.from_pretrained(tmp_path / "q", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, expected, rtol=1e-5, atol=1e-4)


def test_a_dequantized_model_can_be_merged(tmp_path):
    settings = LowbitConfig("int4", group_size=64, method="rtn")
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32, quantization_config=settings)
    model.dequantize()
    model = adapted(model).eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-3, atol=1e-3)
