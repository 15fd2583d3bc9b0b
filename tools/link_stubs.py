"""Libraries to link against, never to run: what the oldest supported systems have, and nothing newer.

``--torch LIST``: libtorch_cpu.so with the C functions of the oldest supported torch. A name that this torch lacks is
then an error of the link, and no library of torch is needed for a build.

``--system``: this machine's C and C++ libraries, each symbol at its newest version that manylinux_2_28 has (PEP 600;
the limits are those of auditwheel's policy file). Linked with flags(), the result runs on glibc 2.28 whatever the
glibc of the machine it was built on. Needs readelf, and libstdc++.a for the few members that are younger.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

#: Newest versions of manylinux_2_28. Other version names (GLIBC_PRIVATE, GLIBC_ABI_*) are dropped.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
LIBRARIES = ("libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libgcc_s.so.1", "libstdc++.so.6")
#: What the static CUDA runtime needs besides: part of libc since glibc 2.34, libraries of their own before.
CUDA_LIBRARIES = ("libdl.so.2", "libpthread.so.0", "librt.so.1")
#: Why: shared_ptr reads this variable of glibc 2.32; 0 says "there may be threads", which is always right.
SINGLE_THREADED = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'


#: What --system writes and a portable link reads.
SYSTEM_FILES = (*LIBRARIES, "single_threaded.c")
CUDA_SYSTEM_FILES = CUDA_LIBRARIES


def flags(kind: str, folder: str, cuda: bool = False) -> str:
    """What a link needs after its objects: the system's libraries when it is ``plain``, the stubs in ``folder`` when
    ``portable``; ``cuda``: for a library that holds the CUDA runtime.

    The shared libstdc++ comes first, so that libstdc++.a only gives what that one lacks, and hidden
    (``--exclude-libs``): an exception must have one type in the whole process.
    """
    if kind == "plain":
        return "-lrt -ldl -lpthread" if cuda else ""
    libraries = " ".join(f"{folder}/{name}" for name in reversed(LIBRARIES))
    tail = f"-Wl,--exclude-libs,ALL -Wl,--as-needed {libraries} -l:libstdc++.a {libraries} -lgcc"
    # Why not as needed: before glibc 2.34 the symbols lie there, though libc's stub has them too. The archive: atexit.
    files = [*(f"{folder}/{name}" for name in CUDA_LIBRARIES), "-l:libc_nonshared.a"]
    named = " ".join(["-Wl,--no-as-needed", *files]) if cuda else ""
    return f"{folder}/single_threaded.c -nodefaultlibs {named} {tail}"


def allowed(version: str) -> tuple[int, ...] | None:
    """The numbers of a symbol version such as GLIBC_2.17, or None when manylinux_2_28 has it not."""
    name, _, digits = version.rpartition("_")
    if name not in LIMITS or not digits.replace(".", "").isdigit():
        return None
    numbers = tuple(map(int, digits.split(".")))
    return numbers if numbers <= LIMITS[name] else None


def exported(library: str) -> dict[str, tuple[str, str, int]]:
    """symbol -> (newest allowed version, ELF type, size), from the dynamic symbols of a library."""
    listing = subprocess.run(["readelf", "-W", "--dyn-syms", library], check=True, capture_output=True, text=True)
    best: dict[str, tuple[tuple[int, ...], str, str, int]] = {}
    for line in listing.stdout.splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[6] in ("UND", "ABS") or "@" not in fields[7]:
            continue
        name, _, version = fields[7].replace("@@", "@").partition("@")
        numbers = allowed(version)
        if numbers is not None and (name not in best or numbers > best[name][0]):
            best[name] = (numbers, version, fields[3], int(fields[2], 0))
    return {name: row[1:] for name, row in sorted(best.items())}


def assembly(symbols: dict[str, tuple[str, str, int]]) -> str:
    """One label per symbol, with its type, size and version."""
    kinds = {"OBJECT": "object", "TLS": "tls_object"}
    lines = []
    for i, (name, (version, kind, size)) in enumerate(symbols.items()):
        section = '.section .tbss,"awT",@nobits' if kind == "TLS" else ".data" if kind == "OBJECT" else ".text"
        lines.append(f"{section}\n.globl s{i}\n.type s{i},@{kinds.get(kind, 'function')}\n.size s{i},{size}\ns{i}:")
        lines.append(".zero 1" if kind == "TLS" else ".byte 0")
        lines.append(f".symver s{i},{name}@@{version},remove")
    return "\n".join(lines) + '\n.section .note.GNU-stack,"",@progbits\n'


def link(cxx: str, source: Path, soname: str, target: Path, *extra: str) -> None:
    command = [cxx, "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", *extra, str(source), "-o", str(target)]
    subprocess.run(command, check=True)


def torch_stub(names: list[str], out: Path, cxx: str) -> None:
    source = out / "libtorch_cpu.s"
    text = "".join(f".globl {n}\n.type {n},@function\n{n}: .byte 0\n" for n in names)
    source.write_text(".text\n" + text + '.section .note.GNU-stack,"",@progbits\n')
    link(cxx, source, "libtorch_cpu.so", out / "libtorch_cpu.so")


def system_stubs(out: Path, cxx: str) -> None:
    for name in (*LIBRARIES, *CUDA_LIBRARIES):
        found = subprocess.run([cxx, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
        symbols = exported(found.stdout.strip())
        source, script = out / f"{name}.s", out / f"{name}.map"
        source.write_text(assembly(symbols))
        versions = sorted({version for version, _, _ in symbols.values()})
        script.write_text("".join(f"{version} {{}};\n" for version in versions))
        link(cxx, source, name, out / name, f"-Wl,--version-script={script}")
    (out / "single_threaded.c").write_text(SINGLE_THREADED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cxx", default="g++")
    parser.add_argument("--torch", type=Path, metavar="LIST", help="file with one symbol a line")
    parser.add_argument("--system", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.torch:
        torch_stub(args.torch.read_text().split(), args.out, args.cxx)
    if args.system:
        system_stubs(args.out, args.cxx)


if __name__ == "__main__":
    sys.exit(main())
