"""What tells two folders of checkpoint files apart."""

import hashlib
from pathlib import Path

from safetensors.torch import load_file


def fingerprint(folder):
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def tensors_of(folder):
    made = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        made |= load_file(path)
    return made
