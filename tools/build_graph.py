"""How the sources become the libraries in lowbit/lib: flags, rules and edges of the ninja file that setup.py runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shlex import quote

from .cuda import Cuda
from .link_stubs import CUDA_SYSTEM_FILES, SYSTEM_FILES
from .link_stubs import flags as link_flags

ROOT = Path(__file__).resolve().parent.parent
GEN, LIBRARY, CUDA_LIBRARY = "build/gen", "liblowbit_cpu.so", "liblowbit_cuda.so"
TARGET_TORCH = "0x020a000000000000"  # 2.10, the oldest torch that has what csrc/ uses


# Why the two -Wno: g++ 12 warns inside its own intrinsics (_mm512_undefined_*), and clang knows no such warning.
FLAGS = (
    "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-math-errno "
    "-Wall -Wextra -Wno-maybe-uninitialized -Wno-unknown-warning-option"
)
# Why --compress-mode: machine code shrinks sixfold, for a millisecond at the first launch.
CUDA_FLAGS = (
    "-std=c++17 -O3 --compress-mode=size -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas"
)


def rule(name: str, command: str, description: str, *more: str) -> str:
    lines = (f"command = {command}", f"description = {description}", *more)
    return f"rule {name}\n" + "".join(f"  {line}\n" for line in lines)


def object_of(source: str) -> str:
    """The object of a source. Those of the CUDA library have a folder of their own, and keep their suffix in the name,
    because pack.cpp may lie beside pack.cu.
    """
    path = Path(source)
    is_cuda = path.suffix == ".cu" or path.parent.name == "cuda"
    return f"build/obj/cuda/{path.name}.o" if is_cuda else f"build/obj/{path.stem}.o"


def compile_rules(cxx: str, cuda: Cuda | None) -> str:
    root = quote(str(ROOT))
    # Why -ffile-prefix-map: __FILE__ stands in error messages, and must not depend on where the wheel was built.
    flags = f"{FLAGS} -Icsrc -I{GEN} -ffile-prefix-map={root}/="
    # Why: ninja takes an object without a list of headers for one that has none, and would never compile it again.
    listed = "test -s $out.d"
    compile = f"{cxx} {flags} $torch -MMD -MF $out.d -c $in -o $out && {listed}"
    text = rule("cxx", compile, "compile $in", "depfile = $out.d", "deps = gcc")
    if cuda:
        lineinfo = "-lineinfo" if os.environ.get("LOWBIT_LINEINFO") == "1" else ""
        options = f"{CUDA_FLAGS} -ccbin {cxx} $gencode {lineinfo} -Icsrc -I{GEN} -MD -MF $out.d -MT $out"
        # The log keeps what ptxas says of registers and spills, for tools/check_cuda.py; only warnings are shown.
        show = "{ cat $out.log; exit 1; }; grep -i warning $out.log || true"
        compile = f"{quote(cuda.nvcc)} {options} -c $in -o $out > $out.log 2>&1 && {listed} || {show}"
        text += rule("nvcc", compile, "compile $in", "depfile = $out.d", "deps = gcc")
    return text


def unit_archs(manifest: dict) -> dict[str, list[str]]:
    """By file name, the architectures that CUDA units of a manifest are compiled for: all that a kernel of it is."""
    found: dict[str, list[str]] = {}
    for row in manifest["kernels"]:
        if "archs" in row:
            found[row["unit"]] = list(dict.fromkeys([*found.get(row["unit"], ()), *row["archs"]]))
    return found


def ninja_file(
    cxx: str, headers: Path, sources: list[str], cuda: Cuda | None = None, archs: dict[str, list[str]] | None = None
) -> str:
    """The build as text, for ninja run in ROOT; ``headers`` is torch's include folder, ``archs`` says what generated
    CUDA sources are compiled for, by file name, where that is not all of ``cuda.archs``.

    Its targets: ``objects``, and each library as ``build/portable/NAME`` (runs wherever manylinux_2_28 does) and as
    ``build/plain/NAME`` (for this machine).
    """
    cxx, headers = quote(cxx), quote(str(headers))
    symbols, stub = "tools/torch_2_10_symbols.txt", f"{quote(sys.executable)} tools/link_stubs.py --out build/stubs"
    torch = f"-isystem {headers} -ffile-prefix-map={headers}/= -DTORCH_TARGET_VERSION={TARGET_TORCH}"
    text = "builddir = build\n" + compile_rules(cxx, cuda)
    text += rule("stub", f"{stub} --cxx {cxx} $what", "stubs $out")
    objects: dict[str, list[str]] = {LIBRARY: []} | ({CUDA_LIBRARY: []} if cuda else {})
    for source in sources:
        target = object_of(source)
        in_cuda = target.startswith("build/obj/cuda/")
        objects[CUDA_LIBRARY if in_cuda else LIBRARY].append(target)
        text += f"build {target}: {'nvcc' if source.endswith('.cu') else 'cxx'} {source}\n"
        if source.endswith(".cu"):
            text += f"  gencode = {cuda.gencode((archs or {}).get(Path(source).name))}\n"
        # Why not for all: a kernel needs nothing of torch, and is not compiled again for another torch.
        if source.startswith("csrc/") and source.endswith(".cpp"):
            more = (
                f" -isystem {quote(str(cuda.include))} -DLOWBIT_CUDA_ARCHS='\"{';'.join(cuda.archs)}\"'"
                if in_cuda
                else ""
            )
            text += f"  torch = {torch}{more}\n"
    text += f"build objects: phony {' '.join(sum(objects.values(), []))}\n"
    text += f"build build/stubs/libtorch_cpu.so: stub | {symbols} tools/link_stubs.py\n  what = --torch {symbols}\n"
    system = " ".join(f"build/stubs/{name}" for name in (*SYSTEM_FILES, *CUDA_SYSTEM_FILES))
    text += f"build {system}: stub | tools/link_stubs.py\n  what = --system\n"
    link = f"{cxx} -shared -Wl,-z,defs -Wl,--version-script=csrc/exports.map -o $out $in $runtime"
    for kind, needs in (("portable", system), ("plain", "")):
        for library, members in objects.items():
            runtime = cuda.runtime if cuda and library == CUDA_LIBRARY else None
            name = f"{kind}_{Path(library).stem}"
            text += rule(name, f"{link} {link_flags(kind, 'build/stubs', runtime is not None)}", "link $out")
            inputs = f"{' '.join(members)} build/stubs/libtorch_cpu.so | csrc/exports.map {needs}"
            text += f"build build/{kind}/{library}: {name} {inputs}\n"
            text += f"  runtime = {quote(str(runtime))}\n" if runtime else ""
    return text
