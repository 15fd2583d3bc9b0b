"""Do the CUDA kernels keep the rules that no test can see? Reads their machine code; needs no GPU.

    python -m tools.check_cuda [build/obj/cuda/decode_4_a16.cu.o ...] [lowbit/lib/liblowbit_cuda.so]

Of every kernel: no spill, no stack frame and no wgmma that waits for the one before; registers and shared memory of a
block leave room for a second one on a multiprocessor, or never do (ALONE). Of those that may start before their
predecessor ends (OVERLAPS, compute capability 9.0 and newer; CONTRIBUTING.md has the rules): weights are fetched above
the wait and x below it, nothing is written and no thread leaves above it, and no load goes through the read-only path,
which the assembler moves below the wait; a thread that brings x to others waits for itself (BRINGERS). Of all others:
they never let the next kernel start early. Of those that read what the copy engine brings by other loads than wgmma: no
load is under way when they give it back. The order is that of the listing. A kernel may be empty for a target that it
never runs on (RUNS_ON).

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
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from os import cpu_count
from pathlib import Path

from .build_graph import GEN, ROOT, object_of

MAX_REGISTERS = 32 * 1024
MAX_SHARED = 114 * 1024  # with the 1024 bytes that the system takes of each block
ALONE_SHARED = 228 * 1024  # of a multiprocessor


@dataclass(frozen=True)
class Alone:
    """Kernels that have a multiprocessor to themselves: what the templates call the shared memory that they ask for,
    and what a block may have at most; ``newer``: as many registers from 10.0 on, where that is another number."""

    shared: str
    threads: int
    registers: int
    newer: int | None = None

    def on(self, arch: str) -> Alone:
        """The same for a target such as "90a"."""
        is_newer = self.newer is not None and int(re.match(r"\d+", arch)[0]) >= 100
        return replace(self, registers=self.newer, newer=None) if is_newer else self


#: Kernels for up to 16 tokens of gemm_sm90, and what of their names says that no warps help them but those that bring
#: stages: zeros are whole or none.
_NARROW, _PLAIN = "_ZN6lowbit9gemm_sm908multiply.*TileILi{}E", "FormILb[01]ELNS_8ZeroFormE[01]E"
#: By mangled name, the first that matches.
ALONE = {
    re.compile("_ZN6lowbit6decode8resident.*KindE1E"): Alone("kSharedWhole", 512, 128),
    re.compile("_ZN6lowbit9gemm_sm8015multiply_narrow"): Alone("kSharedLarge", 640, 96),
    re.compile("_ZN6lowbit9gemm_sm808multiply.*TileILi(32|48|64|96|128)E"): Alone("kSharedLarge", 256, 255),
    re.compile(f"{_NARROW.format('(8|16)')}.*{_PLAIN}"): Alone("kSharedAlone", 544, 96),
    re.compile(f"{_NARROW.format(16)}.*FormILb1E"): Alone("kSharedAlone", 640, 96),
    re.compile(_NARROW.format("(8|16)")): Alone("kSharedAlone", 640, 88, newer=96),
    re.compile("_ZN6lowbit9gemm_sm908multiply.*TileILi(32|48|64|96|128)E"): Alone("kSharedAlone", 384, 168),
    re.compile("_ZN6lowbit9gemm_sm9014multiply_large"): Alone("kSharedTwoRings", 384, 168),
}
#: Kernels without launch bounds that leave room for a second block: their shared memory and threads, as of Alone;
#: the first that matches.
HALVES = {
    re.compile(f"{_NARROW.format('(8|16)')}Li8E.*{_PLAIN}"): ("kSharedHalf", 288),
    re.compile(f"{_NARROW.format('(8|16)')}Li8E"): ("kSharedHalf", 384),
    re.compile(f"{_NARROW.format('(32|64)')}Li8E"): ("kSharedHalf", 288),
}
#: Mangled names of kernels that are launched with the programmatic attribute; of those that bring weights and x as
#: boxes of tensors; of those that read no weight and have no dynamic shared memory.
OVERLAPS = ("_ZN6lowbit6decode", "_ZN6lowbit9gemm_sm80", "_ZN6lowbit9gemm_sm90")
BOXES = ("_ZN6lowbit9gemm_sm908multiply", "_ZN6lowbit9gemm_sm9014multiply_large")
ADDS = ("_ZN6lowbit9gemm_sm809add_parts", "_ZN6lowbit9gemm_sm909add_parts")
#: Targets such as "90a" that kernels run on, where those are not all.
RUNS_ON = {
    re.compile(BOXES[0] + ".*TileILi(8|16)ELi8E"): re.compile("90a"),  # in half of a multiprocessor
    re.compile(BOXES[0] + ".*TileILi(8|16)E"): re.compile(r"(9|10|11)\d[af]?"),
    re.compile(BOXES[0] + ".*TileILi(32|48|64|96|128)E"): re.compile("90a"),
    re.compile(BOXES[1]): re.compile("90a"),
}

#: Kernels of which a thread brings x that waits for itself, and how often: for one box of x, or for several.
BRINGERS = {re.compile(_NARROW.format("(8|16)")): 2, re.compile(BOXES[0]): 1}

_USAGE = re.compile(r"^ Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE)
_THREADS = re.compile(
    r"^\.nv\.info\.(\S+)$|EIATTR_MAX_THREADS\s+Format:\s+EIFMT_SVAL\s+Value:\s+(\S+) (\S+) (\S+)", re.M
)
_SPILLS = re.compile(r"Function properties for (\S+)\s+.*?, (\d+) bytes spill stores, (\d+) bytes spill loads")
_CODE = re.compile(r"^\s+Function : (\S+)$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", re.MULTILINE)
_SPACE = re.compile(r"^namespace lowbit::(\w+) \{", re.MULTILINE)
_SHARED = re.compile(r"\bkShared(?:Two|Alone) = ([\d* ]+)[,;]")
_SERIAL = re.compile(r"\(C\d+\) Potential Performance Loss: (wgmma.*? serialized.*?) in (?:the )?function '([^']+)'")
_NOTHING = {"LDC", "MOV", "EXIT", "BRA", "NOP"}  # instructions of an empty kernel


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
            yield "lets the next kernel start early, expected only of families decode, gemm_sm80 and gemm_sm90"
        return
    expected = 1 + next((more for names, more in BRINGERS.items() if names.match(name)), 0)
    if waits != expected:
        yield f"waits {waits} times for the kernel before, expected {expected} (griddepcontrol.wait)"
        return
    wait, *own_waits = (i for i, c in enumerate(code) if c == "ACQBULK")
    # What lies between two waits belongs to the first: threads that multiply have one, others bring x after theirs.
    for begin, end in zip([wait, *own_waits], [*own_waits, len(code)]):
        brings, multiplies = (
            any(c.startswith(what) for c in code[begin:end]) for what in ("UTMALDG", ("HMMA", "HGMMA"))
        )
        if own_waits and brings is multiplies:
            both = "brings x and multiplies" if brings else "neither brings x nor multiplies"
            yield f"{both} after wait {code[:begin].count('ACQBULK') + 1}"
    above, below = (
        [c for c in half if c.startswith(("LDG", "UBLKCP", "UTMALDG"))] for half in (code[:wait], code[wait:])
    )
    box = "UTMALDG" if name.startswith(BOXES) else ""
    if not any(c.startswith(box) for c in above) and not name.startswith(ADDS):
        yield f"fetches nothing above the wait, expected its weights there{box and ', by UTMALDG'}"
    if not any(c.startswith(box or "LDG") for c in below):
        yield f"fetches nothing below the wait, expected x there{box and ', by UTMALDG'}"
    # Of a warp that brings x all threads leave but the one that was elected: the others' wait is the block's.
    elected = "ELECT" if own_waits else None
    for c in dict.fromkeys(code[:wait]):
        if c == "EXIT" and elected in code[: code.index(c)]:
            continue
        if c.startswith(("STG", "ST.", "RED", "ATOM", "UBLKRED", "UTMASTG", "UTMAREDG")) or c == "EXIT":
            yield f"has {c} above the wait, expected neither writes nor exits there"
    for c in dict.fromkeys(above + below):
        if "CONSTANT" in c:
            yield f"has {c}, expected no load through the read-only path (ld.global.nc, __ldg)"


def ring_problems(name: str, code: list[str]) -> Iterator[str]:
    """Broken rules of giving stages back to the copy engine: loads end before (csrc/templates/ptx, end_reads)."""
    if not re.match(_NARROW.format("(8|16)"), name) or not any(c.startswith("HMMA") for c in code):
        return
    if "ACQBULK" not in code:  # order_problems says so
        return
    # Above the wait the same instruction stands for barriers that were made.
    text = " ".join(code[code.index("ACQBULK") :])
    backs = re.findall(r"FENCE\.VIEW\.ASYNC\S* (.*?)SYNCS\.ARRIVE", text)
    if not backs:
        yield "gives stages back without FENCE.VIEW.ASYNC before SYNCS.ARRIVE, expected that its loads have ended"
    elif any(re.search(r"\bLDSM?\b", between) for between in backs):
        yield "loads between FENCE.VIEW.ASYNC and SYNCS.ARRIVE, expected that loads of a stage have ended"


def code_problems(name: str, arch: str, code: list[str]) -> Iterator[str]:
    """Broken rules of a kernel's instructions for a target such as "90a"."""
    targets = next((targets for names, targets in RUNS_ON.items() if names.match(name)), None)
    if targets and not targets.fullmatch(arch):
        if not set(code) <= _NOTHING:
            yield "has code, expected none for a target that it never runs on"
    elif targets and set(code) <= _NOTHING:
        yield "has no code"
    elif int(arch.rstrip("af")) >= 90:
        yield from order_problems(name, code)
        yield from ring_problems(name, code)


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


def alone_problems(registers: int, stack: int, shared: int, bounds: Alone) -> Iterator[str]:
    """The same of a kernel that has a multiprocessor to itself; what bounds it are registers, not threads."""
    if stack:
        yield f"has a stack frame of {stack} bytes, expected none"
    if registers > bounds.registers:
        yield f"takes {registers} registers a thread, expected at most {bounds.registers} ({bounds.threads} threads)"
    if not MAX_SHARED < shared <= ALONE_SHARED:
        yield f"takes {shared} bytes of shared memory a block, expected more than {MAX_SHARED}, at most {ALONE_SHARED}"


def log_problems(log: str) -> Iterator[tuple[str, str]]:
    """(kernel, broken rule) of what ptxas said when it compiled a file."""
    for name, stores, loads in _SPILLS.findall(log):
        if int(stores) or int(loads):
            yield name, f"spills, {stores} bytes of stores and {loads} of loads"
    for why, name in _SERIAL.findall(log):
        yield name, f"loses time: {why}"


def constant(name: str, folder: Path = ROOT / "csrc/templates") -> int:
    """A product of numbers that the templates give a name once; 0 when they do not."""
    wanted = re.compile(rf"\b{name} = ([\d* ]+)[,;]")
    found = [product for path in folder.rglob("*.cuh") for product in wanted.findall(path.read_text())]
    return prod(map(int, found[0].split("*"))) if len(found) == 1 else 0


def dynamic_shared(folder: Path = ROOT / "csrc/templates") -> dict[str, int]:
    """The most shared memory that launchers ask for, per namespace of the templates, by the names it has there."""
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

    for (arch, usage), (arch_of_elf, elf) in zip(dump("-res-usage"), dump("-elf"), strict=True):
        if arch != arch_of_elf:
            raise SystemExit(f"check_cuda: cuobjdump lists sm_{arch} and sm_{arch_of_elf} of {path} in one place")
        threads, name = {}, ""
        for section, *sizes in _THREADS.findall(elf):
            name = section or name
            if not section:
                threads[name] = prod(int(size, 16) for size in sizes)
        for name, registers, stack, shared, local in _USAGE.findall(usage):
            count += 1
            if half := next((half for names, half in HALVES.items() if names.match(name)), None):
                taken = int(shared) + constant(half[0])
                report(arch, name, usage_problems(int(registers), int(stack) + int(local), taken, half[1]))
                continue
            if bounds := next((bounds for names, bounds in ALONE.items() if names.match(name)), None):
                taken = int(shared) + constant(bounds.shared)
                report(arch, name, alone_problems(int(registers), int(stack) + int(local), taken, bounds.on(arch)))
                continue
            asked = max((n for space, n in dynamic.items() if f"6lowbit{len(space)}{space}" in name), default=0)
            asked = 0 if name.startswith(ADDS) else asked
            report(
                arch,
                name,
                usage_problems(int(registers), int(stack) + int(local), int(shared) + asked, threads.get(name)),
            )
    for arch, listing in dump("-sass"):
        parts = _CODE.split(listing)
        for name, text in zip(parts[1::2], parts[2::2]):
            report(arch, name, code_problems(name, arch, _INSTRUCTION.findall(text)))
    log = path.with_name(f"{path.name}.log")
    if log.is_file():
        found.extend(f"{path.name}: {name} {sentence}" for name, sentence in log_problems(log.read_text()))
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
