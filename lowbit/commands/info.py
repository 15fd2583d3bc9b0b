"""`lowbit info`: what was built, what this machine has, and what would run."""

from __future__ import annotations

import argparse
import os
import platform
import textwrap

import torch

from .. import __version__, cuda_devices, env, extension, kernel_list, libraries
from ..autotune.plan import BUCKETS, DEVICES, Device, device_of, find_device
from ..autotune.table import PlanTable, plan_table
from ..autotune.tuned import counts
from ..dtypes import ACT_TYPES, kernel_type
from ..errors import DtypeError, ExtensionError, SchemeError, ShapeError
from ..scheme import FAMILY_ACTS, WHOLE_ZEROS, ZERO_KINDS, Scheme, why_not

#: Types of x that products on CUDA are planned for.
_PLANNED = FAMILY_ACTS["decode"]
_PLAN_OPTIONS = ("m", "group_size", "zero_kind", "act", "device")


class Info(dict):
    """Facts by name; prints as lines, tables below their name."""

    def __str__(self) -> str:
        width = max(map(len, self))
        texts = {name: str(value) for name, value in self.items()}
        return "\n".join(
            f"{name}\n{textwrap.indent(text, '  ')}" if "\n" in text else f"{name:<{width}}  {text}"
            for name, text in texts.items()
        )

    __repr__ = __str__


def info(pw=None, device: str | Device | None = None) -> Info:
    """Versions, the libraries, instruction sets (best first; the one in use), kernels, threads and variables; for a
    packed weight also the kernel that serves each activation type, and for x in float16 and bfloat16 the plan on its
    GPU with the times that were measured there (:func:`lowbit.tune`), a :class:`~lowbit.autotune.table.PlanTable`.

    device: a GPU, which need not exist, to plan for instead, also for a weight on the CPU: "h200", "80,108,0"
    (capability, blocks and pairs at once), or an autotune.plan.Device. Never fails because the library does not load:
    then ``library`` says why. Raises DtypeError when pw is no PackedWeight, DeviceError for a device that is none,
    ExtensionError when there is no CUDA library to plan with, or it has no kernels for the device.
    """
    facts = Info(
        lowbit=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cpu=_cpu_name(),
        threads=torch.get_num_threads(),
    )
    try:
        rows = kernel_list.kernel_rows()
    except ExtensionError as error:
        facts["library"] = str(error)
        return facts
    facts["library"] = str(libraries.LIBRARY)
    facts["instruction sets"] = " ".join(extension.isas())
    facts["in use"] = extension.isa()
    facts["kernels"] = len(rows)
    facts["cuda"] = _cuda()
    if any(counts()):
        facts["tuned"] = "{} products by tables that ship with lowbit, {} by times of this machine".format(*counts())
    for variable in env.VARIABLES:
        if variable.name in os.environ:
            facts[variable.name] = os.environ[variable.name]
    if pw is None and device is not None:
        raise DtypeError("expected a PackedWeight to plan for a device, got None")
    if pw is not None:
        facts.update(_of_weight(pw, device))
    return facts


def _cuda() -> str:
    """What the CUDA library has and whether it runs here."""
    library = extension.cuda()
    if isinstance(library, str):
        count = sum(row["library"] == libraries.CUDA_LIBRARY.name for row in kernel_list.manifest())
        return library + (f" ({count} kernels in {libraries.CUDA_LIBRARY} wait for one)" if count else "")
    built, driver = (
        cuda_devices.cuda_version(n) for n in (library.lowbit_cuda_runtime(), library.lowbit_cuda_driver())
    )
    count = len(library.lowbit_cuda_kernel_rows().split())
    facts = f"{count} kernels for {library.lowbit_cuda_archs().decode()}, CUDA {built}, driver for CUDA {driver}"
    for device in range(torch.cuda.device_count()):
        reason = cuda_devices.why_no_cuda(device)
        facts += f"; cuda:{device} {torch.cuda.get_device_name(device)}" + (f": not used, {reason}" if reason else "")
    return facts


def _cuda_kernels(scheme: Scheme, act: str, device: torch.device, codebook: bool = False) -> str:
    """The kernels for a weight and a type of x, as ``decode in tiles of up to 4 rows of x, dequant``."""
    from .selftest_cuda import runs_on

    weight = kernel_type(scheme.weight, codebook)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    largest: dict[str, int] = {}  # by family: rows of x in a tile; 0: any number
    for row in kernel_list.manifest():
        if row["family"] == "cpu" or (row["weight"], row["act"]) != (weight.name, act):
            continue
        reason = why_not(weight, act, family=row["family"], scale_type=scheme.scale_type)
        if reason is None and runs_on(row, capability):
            largest[row["family"]] = max(row.get("tokens", 0), largest.get(row["family"], 0))
    return ", ".join(name + (f" in tiles of up to {rows} rows of x" if rows else "") for name, rows in largest.items())


def _plan(scheme: Scheme, act: str, shape, device: str | Device, ms=BUCKETS, **options) -> PlanTable:
    """The plan for a device that need not be here, judged first: what this build has may not run on it."""
    device = device if isinstance(device, Device) else find_device(device)
    archs = extension.cuda_library().lowbit_cuda_archs().decode()
    if not any(cuda_devices.code_runs(arch, *divmod(device.capability, 10)) for arch in archs.split(";")):
        raise ExtensionError(f"this build has CUDA kernels for {archs}, none for {device}: set LOWBIT_CUDA_ARCHS")
    return plan_table(scheme, act, *shape, device, ms, **options)


def _of_weight(pw, device: str | Device | None) -> dict[str, str | PlanTable]:
    from ..pack import PackedWeight
    from ..pack.known import op_numbers

    if not isinstance(pw, PackedWeight):
        raise DtypeError(f"expected a PackedWeight, got {type(pw).__name__}")
    facts = {"weight": repr(pw), "bits per weight": f"{8 * pw.nbytes / (pw.shape[0] * pw.shape[1]):.2f}"}
    measured = device is None
    if device is None and pw.native and pw.layout != "cpu":
        device = device_of(pw.device.index or 0)
    codebook = pw.codebook is not None
    weight = kernel_type(pw.dtype, codebook).name
    for act in ACT_TYPES:
        wanted = f"act={act.name!r}" if act.on_the_fly else f"x {act.name}"
        on_cpu = pw.layout == "cpu"
        if on_cpu:
            kernel = kernel_list.kernel_name(weight, act.name)
        else:
            kernel = _cuda_kernels(pw.scheme, act.name, pw.device, codebook)
        facts[f"kernel for {wanted}"] = kernel or "none in this build"
        if device is not None and act.name in _PLANNED:
            kind = op_numbers(pw.scheme, pw.shape, pw.scales, pw.zeros)[-1]
            known = {"whole_zeros": kind == WHOLE_ZEROS, "uneven_scales": kind == 0, "codebook": codebook}
            facts[f"plan for {wanted}"] = _plan(pw.scheme, act.name, pw.shape, device, measured=measured, **known)
    return facts


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return f"{name or platform.machine()}, {os.cpu_count()} logical cores"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lowbit info` takes."""
    parser.description = (
        "Prints versions, the compiled library, the CPU's instruction sets and the variables that are set; or, with "
        "--plan, which CUDA kernels would multiply by a weight, and how long each would take, for which no GPU is "
        "needed."
    )
    parser.add_argument("--plan", nargs=2, metavar=("TYPE", "NxK"), help="plan for a weight, such as int4 8192x8192")
    plan = parser.add_argument_group("with --plan")
    plan.add_argument("--m", metavar="M,...", help=f"rows of x (default: {','.join(map(str, BUCKETS))})")
    plan.add_argument("--group-size", type=int, metavar="G", help="-1: the whole row (default: 128)")
    plan.add_argument("--zero-kind", choices=ZERO_KINDS, help="default: what the type needs")
    plan.add_argument("--act", choices=_PLANNED, help=f"type of x (default: {_PLANNED[0]})")
    plan.add_argument(
        "--device", help=f"{', '.join(DEVICES)}, or CAPABILITY,BLOCKS,PAIRS (default: the GPU here, else h200)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the facts, or a plan; 0, or 1 when the library does not load."""
    if args.plan:
        print(_planned(args))
        return 0
    if any(value is not None for name, value in vars(args).items() if name in _PLAN_OPTIONS):
        raise SchemeError(f"--{', --'.join(_PLAN_OPTIONS).replace('_', '-')} go with --plan TYPE NxK, which is missing")
    facts = info()
    print(facts)
    return 0 if "kernels" in facts else 1


def _planned(args: argparse.Namespace) -> Info:
    """The plan that the command line asks for, and the CPU kernel for the same."""
    name, shape = args.plan
    act = args.act or _PLANNED[0]
    scheme = Scheme.make(name, 128 if args.group_size is None else args.group_size, args.zero_kind)
    n, k = _sizes(shape.lower(), "x", "--plan TYPE NxK such as int4 8192x8192", 2)
    ms = BUCKETS if args.m is None else _sizes(args.m, ",", "--m 1,16,256")
    here = cuda_devices.why_no_cuda(0) is None and cuda_devices.cuda_kernels(0)  # which also reads measured times
    device = args.device or (device_of(0) if here else next(iter(DEVICES)))
    table = _plan(scheme, act, (n, k), device, ms, measured=isinstance(device, Device))
    on_cpu = kernel_list.kernel_name(name, act) or "no kernel in this build"
    where = "this GPU" if isinstance(device, Device) else device
    weight = f"{scheme.weight} [{n}, {k}], group size {scheme.group_size}, zeros {scheme.zero_kind}"
    return Info({"weight": weight, "on the CPU": f"{on_cpu}, in use: {extension.isa()}", f"on {where}, x {act}": table})


def _sizes(text: str, between: str, expected: str, count: int | None = None) -> list[int]:
    words = text.split(between)
    if not all(word.strip().isdecimal() for word in words) or count not in (None, len(words)):
        raise ShapeError(f"expected whole numbers, {expected}, got {text!r}")
    return list(map(int, words))
