"""What stays of a run on a GPU: benchmarks/results/<device>/<kind>_<date>.json, with how it was made."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import shlex
import time

import torch
from peers_cpu.machine import slug
from peers_cpu.report import write

HERE = os.path.dirname(os.path.abspath(__file__))


class Record:
    """Begins with a run. script: its file, ``bench_chain.py`` for records of kind chain."""

    def __init__(self, script: str, argv: list[str]):
        self.script, self.argv, self.begin = os.path.basename(script), argv, time.monotonic()
        self.date = datetime.datetime.now(datetime.timezone.utc)

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.begin

    def about(self, dry: bool = False) -> dict:
        """How the record was made, as the first keys of its file."""
        return {
            "format": 1,
            "command": command(self.argv, self.script),
            "date": self.date.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "versions": versions(),
            "device": describe(dry),
        }

    def keep(self, args: argparse.Namespace, **content: object) -> None:
        """Write ``content`` to ``args.out``, or where ``args.device`` or the device's name says; not if out is "-"."""
        if args.out == "-":
            return
        about = self.about(getattr(args, "dry", False))
        kind = self.script.removesuffix(".py").removeprefix("bench_")
        folder = os.path.join(HERE, "results", args.device or slug(about["device"]["name"]))
        path = args.out or os.path.join(folder, f"{kind}_{self.date:%Y%m%d_%H%M%S}.json")
        write(path, about | content)
        print(f"written: {os.path.relpath(path)}")


def describe(dry: bool) -> dict:
    """The device that was timed."""
    if dry:
        return {"name": "dry run"}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "multiprocessors": found.multi_processor_count,
        "memory_gb": round(found.total_memory / 1e9, 1),
        "compute_capability": f"{found.major}.{found.minor}",
    }


def versions() -> dict[str, str]:
    """Version of every library that took part, and of CUDA."""
    import lowbit

    found = {"lowbit": lowbit.__version__, "cuda": str(torch.version.cuda)}
    for name in ("torch", "humming-kernels"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command(argv: list[str], script: str) -> str:
    """What was typed, with file names in place of paths: a result file tells nothing of folders."""
    given = [os.path.basename(a) if "/" in a else a for a in argv]
    return shlex.join(["python", f"benchmarks/{script}", *given])
