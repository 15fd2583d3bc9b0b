"""How the sources become lowbit/lib/liblowbit_cpu.so: flags, rules and edges of the ninja file that setup.py runs."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote

from .link_stubs import SYSTEM_FILES
from .link_stubs import flags as link_flags

ROOT = Path(__file__).resolve().parent.parent
GEN, LIBRARY = "build/gen", "liblowbit_cpu.so"
TARGET_TORCH = "0x020a000000000000"  # 2.10, the oldest torch that has what csrc/ uses


# Why the two -Wno: g++ 12 warns inside its own intrinsics (_mm512_undefined_*), and clang knows no such warning.
FLAGS = (
    "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-math-errno "
    "-Wall -Wextra -Wno-maybe-uninitialized -Wno-unknown-warning-option"
)


def rule(name: str, command: str, description: str, *more: str) -> str:
    lines = (f"command = {command}", f"description = {description}", *more)
    return f"rule {name}\n" + "".join(f"  {line}\n" for line in lines)


def ninja_file(cxx: str, headers: Path, sources: list[str]) -> str:
    """The build as text, for ninja run in ROOT; ``headers`` is torch's include folder.

    Its targets: ``objects``, and the library as ``build/portable/LIBRARY`` (runs wherever manylinux_2_28 does) and as
    ``build/plain/LIBRARY`` (for this machine).
    """
    cxx, root, headers = quote(cxx), quote(str(ROOT)), quote(str(headers))
    symbols, stub = "tools/torch_2_10_symbols.txt", f"{quote(sys.executable)} tools/link_stubs.py --out build/stubs"
    # Why -ffile-prefix-map: __FILE__ stands in error messages, and must not depend on where the wheel was built.
    compile = f"{cxx} {FLAGS} -Icsrc -I{GEN} -ffile-prefix-map={root}/= $torch -MMD -MF $out.d -c $in -o $out"
    link = f"{cxx} -shared -Wl,-z,defs -Wl,--version-script=csrc/exports.map -o $out $in"
    torch = f"-isystem {headers} -ffile-prefix-map={headers}/= -DTORCH_TARGET_VERSION={TARGET_TORCH}"
    text = "builddir = build\n"
    text += rule("cxx", compile, "compile $in", "depfile = $out.d", "deps = gcc")
    text += rule("stub", f"{stub} --cxx {cxx} $what", "stubs $out")
    objects = ""
    for source in sources:
        target = f"build/obj/{Path(source).stem}.o"
        objects += f" {target}"
        # Why not for all: a kernel needs nothing of torch, and is not compiled again for another torch.
        text += f"build {target}: cxx {source}\n" + (f"  torch = {torch}\n" if source.startswith("csrc/") else "")
    text += f"build objects: phony{objects}\n"
    text += f"build build/stubs/libtorch_cpu.so: stub | {symbols} tools/link_stubs.py\n  what = --torch {symbols}\n"
    system = " ".join(f"build/stubs/{name}" for name in SYSTEM_FILES)
    text += f"build {system}: stub | tools/link_stubs.py\n  what = --system\n"
    for kind, needs in (("portable", system), ("plain", "")):
        text += rule(kind, f"{link} {link_flags(kind, 'build/stubs')}", "link $out")
        inputs = f"{objects} build/stubs/libtorch_cpu.so | csrc/exports.map {needs}"
        text += f"build build/{kind}/{LIBRARY}: {kind}{inputs}\n"
    return text
