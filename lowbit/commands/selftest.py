"""`lowbit selftest`: every kernel of the installation that this machine can run, against the reference."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch

from .. import extension, kernel_list, reference
from ..dtypes import act_type, kernel_type, weight_type
from ..errors import SchemeError
from ..ops.launch import matmul
from ..pack import pack_weight
from ..tensor import QuantTensor
from .progress import Progress

#: Largest ||y - reference|| / ||reference|| per type of x; it is rounding to that type and sums in another order.
TOLERANCE = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 3e-3}
# Shapes that no tile divides, one token and several, a short last group; a whole row with the other zero kind.
_N, _K = 41, 203
_ROWS = (1, 19)


@dataclass
class Summary:
    """What a selftest found: kernels that ran, kernels that are for another CPU or GPU, why those of CUDA did not run,
    and a sentence for each failure."""

    passed: int = 0
    not_usable: int = 0
    without_cuda: str = ""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        lines = [f"{self.passed} kernels right, {len(self.failures)} wrong, in {self.seconds:.0f} s"]
        if self.not_usable:
            lines[0] += f" ({self.not_usable} kernels need another processor)"
        if self.without_cuda:
            lines.append(f"no CUDA kernel was tried: {self.without_cuda}")
        return "\n".join(lines + self.failures)


def selftest(only: str = "*", *, progress: Progress | None = None) -> Summary:
    """Run every kernel whose name matches ``only`` (a glob such as ``"w3*_avx2"``) on small products with ragged
    sizes, 1 and several rows, both group kinds and a bias, and compare with lowbit.reference: the CPU's, and those of
    CUDA on the current device, if it can run them.

    The summary is true when all agree. It changes the choice of kernels of the process while it runs. Raises
    SchemeError when no kernel matches, ExtensionError when the library does not load.
    """
    from . import selftest_cuda

    if not isinstance(only, str):
        raise SchemeError(f"only must be a glob of kernel names, got {only!r}")
    began, summary = time.monotonic(), Summary()
    usable = extension.isas()
    rows = [row for row in kernel_list.manifest() if fnmatch.fnmatchcase(row["name"], only)]
    if not rows:
        raise SchemeError(f"no kernel's name matches {only!r}; a name looks like w4a32_cpu_avx2")
    # Why sorted: one weight and its references serve all kernels of a type.
    rows.sort(key=lambda row: (row["weight"], row["act"], row["name"]))
    on_cpu = [row for row in rows if row["family"] == "cpu"]
    on_cuda = [row for row in rows if row["family"] != "cpu"]
    summary.not_usable = sum(row["isa"] not in usable for row in on_cpu)
    on_cpu = [row for row in on_cpu if row["isa"] in usable]
    if on_cuda or only == "*":
        summary.without_cuda = selftest_cuda.why_not_here() or ""
    there = [] if summary.without_cuda else on_cuda
    on_cuda = selftest_cuda.usable(there)
    summary.not_usable += len(there) - len(on_cuda)
    with progress or Progress(len(on_cpu) + len(on_cuda)) as bar:
        bar.total = len(on_cpu) + len(on_cuda)
        bar.start("kernels against the reference")
        for row, reason in chain(_check(on_cpu), selftest_cuda.check(on_cuda)):
            if reason:
                summary.failures.append(f"{row['name']}: {reason}")
            else:
                summary.passed += 1
            bar.step()
    summary.seconds = time.monotonic() - began
    return summary


def _check(rows: list[dict]) -> Iterator[tuple[dict, str | None]]:
    """Each row of the manifest, and what is wrong with its kernel, or None."""
    key, cases = None, []
    for row in rows:
        if key != (row["weight"], row["act"]):
            key = row["weight"], row["act"]
            cases = _cases(*key)
        yield row, _run(row, cases)


def _cases(weight: str, act: str) -> list[tuple]:
    """``(x, packed weight, bias, act argument, expected)`` for each way a kernel may be called."""
    generator = torch.Generator().manual_seed(1)
    wtype, atype = kernel_type(weight), act_type(act)
    kinds = {"uint": ("zero", "min"), "codebook": ("none", "min")}.get(wtype.kind, ("none",))
    made = []
    for group_size, kind, scale_type in ((32, kinds[0], torch.float16), (-1, kinds[-1], torch.bfloat16)):
        qt = random_weight(wtype, (_N, _K), group_size, kind, scale_type, generator)
        pw = pack_weight(qt)
        for m in _ROWS:
            x = torch.randn(m, _K, generator=generator)
            x = x if atype.on_the_fly else x.to(getattr(torch, act))
            bias = torch.randn(_N, generator=generator)
            argument = atype.name if atype.on_the_fly else None
            made.append((x, pw, bias, argument, reference.matmul(x, qt, bias, argument)))
    return made


def random_weight(wtype, shape, group_size: int, kind: str, scale_type: torch.dtype, generator) -> QuantTensor:
    """A weight of random legal codes whose values stay small enough that fp16 products are finite for every type.

    wtype: of dtypes.KERNEL_TYPES; a codebook type gives a uint type with a random table. kind: a zero kind, or "whole"
    for "zero" with whole numbers.
    """
    (n, k), bits = shape, wtype.bits
    book, largest = None, wtype.max_value if wtype.values else 1.0
    if wtype.kind == "codebook":
        book, wtype = torch.randn(2**bits, generator=generator), weight_type(f"uint{bits}")
        book /= book.abs().max()
    legal = torch.tensor([c for c in range(2**bits) if c not in wtype.invalid_codes], dtype=torch.uint8)
    codes = legal[torch.randint(len(legal), shape, generator=generator)]
    groups = 1 if group_size == -1 else -(-k // group_size)
    scales = (torch.rand(n, groups, generator=generator) + 0.5) * 8 / largest
    zeros = factors = None
    if scale_type == torch.float8_e8m0fnu:
        scales = scales.log2().round().exp2()
    if scale_type == torch.float8_e4m3fn:
        factors = (torch.rand(n, 1, generator=generator) + 0.5) / 16
        scales /= factors
    scales = scales.to(scale_type)
    if kind != "none":
        spread = 2**bits if kind in ("zero", "whole") and book is None else 1
        zeros = (torch.rand(n, groups, generator=generator) * spread).to(scale_type)
    if kind == "whole":
        zeros, kind = zeros.floor(), "zero"
    options = {"dtype": wtype, "group_size": group_size, "zero_kind": kind, "codebook": book, "row_scales": factors}
    return QuantTensor.from_codes(codes, scales, zeros, **options)


def _run(row: dict, cases: list[tuple]) -> str | None:
    """What is wrong with a kernel, or None."""
    with extension.force_isa(row["isa"]):
        for x, pw, bias, act, expected in cases:
            reason = why_wrong(matmul(x, pw, bias, act=act), expected)
            if reason:
                return f"{reason} for x {tuple(x.shape)} and {pw}"
    return None


def why_wrong(y: torch.Tensor, expected: torch.Tensor, times: float = 1) -> str | None:
    """The error of y beside what is expected (float64), when it is more than y's type allows, so many times over."""
    error = ((y.double().cpu() - expected).norm() / expected.norm()).item()
    allowed = times * TOLERANCE[str(y.dtype).removeprefix("torch.")]
    return None if error <= allowed else f"expected an error of at most {allowed:.0e}, got {error:.1e}"  # NaN is wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lowbit selftest`."""
    parser.description = (
        "Runs every kernel that this machine can run on small products and compares with a slow reference."
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="kernels whose name matches, such as 'w3*_avx2'")


def run(args: argparse.Namespace) -> int:
    """Print the summary; 0, or 1 when a kernel is wrong."""
    summary = selftest(args.only)
    print(summary, file=sys.stdout if summary else sys.stderr)
    return 0 if summary else 1
