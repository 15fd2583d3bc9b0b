"""`lowbit info`: what was built, what this machine has, and what would run."""

from __future__ import annotations

import argparse
import os
import platform

import torch

from .. import __version__, env, extension
from ..dtypes import ACT_TYPES
from ..errors import DtypeError, ExtensionError
from ..scheme import Scheme, why_not

#: Rows of x that the plan of a weight on CUDA is shown for.
_ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)


class Info(dict):
    """Facts by name; prints as lines."""

    def __str__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.items())

    __repr__ = __str__


def info(pw=None) -> Info:
    """Versions, the libraries, instruction sets (best first; the one in use), kernels, threads and variables; for a
    packed weight also the kernel that serves each activation type. Never fails because the library does not load:
    then ``library`` says why. Raises DtypeError when pw is no PackedWeight.
    """
    facts = Info(
        lowbit=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cpu=_cpu_name(),
        threads=torch.get_num_threads(),
    )
    try:
        rows = extension.kernel_rows()
    except ExtensionError as error:
        facts["library"] = str(error)
        return facts
    facts["library"] = str(extension.LIBRARY)
    facts["instruction sets"] = " ".join(extension.isas())
    facts["in use"] = extension.isa()
    facts["kernels"] = len(rows)
    facts["cuda"] = _cuda()
    for variable in env.VARIABLES:
        if variable.name in os.environ:
            facts[variable.name] = os.environ[variable.name]
    if pw is not None:
        facts.update(_of_weight(pw))
    return facts


def _cuda() -> str:
    """What the CUDA library has and whether it runs here."""
    library = extension.cuda()
    if isinstance(library, str):
        count = sum(row["library"] == extension.CUDA_LIBRARY.name for row in extension.manifest())
        return library + (f" ({count} kernels in {extension.CUDA_LIBRARY} wait for one)" if count else "")
    built, driver = (extension.cuda_version(n) for n in (library.lowbit_cuda_runtime(), library.lowbit_cuda_driver()))
    count = len(library.lowbit_cuda_kernel_rows().split())
    facts = f"{count} kernels for {library.lowbit_cuda_archs().decode()}, CUDA {built}, driver for CUDA {driver}"
    for device in range(torch.cuda.device_count()):
        reason = extension.why_no_cuda(device)
        facts += f"; cuda:{device} {torch.cuda.get_device_name(device)}" + (f": not used, {reason}" if reason else "")
    return facts


def _cuda_kernels(scheme: Scheme, act: str, device: torch.device) -> str:
    """The kernels for a weight and a type of x, as ``decode in tiles of up to 4 rows of x, dequant``."""
    from .selftest_cuda import runs_on

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    largest: dict[str, int] = {}  # by family: rows of x in a tile; 0: any number
    for row in extension.manifest():
        if row["family"] == "cpu" or (row["weight"], row["act"]) != (scheme.weight.name, act):
            continue
        reason = why_not(scheme.weight, act, family=row["family"], scale_type=scheme.scale_type)
        if reason is None and runs_on(row, capability):
            largest[row["family"]] = max(row.get("tokens", 0), largest.get(row["family"], 0))
    return ", ".join(name + (f" in tiles of up to {rows} rows of x" if rows else "") for name, rows in largest.items())


def _plan(pw, act: str) -> str:
    """What is tried first for some numbers of rows of x, and the time that it would take."""
    from ..autotune.plan import candidates, device_of

    device = device_of(pw.device.index or 0)
    first = {m: candidates(pw.scheme, act, m, *pw.shape, device)[:1] for m in _ROWS}
    return "; ".join(f"{m} rows {found[0]}" for m, found in first.items() if found) or "the weight is expanded"


def _of_weight(pw) -> dict[str, str]:
    from ..pack import PackedWeight

    if not isinstance(pw, PackedWeight):
        raise DtypeError(f"expected a PackedWeight, got {type(pw).__name__}")
    facts = {"weight": repr(pw), "bits per weight": f"{8 * pw.nbytes / (pw.shape[0] * pw.shape[1]):.2f}"}
    if pw.codebook is not None:
        return {**facts, "kernels for it": "none read codebooks yet: it is dequantized for every product"}
    for act in ACT_TYPES:
        wanted = f"act={act.name!r}" if act.on_the_fly else f"x {act.name}"
        on_cpu = pw.layout == "cpu"
        name = pw.dtype.name
        kernel = extension.kernel_name(name, act.name) if on_cpu else _cuda_kernels(pw.scheme, act.name, pw.device)
        facts[f"kernel for {wanted}"] = kernel or "none in this build"
        if pw.native and not on_cpu and act.name in ("float16", "bfloat16"):
            facts[f"plan for {wanted}"] = _plan(pw, act.name)
    return facts


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return f"{name or platform.machine()}, {os.cpu_count()} logical cores"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`lowbit info` has no options."""
    parser.description = (
        "Prints versions, the compiled library, the CPU's instruction sets and the variables that are set."
    )


def run(args: argparse.Namespace) -> int:
    """Print the facts; 0, or 1 when the library does not load."""
    facts = info()
    print(facts)
    return 0 if "kernels" in facts else 1
