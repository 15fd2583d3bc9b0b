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


def ninja_file(cxx, headers, sources):
    """The build as text, for ninja run in ROOT.

    Its targets: ``objects``, and the library as ``build/portable/LIBRARY`` (runs wherever manylinux_2_28 does) and as
    ``build/plain/LIBRARY`` (for this machine).
    """
    cxx, root, headers = quote(cxx), quote(str(ROOT)), quote(str(headers))
    flags = "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wextra"
    flags += f" -DTORCH_TARGET_VERSION={TARGET_TORCH} -Icsrc -I{GEN} -isystem {headers}"
    # Why: __FILE__ stands in error messages, and must not depend on where the wheel was built.
    flags += f" -ffile-prefix-map={root}/= -ffile-prefix-map={headers}/="
    objects = {source: f"build/obj/{Path(source).stem}.o" for source in sources}
    inputs = " ".join(objects.values()) + " build/stubs/libtorch_cpu.so"
    system = " ".join(f"build/stubs/{name}" for name in SYSTEM_FILES)
    stub = f"{quote(sys.executable)} tools/link_stubs.py --out build/stubs --cxx {cxx}"
    symbols = "tools/torch_2_10_symbols.txt"
    link = f"{cxx} -shared -Wl,-z,defs -Wl,--version-script=csrc/exports.map -o $out $in"
    compile = f"{cxx} {flags} -MMD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc"
    return "".join(
        ["builddir = build\n", f"rule cxx\n  command = {compile}\n", f"rule stub\n  command = {stub} $what\n"]
        + [f"rule {kind}\n  command = {link} {link_flags(kind, 'build/stubs')}\n" for kind in ("portable", "plain")]
        + [f"build {target}: cxx {source}\n" for source, target in objects.items()]
        + [f"build build/stubs/libtorch_cpu.so: stub | {symbols} tools/link_stubs.py\n  what = --torch {symbols}\n"]
        + [f"build {system}: stub | tools/link_stubs.py\n  what = --system\n"]
        + [f"build build/portable/{LIBRARY}: portable {inputs} | csrc/exports.map {system}\n"]
        + [f"build build/plain/{LIBRARY}: plain {inputs} | csrc/exports.map\n"]
        + [f"build objects: phony {inputs}\n"]
    )
