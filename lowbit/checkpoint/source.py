"""A folder with a float HuggingFace checkpoint: its files, checked before anything is read from them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import FormatError
from ..tensor_checks import checked_path
from .safetensors_file import Reader, parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Files that hold weights in some form: never copied.
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".tflite",
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def quantizable(self) -> bool:
        return self.dtype in _FLOATS and self.shape != () and 0 not in self.shape


class Source:
    """folder, config (config.json as a dict), shards (file names in order), tensors (name -> Stored).

    quantized: whether it may be quantized already. Raises FormatError for what is no complete, readable safetensors
    checkpoint, or is quantized and should not be; DtypeError for what is no path.
    """

    def __init__(self, folder, quantized: bool = False):
        self.folder = checked_path(folder, "src")
        if not self.folder.is_dir():
            raise FormatError(
                f"the checkpoint folder {folder} does not exist; give a folder with config.json and weights"
            )
        self.config = self._json("config.json")
        settings = self.config.get("quantization_config")
        if settings and not quantized:
            own = isinstance(settings, dict) and settings.get("quant_method") == "lowbit"
            other = "" if own else ", or bring it into lowbit's form with `lowbit convert`"
            raise FormatError(f"the checkpoint {folder} is already quantized; give the one it was made from{other}")
        listed = self._listed()
        self.shards = sorted(set(listed.values())) if listed else [self._single()]
        missing = [name for name in self.shards if not (self.folder / name).is_file()]
        if missing:
            raise FormatError(f"{folder} lacks {len(missing)} of {len(self.shards)} files, the first is {missing[0]}")
        self.tensors: dict[str, Stored] = {}
        for shard in self.shards:
            with Reader(self.folder / shard) as reader:
                for name, (dtype, shape, _, _) in reader.entries.items():
                    if listed and listed.get(name) != shard:
                        raise FormatError(f"{shard}: holds {name}, which {INDEX} puts in {listed.get(name, 'no file')}")
                    self.tensors[name] = Stored(shard, dtype, tuple(shape))
        lost = [name for name in listed if name not in self.tensors]
        if lost:
            raise FormatError(f"{folder} lacks {len(lost)} tensors that {INDEX} lists, the first is {lost[0]}")

    def of(self, shard: str) -> list[str]:
        """The names of a shard's tensors."""
        return [name for name, stored in self.tensors.items() if stored.file == shard]

    def copy_rest(self, target: Path) -> None:
        """Copy every file that holds no weights and is not written anew: tokenizer, generation config, licence, ..."""
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            if any(part.startswith(".") for part in relative.parts) or not path.is_file():
                continue
            if path.suffix.lower() in _WEIGHTS or path.name.endswith(".index.json") or str(relative) == "config.json":
                continue
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)

    def _json(self, name: str) -> dict:
        try:
            text = (self.folder / name).read_bytes()
        except OSError as error:
            raise FormatError(f"{self.folder} is no HuggingFace checkpoint: {name}: {error.strerror}") from None
        found = parse_json(text, f"{self.folder}: {name}")
        if not isinstance(found, dict):
            raise FormatError(f"{self.folder}: {name} must be a JSON object, got {type(found).__name__}")
        return found

    def _listed(self) -> dict[str, str]:
        if not (self.folder / INDEX).exists():
            return {}
        listed = self._json(INDEX).get("weight_map")
        plain = isinstance(listed, dict) and listed and all(isinstance(file, str) for file in listed.values())
        if not plain or any(Path(file).name != file or not file.endswith(".safetensors") for file in listed.values()):
            raise FormatError(f"{self.folder}: {INDEX} must map names of tensors to *.safetensors files of the folder")
        return listed

    def _single(self) -> str:
        found = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if SINGLE in found or len(found) == 1:
            return SINGLE if SINGLE in found else found[0]
        if found:
            raise FormatError(
                f"{self.folder} has {len(found)} *.safetensors files and no {INDEX} that says what they hold"
            )
        if [*self.folder.glob("*.bin"), *self.folder.glob("*.pt"), *self.folder.glob("*.pth")]:
            raise FormatError(
                f"{self.folder} holds pickles, which are never opened; expected *.safetensors files; "
                "let a tool that you trust with it save it as safetensors"
            )
        raise FormatError(f"{self.folder} is no HuggingFace checkpoint: it has no *.safetensors file")


def write_json(path: Path, content: dict) -> None:
    """Write JSON under a temporary name, wait until it is on the disk, and rename it. Raises OSError."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
