"""Risk: a converted GGUF file loads, and computes something else: a wrong name, rows of q and k out of order, a setting
of the model that nobody read."""

import json
import random
import struct

import pytest
import torch
import transformers
from formats.gguf_values import TYPES
from formats.test_gguf import file, string
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import lowbit
from lowbit import FormatError
from lowbit.checkpoint.convert import convert
from lowbit.cli import main

from .models import TOKENS

#: The type of each tensor's blocks; those of 256 where rows are long enough.
KINDS = {
    "q_proj": "Q4_K", "k_proj": "Q6_K", "v_proj": "Q3_K", "o_proj": "Q4_0", "gate_proj": "Q5_K", "up_proj": "Q2_K",
    "down_proj": "Q8_0", "lm_head": "Q6_K", "embed_tokens": "Q4_K",
}  # fmt: skip
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "mlp.up_proj": "ffn_up",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "lm_head": "output", "model.layers": "blk",
}  # fmt: skip
COMMON = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 3, "eos_token_id": 5,
}  # fmt: skip
THETA = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
MODELS = {
    "llama": ("llama", transformers.LlamaConfig, {}),
    "llama, tied": ("llama", transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama, biases": ("llama", transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama, linear scaling": ("llama", transformers.LlamaConfig, {"rope_parameters": LINEAR}),
    "mistral": ("llama", transformers.MistralConfig, {"sliding_window": 7}),
    "qwen2": ("qwen2", transformers.Qwen2Config, {"head_dim": None, "hidden_size": 128}),
    "qwen3": ("qwen3", transformers.Qwen3Config, {}),
    "gemma": ("gemma", transformers.GemmaConfig, {"tie_word_embeddings": True}),
}


def number(value) -> tuple[int, bytes]:
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (4, struct.pack("<I", value))


def pairs_of(arch: str, config) -> list:
    heads = config.num_attention_heads
    held = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "block_count": config.num_hidden_layers,
        "attention.head_count": heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"],
    }  # fmt: skip
    if getattr(config, "head_dim", None):
        held |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
        held["rope.dimension_count"] = config.head_dim
    if getattr(config, "sliding_window", None):
        held["attention.sliding_window"] = config.sliding_window
    pairs = [("general.architecture", 8, string(arch))]
    if config.rope_parameters["rope_type"] == "linear":
        held["rope.scaling.factor"] = config.rope_parameters["factor"]
        pairs.append((f"{arch}.rope.scaling.type", 8, string("linear")))
    pairs += [(f"{arch}.{key}", *number(value)) for key, value in held.items()]
    ids = [("bos", config.bos_token_id), ("eos", config.eos_token_id)]
    return pairs + [(f"tokenizer.ggml.{name}_token_id", *number(value)) for name, value in ids]


def blocks(kind: str, n: int, k: int, pick: random.Random) -> list[bytes]:
    """n rows of random blocks whose values are about as large as those of a model."""
    _, per, size, halves, meaning = TYPES[kind]
    rows = []
    for _ in range(n):
        row = b""
        for _ in range(k // per):
            block = bytearray(pick.randbytes(size))
            for at in halves:
                struct.pack_into("<e", block, at, 1.0)
            largest = max(abs(meaning(block, i)) for i in range(0, per, 7)) or 1.0
            for at in halves:
                struct.pack_into("<e", block, at, pick.uniform(0.05, 0.2) / largest)
            row += bytes(block)
        rows.append(row)
    return rows


def values(kind: str, rows: list[bytes], k: int) -> torch.Tensor:
    _, per, size, _, meaning = TYPES[kind]
    return torch.tensor([[meaning(row[j // per * size :][:size], j % per) for j in range(k)] for row in rows])


def paired(rows: list, heads: int) -> list:
    """Rows in the order of llama.cpp: each head's halves, one row of either in turn."""
    size = len(rows) // heads
    order = [h * size + half * size // 2 + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return [rows[i] for i in order]


def floats(values: torch.Tensor) -> bytes:
    return values.detach().float().numpy().tobytes()


def written(arch: str, config) -> tuple[bytes, torch.nn.Module]:
    """A GGUF file, and the float model of its values."""
    torch.manual_seed(0)
    model, pick, tensors = transformers.AutoModelForCausalLM.from_config(config).float().eval(), random.Random(0), {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        last, key = name.split(".")[-2], name
        for long, short in GGUF_NAMES.items():
            key = key.replace(long, short)
        pair = heads.get(last) if arch == "llama" else None
        with torch.no_grad():
            if parameter.dim() == 2:
                n, k = parameter.shape
                kind = KINDS[last] if k % 256 == 0 else "Q5_1"
                rows = blocks(kind, n, k, pick)
                parameter.copy_(values(kind, rows, k))
                tensors[key] = (TYPES[kind][0], (n, k), b"".join(paired(rows, pair) if pair else rows))
                continue
            parameter.add_(torch.randn_like(parameter) * 0.1)
        held = parameter + 1 if arch == "gemma" else parameter
        held = torch.stack(paired(list(held), pair)) if pair else held
        tensors[key] = (0, tuple(parameter.shape), floats(held))
    if config.rope_parameters["rope_type"] == "llama3":
        base = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 32, 2) / 32)
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        tensors["rope_freqs.weight"] = (0, (16,), floats(base / frequencies))
    return file(tensors, pairs_of(arch, config)), model


def made(kind: str):
    arch, cls, changes = MODELS[kind]
    settings = {**COMMON, "rope_parameters": dict(THETA), **changes}
    return written(arch, cls(**{key: value for key, value in settings.items() if value is not None}))


@pytest.mark.parametrize("kind", MODELS)
def test_the_converted_model_computes_what_its_values_say(kind, tmp_path):
    data, model = made(kind)
    (tmp_path / "m.gguf").write_bytes(data)
    counts = convert(tmp_path / "m.gguf", tmp_path / "dst")
    tied = model.config.tie_word_embeddings
    assert counts["exact"] == 14 + (not tied) and counts["widened"] == 1 and counts["requantized"] == 0
    loaded = lowbit.from_pretrained(tmp_path / "dst")
    assert type(loaded) is type(model) and loaded.dtype == torch.float32
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not (tied and name == "lm_head"):
            assert torch.equal(loaded.get_submodule(name).dequantize(torch.float32), layer.weight), name
    with torch.no_grad():
        expected, got = model(TOKENS).logits, loaded(TOKENS).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    for key in ("bos_token_id", "eos_token_id", "max_position_embeddings", "rope_parameters"):
        assert getattr(loaded.config, key) == getattr(model.config, key)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_reads_the_same_model(kind, tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed")
    data, _ = made(kind)
    (tmp_path / "m.gguf").write_bytes(data)
    options = {"gguf_file": "m.gguf", "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    convert(tmp_path / "m.gguf", tmp_path / "dst")
    with torch.no_grad():
        expected, got = theirs(TOKENS).logits, lowbit.from_pretrained(tmp_path / "dst")(TOKENS).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.fixture(scope="module")
def parts():
    """Pairs and tensors of a small file that is whole: one layer, all floats."""
    config = transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 1, "rope_parameters": dict(THETA)})
    model, tensors = transformers.LlamaForCausalLM(config), {}
    for name, parameter in model.named_parameters():
        for long, short in GGUF_NAMES.items():
            name = name.replace(long, short)
        tensors[name] = (1, tuple(parameter.shape), parameter.detach().half().numpy().tobytes())
    return pairs_of("llama", config), tensors


def test_a_file_of_floats_becomes_a_float_checkpoint(parts, tmp_path):
    (tmp_path / "m.gguf").write_bytes(file(parts[1], parts[0]))
    assert convert(tmp_path / "m.gguf", tmp_path / "dst")["copied"] == len(parts[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert model.dtype == torch.float16 and "quantization_config" not in json.loads(
        (tmp_path / "dst" / "config.json").read_text()
    )


def other(key, kind=None, value=None):
    def change(pairs, tensors):
        changed = [pair for pair in pairs if pair[0] != key]
        return (changed if kind is None else [*changed, (key, kind, value)]), tensors

    return change


def tensor(name, *entry):
    return lambda pairs, tensors: (
        pairs,
        {**{k: t for k, t in tensors.items() if k != name}, **dict.fromkeys([name] * bool(entry), entry)},
    )


def u32(value):
    return struct.pack("<I", value)


BAD = {
    "architecture": (other("general.architecture", 8, string("rwkv6")), "general.architecture 'rwkv6' has no names"),
    "no architecture": (other("general.architecture"), "general.architecture None has no names"),
    "no epsilon": (other("llama.attention.layer_norm_rms_epsilon"), "needs llama.attention.layer_norm_rms_epsilon"),
    "heads a layer": (
        other("llama.attention.head_count", 9, struct.pack("<IQ", 4, 1) + u32(4)), r"head_count, a int, got \[4\]",
    ),
    "no heads": (other("llama.attention.head_count", 4, u32(0)), "head_count, a int, got 0"),
    "more layers": (other("llama.block_count", 4, u32(2)), "of 2 layers lacks 9 tensors, the first is blk.1.attn_k"),
    "endless layers": (other("llama.block_count", 4, u32(1 << 31)), "block_count is 2147483648, in a file of 12"),
    "experts": (other("llama.expert_count", 4, u32(8)), "mixtures of experts of architecture 'llama'"),
    "part of a head": (other("llama.rope.dimension_count", 4, u32(16)), "must be the length of a head, 32, got 16"),
    "more heads": (
        other("llama.attention.head_count_kv", 4, u32(64)), r"must have 64 heads of 32 rows, .* got \(64, 256\)",
    ),
    "yarn": (other("llama.rope.scaling.type", 8, string("yarn")), "rope.scaling.type 'yarn' has no settings"),
    "frequencies": (
        tensor("rope_freqs.weight", 0, (16,), struct.pack("<16f", *range(1, 17))), "not the scaling of a Llama 3",
    ),
    "a name nobody knows": (tensor("blk.0.attn_sinks.weight", 0, (4,), bytes(16)), "blk.0.attn_sinks.weight has no"),
    "a bias alone": (tensor("blk.0.attn_q.bias", 0, (128,), bytes(512)), "lacks 3 tensors, .* blk.0.attn_k.bias"),
    "a norm of another": (tensor("blk.0.attn_q_norm.weight", 0, (32,), bytes(128)), "has 1 tensors too many"),
    "no norm": (tensor("output_norm.weight"), "lacks 1 tensors, the first is output_norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("change, words", BAD.values(), ids=BAD)
def test_what_has_no_place_is_refused_by_name_and_the_switch_converts_it(parts, change, words, tmp_path, capsys):
    pairs, tensors = change(*parts)
    (tmp_path / "m.gguf").write_bytes(file(tensors, pairs))
    with pytest.raises(FormatError, match=rf"^m\.gguf: .*{words}"):
        convert(tmp_path / "m.gguf", tmp_path / "dst")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / "dst"), "--gguf-names"]) == 0
    assert not (tmp_path / "dst" / "config.json").exists()
