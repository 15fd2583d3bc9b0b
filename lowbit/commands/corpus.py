"""Where `lowbit demo` and `lowbit eval` take checkpoint and text from, and what it says when they cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..errors import FormatError, LowbitError

#: The checkpoint that ships with lowbit: a byte-level Llama of 1.33 M parameters; its README.md says how it was made.
CHECKPOINT = Path(__file__).parent.parent / "data" / "byte_llama"
#: Text that the shipped checkpoint has not seen, from the documentation of CPython.
HELD_OUT = CHECKPOINT / "held_out.txt"
SEPARATOR = "\f"  # between the documents of HELD_OUT


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises LowbitError when it cannot be read, is not UTF-8 or is too short."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise LowbitError(f"the text {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise LowbitError(f"the text {path} must be UTF-8, but byte {error.start} of it is not") from None
    if len(text) < 1000:
        raise LowbitError(f"the text {path} must have at least 1000 characters to measure with, got {len(text)}")
    return text


def sentences(text: str, count: int) -> list[str]:
    """The first ``count`` different sentences of 40 to 300 characters, in the order of the text."""
    found = []
    for paragraph in re.split(r"\n\s*\n|\f", text):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            if 40 <= len(sentence) <= 300 and sentence[0].isalpha():
                found.append(sentence)
    found = list(dict.fromkeys(found))[:count]
    if len(found) < 8:
        raise LowbitError(f"the text must have at least 8 sentences of 40 to 300 characters, got {len(found)}")
    return found


def kind_of_checkpoint(folder: Path, quantized: bool = False) -> str:
    """ "causal" (predicts the next token) or "encoder" (makes embeddings), from the config.json of a checkpoint folder.

    Raises FormatError when the folder is missing, is no HuggingFace checkpoint, is already quantized (unless that is
    allowed), or holds a model that is neither.
    """
    if not folder.is_dir():
        raise FormatError(f"the checkpoint folder {folder} does not exist; give a folder with config.json and weights")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise FormatError(f"{folder} is not a HuggingFace checkpoint: it has no readable config.json") from None
    except ValueError:
        raise FormatError(f"{folder} is not a HuggingFace checkpoint: its config.json is not JSON") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise FormatError(f"{folder} is not a HuggingFace checkpoint: its config.json names no architecture")
    if config.get("quantization_config") and not quantized:
        raise FormatError(f"the checkpoint {folder} is already quantized; give the one it was made from")
    if not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        raise FormatError(f"{folder} is not a HuggingFace checkpoint: it has no *.safetensors file")
    architecture = str(config["architectures"][0])
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    if config.get("is_encoder_decoder") or "vocab_size" not in config:
        raise FormatError(f"only causal language models and text encoders can be measured, got {architecture}")
    return "encoder"
