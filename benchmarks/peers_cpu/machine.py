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
# Add a word of every cache line of four streams: rdi start, rsi lines of a stream, rdx its length, rcx three times it.
_READ_LINES = bytes.fromhex("480307" + "48030417" + "48030457" + "4803040f" + "4883c740" + "48ffce" + "75e8" + "c3")
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


class _Code:
    """Machine code (x86-64, System V) as a function of ctypes; it runs without Python's lock."""

    def __init__(self, code: bytes, *argument_types):
        if platform.machine() != "x86_64":
            raise OSError("the code is for x86-64")
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._page.write(code)
        self._anchor = ctypes.c_char.from_buffer(self._page)
        self.call = ctypes.CFUNCTYPE(None, *argument_types)(ctypes.addressof(self._anchor))


def clock_ghz() -> float | None:
    """Clock of the core we run on, from a chain of multiplications; None where that code can't run."""
    try:
        chain = _Code(_IMUL_CHAIN, ctypes.c_uint64)
    except OSError:  # Why: another CPU, or a system that refuses memory that can be written and run.
        return None
    rounds = 400_000  # about 3 ms
    return round(rounds * _IMUL_CYCLES / min(_seconds(chain.call, rounds) for _ in range(15)) / 1e9, 2)


class Reader:
    """A buffer to read: the rate at which weights could arrive at best, on the machine as it is at this moment.

    One load from every cache line, in four streams; where that code can't run, libc's memchr, which is slower. On a
    shared machine the rate moves by a factor of two or more within minutes, so it is taken again beside every pass,
    with the filter of every other sample.
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
        self._read = self._best_read()

    @staticmethod
    def _best_read():
        """A function of (address, bytes) that reads them."""
        try:
            lines = _Code(_READ_LINES, *[ctypes.c_uint64] * 4)
        except OSError:  # Why: as for the clock.
            memchr = ctypes.CDLL(None).memchr
            memchr.argtypes, memchr.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
            return lambda start, size: memchr(start, 1, size)
        return lambda start, size: lines.call(start, size // 256, size // 4, size // 4 * 3)

    def gbs(self, threads: int, seconds: float = 0.1) -> float | None:
        """GB/s of reading the buffer over and over, each thread its own part of each chunk; None without clean samples.

        With several threads, handing out the parts is inside the time (some tens of microseconds a chunk).
        """
        part = (_CHUNK_MB << 20) // threads // 4096 * 4096
        with ThreadPoolExecutor(max(1, threads - 1)) as pool:

            def chunk(i: int) -> None:
                first = self._base + (i * _CHUNK_MB << 20)
                others = [pool.submit(self._read, first + t * part, part) for t in range(1, threads)]
                self._read(first, part)
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
