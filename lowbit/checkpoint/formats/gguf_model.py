"""A GGUF file as a model of transformers: the names of its tensors, the order of its rows, its config.json.

Source: llama.cpp, gguf-py/gguf/tensor_mapping.py (names), gguf-py/gguf/constants.py (keys) and convert_hf_to_gguf.py
(what is done to values). Of each head of q and k, files of architecture "llama" hold the rows in pairs: row 2*i + j of
the file is row j*half + i of transformers. gemma's norms are stored as weight + 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...errors import FormatError
from .gguf_rope import rope_parameters

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QKV, _MLP = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up", "ffn_down")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
#: Tensors that say what the metadata say: positions of rotary embeddings.
_NO_WEIGHT = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
OWN_NAMES = "to convert it under GGUF's own names, without a config.json, pass gguf_names=True (--gguf-names)"


@dataclass(frozen=True)
class Family:
    """What differs among architectures: the model of transformers, and what its files hold."""

    model_type: str
    architecture: str
    biases: tuple[str, ...] = ()
    head_norms: bool = False
    paired_rows: bool = False
    norms_plus_one: bool = False
    activation: str = "silu"


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", paired_rows=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", biases=_QKV),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", head_norms=True),
    "gemma": Family("gemma", "GemmaForCausalLM", norms_plus_one=True, activation="gelu_pytorch_tanh"),
}
#: Also of architecture "llama", told apart by a sliding window.
_MISTRAL = Family("mistral", "MistralForCausalLM", paired_rows=True)


class GgufModel:
    """``names`` (of the file -> of transformers) and ``config`` of a file's metadata and entries (name -> Entry).

    freqs: the tensor rope_freqs.weight, or None. Raises FormatError for an architecture that is not known, for metadata
    that do not say what config.json must say, and for tensors that are missing or too many.
    """

    def __init__(self, metadata: Mapping, entries: Mapping, freqs: torch.Tensor | None = None):
        self._metadata, self._entries = metadata, entries
        self.kind = metadata.get("general.architecture")
        if self.kind not in FAMILIES:
            raise FormatError(
                f"general.architecture {self.kind!r:.100} has no names of transformers yet, only {', '.join(FAMILIES)} "
                f"do; {OWN_NAMES}"
            )
        window = self._get("attention.sliding_window", 0)
        self.family = _MISTRAL if self.kind == "llama" and window else FAMILIES[self.kind]
        if self._get("expert_count", 0):
            raise FormatError(f"mixtures of experts of architecture {self.kind!r} have no names yet; {OWN_NAMES}")
        self.heads = self._get("attention.head_count", least=1)
        self.kv_heads = self._get("attention.head_count_kv", self.heads, least=1)
        self.names = {key: self._name(key) for key in entries if not _NO_WEIGHT.fullmatch(key)}
        self._expect_whole()
        self.config = self._config(window, freqs)

    def rows(self, key: str) -> torch.Tensor | None:
        """Where each row of transformers' tensor lies in the file, int64 ``[N]``; None where the order is the same."""
        leaf = re.fullmatch(r"blk\.\d+\.(attn_[qk])\.(weight|bias)", key)
        if not self.family.paired_rows or leaf is None:
            return None
        heads = self.heads if leaf[1] == "attn_q" else self.kv_heads
        return torch.arange(self._entries[key].shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()

    def is_plus_one(self, key: str) -> bool:
        """Whether a tensor holds weight + 1."""
        return self.family.norms_plus_one and key.endswith("norm.weight")

    # ---- names -----------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        top = re.fullmatch(r"(\w+)\.weight", key)
        if top and top[1] in _TOP:
            return f"{_TOP[top[1]]}.weight"
        block = re.fullmatch(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)", key)
        if block and block[2] in _BLOCK and (block[3] == "weight" or not block[2].endswith("norm")):
            return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{block[3]}"
        raise FormatError(f"{key} has no place in transformers' {self.family.architecture}; {OWN_NAMES}")

    def _expect_whole(self) -> None:
        """Raises FormatError unless the tensors are those of the model, no more and no less."""
        self.layers = self._get("block_count")
        if self.layers > len(self._entries):  # Why here: the names of that many are made below
            raise FormatError(f"{self.kind}.block_count is {self.layers}, in a file of {len(self._entries)} tensors")
        leaves = [f"{leaf}.weight" for leaf in _BLOCK if self.family.head_norms or leaf not in _HEAD_NORMS]
        self.biased = {part: self._has_bias(part) for part in ((*_QKV, "attn_output"), _MLP)}
        biases = [leaf for part, there in self.biased.items() if there for leaf in part] or list(self.family.biases)
        leaves += [f"{leaf}.bias" for leaf in biases]
        wanted = {f"{top}.weight" for top in _TOP if top != "output"}
        wanted |= {f"blk.{i}.{leaf}" for i in range(self.layers) for leaf in leaves}
        lost = sorted(wanted - self.names.keys())
        extra = sorted(self.names.keys() - wanted - {"output.weight"})
        if lost or extra:
            what = f"lacks {len(lost)} tensors" if lost else f"has {len(extra)} tensors too many"
            raise FormatError(
                f"a {self.family.architecture} of {self.layers} layers {what}, the first is {(lost or extra)[0]}; "
                f"{OWN_NAMES}"
            )

    def _has_bias(self, part: tuple[str, ...]) -> bool:
        # Why only llama: transformers' other models have biases always or never.
        return self.family.model_type == "llama" and f"blk.0.{part[0]}.bias" in self._entries

    # ---- config.json -----------------------------------------------------------------------------------------------

    def _config(self, window: int, freqs: torch.Tensor | None) -> dict:
        family, hidden = self.family, self._get("embedding_length")
        head_dim = self._get("attention.key_length", hidden // self.heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(key, head_dim) != head_dim:
                raise FormatError(
                    f"{self.kind}.{key} must be the length of a head, {head_dim}, got {self._get(key)}; {OWN_NAMES}"
                )
        for leaf, heads in (("attn_q", self.heads), ("attn_k", self.kv_heads)):
            for key, entry in self._entries.items():
                if f".{leaf}." in key and (entry.shape[:1] != (heads * head_dim,) or head_dim % 2):
                    raise FormatError(
                        f"{key} must have {heads} heads of {head_dim} rows, an even number, got {entry.shape}"
                    )
        embedding = self._entries["token_embd.weight"]
        if len(embedding.shape) != 2:
            raise FormatError(f"token_embd.weight must be [vocabulary, hidden], got shape {embedding.shape}")
        made = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "dtype": {"F16": "float16", "BF16": "bfloat16"}.get(embedding.type, "float32"),
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": head_dim,
            "hidden_act": family.activation,
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon", kind=float),
            "rope_parameters": rope_parameters(self.kind, self._metadata, head_dim, freqs, OWN_NAMES),
            "tie_word_embeddings": "output.weight" not in self._entries,
        }
        if family.model_type == "llama":
            made |= dict(zip(("attention_bias", "mlp_bias"), self.biased.values(), strict=True))
        if family.model_type == "mistral":
            made["sliding_window"] = window
        for short, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            made[f"{short}_token_id"] = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        return made

    def _get(self, key: str, default=None, kind: type = int, least=0):
        """A number of the metadata. Raises FormatError for one that is missing, too small or something else."""
        value = self._metadata.get(f"{self.kind}.{key}", default)
        if type(value) is not kind or not least <= value < 1 << 40:
            raise FormatError(f"config.json needs {self.kind}.{key}, a {kind.__name__}, got {value!r:.50}; {OWN_NAMES}")
        return value
