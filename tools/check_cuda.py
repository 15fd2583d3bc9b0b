"""Do the CUDA kernels keep the rules that no test can see? Reads their machine code; needs no GPU.

    python -m tools.check_cuda [build/obj/cuda/decode_4_a16.cu.o ...] [lowbit/lib/liblowbit_cuda.so]

Of every kernel: no spill and no stack frame; registers and shared memory of a block leave room for a second one on a
multiprocessor, or never do (ALONE). Of those that may start before their predecessor ends (namespace lowbit::decode,
compute capability 9.0 and newer; CONTRIBUTING.md has the rules): weights are fetched above the wait and x below it,
nothing is written and no thread leaves above it, and no load goes through the read-only path, which the assembler moves
below the wait. Of all others: they never let the next kernel start early. The order is that of the listing.

Without arguments it checks all objects of the last build. Prints one line a broken rule; exits with 1 if there is one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from math import prod
from os import cpu_count
from pathlib import Path

from .build_graph import GEN, ROOT, object_of

MAX_REGISTERS = 32 * 1024
MAX_SHARED = 114 * 1024  # with the 1024 bytes that the system takes of each block
#: Kernels that have a multiprocessor to themselves: their mangled names, and what the templates call the shared memory
#: that they ask for.
ALONE = {
    re.compile("_ZN6lowbit6decode6phases"): "kSharedAlone",
    re.compile("_ZN6lowbit6decode8resident.*KindE1E"): "kSharedWhole",
}
ALONE_THREADS, ALONE_REGISTERS, ALONE_SHARED = 512, 64 * 1024, 228 * 1024
ADDS = "_ZN6lowbit6decode9add_parts"  # kernels that read no weight
OVERLAPS = "_ZN6lowbit6decode"  # mangled names of kernels that are launched with the programmatic attribute

_USAGE = re.compile(r"^ Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE)
_THREADS = re.compile(
    r"^\.nv\.info\.(\S+)$|EIATTR_MAX_THREADS\s+Format:\s+EIFMT_SVAL\s+Value:\s+(\S+) (\S+) (\S+)", re.M
)
_SPILLS = re.compile(r"Function properties for (\S+)\s+.*?, (\d+) bytes spill stores, (\d+) bytes spill loads")
_CODE = re.compile(r"^\s+Function : (\S+)$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", re.MULTILINE)
_SPACE = re.compile(r"^namespace lowbit::(\w+) \{", re.MULTILINE)
_SHARED = re.compile(r"\bkShared(?:Bytes|Two) = ([\d* ]+)[,;]")


def find_cuobjdump() -> str | None:
    """On PATH, in the CUDA toolkit, or in triton's package."""
    nvcc, triton = shutil.which("nvcc"), find_spec("triton")
    places = [Path(found) for found in [shutil.which("cuobjdump")] if found]
    places += [Path(nvcc).resolve().with_name("cuobjdump")] if nvcc else []
    places += [Path("/usr/local/cuda/bin/cuobjdump")]
    places += [Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"] if triton else []
    return next((str(path) for path in places if path.is_file()), None)


def order_problems(name: str, code: list[str]) -> Iterator[str]:
    """Broken rules of overlapping launches, from the instructions of a kernel for 9.0 or newer, in order."""
    starts_next, waits = "PREEXIT" in code, code.count("ACQBULK")
    if not name.startswith(OVERLAPS):
        if starts_next:
            yield "lets the next kernel start early, expected only of family decode"
        return
    if waits != 1:
        yield f"waits {waits} times for the kernel before, expected once (griddepcontrol.wait)"
        return
    wait = code.index("ACQBULK")
    above, below = (
        [c for c in half if c.startswith(("LDG", "UBLKCP", "UTMALDG"))] for half in (code[:wait], code[wait:])
    )
    if not above and not name.startswith(ADDS):
        yield "fetches nothing above the wait, expected its weights there"
    if not any(c.startswith("LDG") for c in below):
        yield "fetches nothing below the wait, expected x there"
    for c in dict.fromkeys(code[:wait]):
        if c.startswith(("STG", "ST.", "RED", "ATOM", "UBLKRED", "UTMASTG")) or c == "EXIT":
            yield f"has {c} above the wait, expected neither writes nor exits there"
    for c in dict.fromkeys(above + below):
        if "CONSTANT" in c:
            yield f"has {c}, expected no load through the read-only path (ld.global.nc, __ldg)"


def usage_problems(registers: int, stack: int, shared: int, threads: int | None) -> Iterator[str]:
    """Broken rules of size; ``threads`` is the most that a block may have, None without launch bounds."""
    if stack:
        yield f"has a stack frame of {stack} bytes, expected none"
    if threads is None:
        yield "has no __launch_bounds__, so that its registers a block are unknown"
    elif -(-registers // 8) * 8 * threads > MAX_REGISTERS:
        taken = -(-registers // 8) * 8 * threads
        yield f"takes {taken} registers a block ({registers} x {threads} threads), expected at most {MAX_REGISTERS}"
    if shared > MAX_SHARED:
        yield f"takes {shared} bytes of shared memory a block, expected at most {MAX_SHARED}"


def alone_problems(registers: int, stack: int, shared: int) -> Iterator[str]:
    """The same of a kernel that has a multiprocessor to itself; its bounds are registers, not threads."""
    if stack:
        yield f"has a stack frame of {stack} bytes, expected none"
    taken = -(-registers // 8) * 8 * ALONE_THREADS
    if taken > ALONE_REGISTERS:
        yield (
            f"takes {taken} registers a block ({registers} x {ALONE_THREADS} threads), "
            f"expected at most {ALONE_REGISTERS}"
        )
    if not MAX_SHARED < shared <= ALONE_SHARED:
        yield f"takes {shared} bytes of shared memory a block, expected more than {MAX_SHARED}, at most {ALONE_SHARED}"


def constant(name: str, folder: Path = ROOT / "csrc/templates") -> int:
    """A product of numbers that the templates give a name once; 0 when they do not."""
    wanted = re.compile(rf"\b{name} = ([\d* ]+)[,;]")
    found = [product for path in folder.rglob("*.cuh") for product in wanted.findall(path.read_text())]
    return prod(map(int, found[0].split("*"))) if len(found) == 1 else 0


def dynamic_shared(folder: Path = ROOT / "csrc/templates") -> dict[str, int]:
    """The most shared memory that launchers ask for, per namespace of the templates: their kSharedBytes."""
    found, asked = {}, set()
    for text in (path.read_text() for path in sorted(folder.rglob("*.cuh"))):
        sizes = [prod(map(int, product.split("*"))) for product in _SHARED.findall(text)]
        for space in _SPACE.findall(text):
            if "extern __shared__" in text:
                asked.add(space)
            if sizes:
                found[space] = max(*sizes, found.get(space, 0))
    # Why more than any limit: memory that nobody can see here must not pass.
    return {space: found.get(space, 1 << 30) for space in asked | set(found)}


def problems(path: Path, cuobjdump: str) -> tuple[int, list[str]]:
    """(how many kernels a file has, counted per architecture; one sentence for each broken rule)."""

    def dump(*options: str) -> list[tuple[str, str]]:
        done = subprocess.run([cuobjdump, *options, str(path)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"check_cuda: cuobjdump fails on {path}: {done.stderr.strip()[-300:]}")
        parts = re.split(r"^arch = sm_(\w+)$", done.stdout, flags=re.MULTILINE)
        return list(zip(parts[1::2], parts[2::2]))

    count, found, dynamic = 0, [], dynamic_shared()

    def report(arch: str, name: str, sentences) -> None:
        found.extend(f"{path.name}, sm_{arch}: {name} {sentence}" for sentence in sentences)

    for (arch, usage), (_, elf) in zip(dump("-res-usage"), dump("-elf")):
        threads, name = {}, ""
        for section, *sizes in _THREADS.findall(elf):
            name = section or name
            if not section:
                threads[name] = prod(int(size, 16) for size in sizes)
        for name, registers, stack, shared, local in _USAGE.findall(usage):
            count += 1
            if alone := [size for names, size in ALONE.items() if names.match(name)]:
                taken = int(shared) + constant(alone[0])
                report(arch, name, alone_problems(int(registers), int(stack) + int(local), taken))
                continue
            asked = max((n for space, n in dynamic.items() if f"6lowbit{len(space)}{space}" in name), default=0)
            report(
                arch,
                name,
                usage_problems(int(registers), int(stack) + int(local), int(shared) + asked, threads.get(name)),
            )
    for arch, listing in dump("-sass"):
        if int(arch.rstrip("af")) >= 90:
            parts = _CODE.split(listing)
            for name, text in zip(parts[1::2], parts[2::2]):
                report(arch, name, order_problems(name, _INSTRUCTION.findall(text)))
    log = path.with_name(f"{path.name}.log")
    for name, stores, loads in _SPILLS.findall(log.read_text()) if log.is_file() else []:
        if int(stores) or int(loads):
            found.append(f"{path.name}: {name} spills, {stores} bytes of stores and {loads} of loads")
    return count, found


def last_build() -> list[Path]:
    """The objects of the last build: older ones of kernels that it left out may lie beside them."""
    sources = [f"{GEN}/{name}" for name in json.loads((ROOT / GEN / "manifest.json").read_text())["files"]]
    sources += map(str, sorted((ROOT / "csrc/cuda").glob("*.cu")))
    return [ROOT / object_of(source) for source in sources if source.endswith(".cu")]


def readable(sentences: list[str]) -> list[str]:
    """The same with C++ names for mangled ones, where c++filt is installed."""
    if not sentences or shutil.which("c++filt") is None:
        return sentences
    done = subprocess.run(["c++filt"], input="\n".join(sentences), capture_output=True, text=True)
    return done.stdout.splitlines()


def main(arguments: list[str]) -> int:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("check_cuda: needs cuobjdump, found none on PATH, beside nvcc or in triton: run `pip install triton`")
        return 1
    paths = [Path(argument) for argument in arguments] or last_build()
    with ThreadPoolExecutor(cpu_count()) as pool:
        results = list(pool.map(lambda path: problems(path, cuobjdump), paths))
    found = [sentence for _, sentences in results for sentence in sentences]
    print(
        "\n".join(
            [*readable(found), f"{sum(n for n, _ in results)} kernels in {len(paths)} files: {len(found)} broken rules"]
        )
    )
    return int(bool(found) or not paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
