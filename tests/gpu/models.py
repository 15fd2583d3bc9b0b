"""Small language models with random weights, and what a quantized one should compute: its weights as float64."""

from __future__ import annotations

import copy

import torch
import transformers

import lowbit

DEVICE, LAYOUT = "cuda", "nvidia"
IDS = torch.randint(0, 320, (16, 64), generator=torch.Generator().manual_seed(5))


def tiny(kind: str = "llama", dtype=torch.float32, layers: int = 4):
    """A model on the CPU; of kind "qwen2" some layers have a bias. Large weights make its predictions differ."""
    torch.manual_seed(0)
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[kind]
    made = model(
        config(
            vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.06,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():  # biases and norms that are not all alike
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.to(dtype).eval()


def layers_of(model) -> dict[str, lowbit.Linear]:
    """The quantized layers of a model, by full name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, lowbit.Linear)}


def same_weights(a, b) -> bool:
    """Whether two models have the same quantized layers, to the bit."""
    mine, theirs = ({name: m.quant_tensor().cpu() for name, m in layers_of(model).items()} for model in (a, b))
    return bool(mine) and mine == theirs


def dequantized(model, dtype=torch.float64):
    """The float model, on the CPU, of what a quantized model on any device holds."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    made = type(model)(config).to(dtype).eval()
    layers = layers_of(model)
    held = {n: p.detach().cpu() for n, p in model.named_parameters() if n.rpartition(".")[0] not in layers}
    for name, layer in layers.items():
        held[f"{name}.weight"] = layer.quant_tensor().cpu().dequantize(torch.float64)
        if layer.bias is not None:
            held[f"{name}.bias"] = layer.bias.detach().cpu()
    made.load_state_dict(held)
    return made


@torch.no_grad()
def logits(model, ids=IDS) -> torch.Tensor:
    """Of token ids, float64 on the CPU."""
    return model(ids.to(model.device)).logits.cpu().double()


def off(model, exact=None, ids=IDS) -> float:
    """How far the logits of a model are from those of what it holds, of all as a share of their norm."""
    expected = logits(dequantized(model) if exact is None else exact, ids)
    return float((logits(model, ids) - expected).norm() / expected.norm())


#: What ``off`` may be after a few layers in these types: some ten roundings of hidden states each.
OFF = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def assert_greedy(ids: torch.Tensor, prompt: int, exact, dtype) -> None:
    """Tokens ``[1, length]`` after the prompt are the most likely ones of the float64 model ``exact``.

    Where two are nearly as likely, rounding may choose either; most have to be the same.
    """
    expected = logits(exact, ids.cpu())[0, prompt - 1 : -1]
    chosen = ids.cpu()[0, prompt:]
    short = expected.amax(-1) - expected.gather(-1, chosen[:, None])[:, 0]
    assert (short <= 8 * OFF[dtype] * expected.std()).all(), f"a token is {float(short.max()):.3g} less likely"
    assert (short == 0).double().mean() >= 0.8, f"{int((short == 0).sum())} of {len(short)} are the most likely"
    assert len(set(chosen.tolist())) > 4, "the model repeats itself: the test sees little"
