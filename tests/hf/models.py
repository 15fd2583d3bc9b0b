"""Small untrained checkpoints of several architectures, and the oracle of what quantizing one gives."""

import torch
import transformers

import lowbit
from lowbit import reference
from lowbit.commands.corpus import CHECKPOINT

TOKENS = torch.arange(40, 60)[None]
LLAMA = CHECKPOINT


def small(kind: str, dtype=torch.float32, **changes):
    """A model of two layers with random weights."""
    torch.manual_seed(0)
    common = {"vocab_size": 128, "tie_word_embeddings": False, **changes}
    odd = {  # q, k and v have rows that are no multiple of 16
        "hidden_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12,
        "intermediate_size": 128,
    }  # fmt: skip
    made = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**odd, **common})),
        "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**{**odd, **common})),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**odd, **common})),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**odd, **common})),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **common)
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, **common,
            )
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, **common,
            )
        ),
        "gpt_oss": lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, **common,
            )
        ),
        "granitemoe": lambda: transformers.GraniteMoeForCausalLM(
            transformers.GraniteMoeConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, **common,
            )
        ),
        "bert": lambda: transformers.BertModel(
            transformers.BertConfig(
                vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
            )
        ),
    }[kind]()  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():  # biases and norms that are not all alike
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return made.to(dtype).eval()


def rounded(model, settings, names=None):
    """Round the weights of a float model in place to what their quantized form means, by the slow reference.

    settings: full name of a matrix -> (dtype, group_size), or None to leave it. Matrices of experts are named
    ``...experts.<i>.<part>``.
    """

    def to_grid(name, weight, transposed=False):
        chosen = settings(name)
        if chosen is None:
            return weight
        w = weight.T if transposed else weight
        qt = lowbit.quantize(w.contiguous(), chosen[0], group_size=chosen[1], method="rtn")
        made = reference.dequantize(qt).to(weight.dtype)
        return made.T if transposed else made

    with torch.no_grad():
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind in ("Linear", "Conv1D") and isinstance(module.weight, torch.nn.Parameter):
                module.weight.copy_(to_grid(name, module.weight, kind == "Conv1D"))
            elif kind.endswith("Experts"):
                for part in ("gate_up_proj", "down_proj"):
                    whole = getattr(module, part)
                    for i in range(len(whole)):
                        whole[i] = to_grid(f"{name}.{i}.{part}", whole[i], module.is_transposed)
    return model
