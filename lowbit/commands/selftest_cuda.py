"""The CUDA half of `lowbit selftest`: every kernel that the user's GPU runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import cuda_devices, extension, reference
from ..dtypes import kernel_type
from ..ops.launch import matmul
from ..pack import PackedWeight, pack_weight
from ..scheme import WHOLE_ZEROS
from .selftest import random_weight, why_wrong

# No tile divides them: several steps of K, the last one short, more row tiles than a block has warps.
_N, _K = 203, 1099
_TOKENS = 128  # of the largest tile
# Kernels that round the values of a weight to x's type, and with x in bfloat16 scales and zeros too: the tokens of the
# smallest tile of them, by family. Those of a codebook are rounded by all.
_ROUNDING = {"gemm_sm80": 32, "gemm_sm90": 32}
_ROUNDED = 2  # how many times the error of others is theirs at most


@dataclass
class _Case:
    """A weight on the GPU, what it means in float64, x, bias and their product."""

    pw: PackedWeight
    exact: torch.Tensor
    x: torch.Tensor
    bias: torch.Tensor
    y: torch.Tensor


def why_not_here() -> str | None:
    """Why no CUDA kernel can run on the current device, or None."""
    library = extension.cuda()
    return library if isinstance(library, str) else cuda_devices.why_no_cuda(torch.cuda.current_device())


class _Refused(Exception):
    """A kernel takes none of the weights that it was tried with on this device."""


def runs_on(row: dict, capability: tuple[int, int] | None) -> bool:
    """Whether a device of a compute capability such as (9, 0) runs what a kernel was compiled for; None: any does."""
    return capability is None or any(cuda_devices.code_runs(arch, *capability) for arch in row["archs"])


def usable(rows: list[dict]) -> list[dict]:
    """Those rows of the manifest whose kernels are for the current device."""
    if not rows:
        return rows
    capability = torch.cuda.get_device_capability()
    return [row for row in rows if runs_on(row, capability)]


def check(rows: list[dict]) -> Iterator[tuple[dict, str | None]]:
    """Each row of the manifest, and what is wrong with its kernel on the current device, or None. Rows of kernels that
    take too much shared memory for it are left out.

    Rows of one pair of types must be neighbours: they share weights and products.
    """
    key, cases = None, []
    for row in rows:
        try:
            if key != (row["weight"], row["act"]):
                cases = list(_cases(row["weight"], row["act"]))
                key = row["weight"], row["act"]
            found = (_dequant if row["family"] == "dequant" else _product)(row, cases)
        except _Refused:
            continue
        except RuntimeError as error:  # a launch that fails
            found = str(error).splitlines()[0]
        yield row, found


def _cases(weight: str, act: str) -> Iterator[_Case]:
    """Fine and long groups, with every kind of zero that the type has."""
    generator = torch.Generator().manual_seed(1)
    wtype = kernel_type(weight)
    kinds = {"uint": ("zero", "min"), "codebook": ("none", "min")}.get(wtype.kind, ("none", "none"))
    tried = [(32, kinds[0], torch.float16), (128, kinds[1], torch.bfloat16)]
    if wtype.kind == "uint":
        tried.append((128, "whole", torch.float16))
    if wtype.kind == "codebook":
        tried.append((64, "none", torch.float32))
    if wtype.kind != "uint":
        tried += [(32, "none", torch.float8_e8m0fnu), (128, "none", torch.float8_e4m3fn)]
    for group_size, kind, scale_type in tried:
        qt = random_weight(wtype, (_N, _K), group_size, kind, scale_type, generator)
        x = torch.randn(_TOKENS, _K, generator=generator).to(getattr(torch, act))
        bias = torch.randn(_N, generator=generator)
        y = reference.matmul(x, qt, bias)
        yield _Case(pack_weight(qt, "cuda"), reference.dequantize(qt), x.cuda(), bias.cuda(), y)


def _product(row: dict, cases: list[_Case]) -> str | None:
    rounds = row["tokens"] >= _ROUNDING.get(row["family"], _TOKENS + 1) or row["weight"].startswith("codebook")
    times, tried = _ROUNDED if rounds else 1, 0
    with extension.force_cuda_kernel(row["name"]):
        for case in cases:
            if not _serves(row, case.pw):
                continue
            for m in sorted({1, row["tokens"]}):
                try:
                    y = matmul(case.x[:m], case.pw, case.bias)
                except RuntimeError as error:
                    # Why of this family alone: only its stages are larger than some devices hold.
                    if row["family"] == "gemm_sm80" and "was forced and can't hold" in str(error):
                        continue
                    raise
                tried += 1
                if reason := why_wrong(y, case.y[:m], times):
                    return f"{reason} for x {tuple(case.x[:m].shape)} and {case.pw}"
    if not tried:
        raise _Refused
    return None


def _serves(row: dict, pw: PackedWeight) -> bool:
    """Whether a family has this kernel for a weight: those that take no fine groups take no zeros in gemm_sm90, but
    whole ones; with codebooks none.
    """
    if row["weight"].startswith("codebook"):
        return pw.zero_kind == "none"
    least = row.get("least_group", 16)
    zeros = row["family"] == "gemm_sm90" and pw.zero_kind != "none" and pw.numbers[-1] != WHOLE_ZEROS
    return not (zeros and least == 128) and not 0 < pw.group_size < least


def _dequant(row: dict, cases: list[_Case]) -> str | None:
    # Why not by a product: torch multiplies what this kernel expands, by torch's settings.
    for case in cases:
        pw, out = case.pw, torch.empty(case.pw.shape, dtype=case.x.dtype, device="cuda")
        torch.ops.lowbit.dequantize_out(pw.codes, pw.scales, pw.zeros, *pw.numbers, 0, out, pw.codebook, pw.row_scales)
        reason = why_wrong(out, case.exact)
        if reason:
            return f"{reason} for the values of {pw}"
    return None
