"""The CUDA side of a build: for which GPUs, and with which compiler. Errors are ValueError with one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: The oldest nvcc that knows --compress-mode and every architecture of the wheel.
OLDEST = (13, 0)
_ARCH = re.compile(r"\d{2,3}[af]?")


@dataclass(frozen=True)
class Cuda:
    """What the build graph needs to know of CUDA; ``archs`` such as ("80", "90a")."""

    nvcc: str
    home: Path
    archs: tuple[str, ...]

    @property
    def include(self) -> Path:
        return self.home / "include"

    @property
    def runtime(self) -> Path:
        """The CUDA runtime as an archive: the library then needs none on the user's machine."""
        folders = (self.home / "lib64", self.home / "lib", self.home / "targets/x86_64-linux/lib")
        found = [path for path in (f / "libcudart_static.a" for f in folders) if path.is_file()]
        if not found:
            raise ValueError(
                f"CUDA kernels need libcudart_static.a, found none in {self.home}: install cuda-cudart-dev"
            )
        return found[0]

    def gencode(self, archs: Sequence[str] | None = None) -> str:
        """Options of nvcc: machine code of each architecture, or of some of them; of 80 also PTX, which every newer GPU
        can translate.
        """
        parts = []
        for arch in self.archs if archs is None else archs:
            code = "[sm_80,compute_80]" if arch == "80" else f"sm_{arch}"
            parts.append(f"-gencode=arch=compute_{arch},code={code}")
        return " ".join(parts)


def wanted_archs() -> tuple[str, ...]:
    """LOWBIT_CUDA_ARCHS as a tuple; unset: the GPUs of this machine; empty for a build without CUDA."""
    value = os.environ.get("LOWBIT_CUDA_ARCHS", "").strip()
    if value == "none":
        return ()
    if not value:
        return visible_archs() if shutil.which("nvcc") else ()
    archs = tuple(dict.fromkeys(part.strip() for part in re.split("[;,]", value) if part.strip()))
    wrong = [arch for arch in archs if not _ARCH.fullmatch(arch)]
    if wrong or not archs:
        raise ValueError(f"expected LOWBIT_CUDA_ARCHS to be like '80;90a' or 'none', got {value!r}")
    return archs


def visible_archs() -> tuple[str, ...]:
    """The architectures of the GPUs that nvidia-smi shows, as far as kernels exist for them: 8.0 and newer."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.findall(r"^(\d+)\.(\d)\s*$", done.stdout, re.MULTILINE) if done.returncode == 0 else []
    # Why 90a: wgmma exists under that name only.
    return tuple(dict.fromkeys({"90": "90a"}.get(a + b, a + b) for a, b in found if int(a) >= 8))


def find(archs: tuple[str, ...]) -> Cuda | None:
    """The toolkit, or None when there is nothing to build for."""
    if not archs:
        return None
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise ValueError(
            "LOWBIT_CUDA_ARCHS asks for CUDA kernels, but no nvcc is on PATH: install the CUDA toolkit, or unset it"
        )
    version = tuple(map(int, (re.findall(r"release (\d+)\.(\d+)", run(nvcc, "--version")) or [(0, 0)])[0]))
    if version < OLDEST:
        found, oldest = (".".join(map(str, v)) for v in (version, OLDEST))
        raise ValueError(f"CUDA kernels need nvcc {oldest} or newer, got {found}: update the CUDA toolkit")
    # Why a dry run: nvcc on PATH may be a script or a link, and only nvcc itself knows where its toolkit lies.
    top = re.search(r"^#\$ TOP=(.+)$", run(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull), re.MULTILINE)
    if top is None:
        raise ValueError(f"{nvcc} does not say where its toolkit lies: `nvcc --dryrun` must print TOP=")
    return Cuda(nvcc, Path(top[1]).resolve(), archs)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr
