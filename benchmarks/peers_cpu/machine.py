"""What the numbers stand beside: CPU, clock and memory rates, measured in the process that times the products."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import time
from concurrent.futures import ThreadPoolExecutor

from .timing import measure

# A chain of 8 dependent imul (3 cycles each on every x86 of the last 15 years), then dec, jnz: rdi counts the rounds.
_IMUL_CHAIN = bytes.fromhex("480fafc0" * 8 + "48ffcf" + "75db" + "c3")
_IMUL_CYCLES = 24
_CHUNK_MB = 32  # a part of the buffer that is read in one sample


def cpu_name() -> str:
    """The model name, with family and model where the name is as vague as a virtual machine makes it."""
    try:
        with open("/proc/cpuinfo") as info:
            fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", info.read(), re.M))
    except OSError:
        return platform.processor() or platform.machine()
    return f"{fields.get('model name', platform.machine())} ({fields.get('cpu family')}/{fields.get('model')})"


def slug(name: str) -> str:
    """The folder of a device: 'Intel(R) Xeon(R) Processor (6/167)' -> 'intel-xeon-processor-6-167'."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", " ", name.lower())).strip("-")


def features() -> list[str]:
    """The instruction sets that matter here, of those that the CPU has."""
    wanted = ("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_vbmi", "avx512_bf16")
    wanted += ("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16")
    try:
        with open("/proc/cpuinfo") as info:
            have = set(re.search(r"^flags\s*: (.*)$", info.read(), re.M).group(1).split())
    except (OSError, AttributeError):
        return []
    names = {name.replace("avx512vbmi", "avx512_vbmi") for name in have}
    return [name for name in wanted if name in names]


def clock_ghz() -> float | None:
    """Clock of the core we run on, from a chain of multiplications; None where that code can't run."""
    if platform.machine() != "x86_64":
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # Why: some systems refuse memory that can be written and run.
        return None
    page.write(_IMUL_CHAIN)
    anchor = ctypes.c_char.from_buffer(page)
    chain = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(ctypes.addressof(anchor))
    rounds = 400_000  # about 3 ms
    best = min(_seconds(chain, rounds) for _ in range(15))
    del chain, anchor
    page.close()
    return round(rounds * _IMUL_CYCLES / best / 1e9, 2)


class Reader:
    """A buffer to read: the rate at which weights could arrive at best, on the machine as it is at this moment.

    libc's memchr for a byte that is not there: wide loads and nothing else. On a shared machine the rate moves by a
    factor of two or more within minutes, so it is taken again beside every pass, with the filter of every other sample.
    """

    def __init__(self, megabytes: int):
        self._chunks = max(1, megabytes // _CHUNK_MB)
        self._buffer = mmap.mmap(-1, self._chunks * _CHUNK_MB << 20)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._buffer.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # Why: a kernel without huge pages; then 4 KiB ones are what the weights have, too.
                pass
        self._anchor = ctypes.c_char.from_buffer(self._buffer)
        self._base = ctypes.addressof(self._anchor)
        ctypes.memset(self._base, 0, len(self._buffer))
        self._memchr = ctypes.CDLL(None).memchr
        self._memchr.argtypes, self._memchr.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p

    def gbs(self, threads: int, seconds: float = 0.1) -> float | None:
        """GB/s of reading the buffer over and over, each thread its own part of each chunk; None without clean samples.

        With several threads, handing out the parts is inside the time (some tens of microseconds a chunk).
        """
        part = (_CHUNK_MB << 20) // threads
        with ThreadPoolExecutor(max(1, threads - 1)) as pool:

            def chunk(i: int) -> None:
                first = self._base + (i * _CHUNK_MB << 20)
                others = [pool.submit(self._memchr, first + t * part, 1, part) for t in range(1, threads)]
                self._memchr(first, 1, part)
                for other in others:
                    other.result()

            summary = measure(chunk, self._chunks, seconds=seconds, threads=threads).summary(threads)
        return summary and round((_CHUNK_MB << 20) / summary["median_s"] / 1e9, 1)


def cache_mb() -> dict[str, float]:
    """Size in MB of each cache of core 0, by name ("L1d", "L2", "L3")."""
    found = {}
    root = "/sys/devices/system/cpu/cpu0/cache"
    for index in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        try:
            level, kind, size = (open(f"{root}/{index}/{f}").read().strip() for f in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found[f"L{level}" + ("d" if kind == "Data" else "")] = int(size.rstrip("K")) / 1024
    return found


def describe(threads: list[int]) -> dict:
    """Everything about the machine that a result file records; dram_read_gbs reads 1 GiB, by number of threads."""
    try:
        huge_pages = re.search(r"\[(\w+)\]", open("/sys/kernel/mm/transparent_hugepage/enabled").read()).group(1)
    except (OSError, AttributeError):
        huge_pages = "unknown"
    reader = Reader(1024)
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "features": features(),
        "cache_mb": cache_mb(),
        "clock_ghz": clock_ghz(),
        "dram_read_gbs": {str(t): reader.gbs(t, 0.5) for t in threads},
        "transparent_huge_pages": huge_pages,
        "kernel": platform.release(),
    }


def _seconds(call, *args) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start
