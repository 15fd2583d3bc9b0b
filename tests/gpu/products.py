"""What tests of products share: the kernels and what each is tried with, inputs of every form, and how y is judged."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import lowbit
from lowbit import extension

from . import oracle
from .kernels import family, forced, may_refuse, product_rows, scales_values, tile
from .plan import cases

ROWS = sorted(product_rows(), key=lambda row: (row["weight"], row["name"]))
PLAN = cases(ROWS)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: One kernel for each tile and activation type.
BY_TILE = list(
    {(row["act"], family(row["name"]), tile(row["name"])): row for row in ROWS if row["weight"] == "uint3"}.values()
)


def by_type(rows: list[dict]) -> list[dict]:
    """One kernel for each weight type and activation type, with every tile in turn."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["weight"], row["act"]), []).append(row)
    return [rows[(i // 2 + i % 2 * 3) % len(rows)] for i, rows in enumerate(groups.values())]


def row_of(weight: str, act: torch.dtype, family: str, tokens: int) -> dict:
    """The manifest's row of one kernel. Skips the test in a build that lacks it."""
    wanted = (weight, str(act).removeprefix("torch."), family, tokens)
    found = [row for row in ROWS if tuple(row[key] for key in ("weight", "act", "family", "tokens")) == wanted]
    return found[0] if found else pytest.skip(f"this build has no kernel for {wanted}")


def row_of_sm90(weight: str, act: torch.dtype, tokens: int) -> dict:
    """The same of gemm_sm90. Skips the test on a device that its kernel may refuse, too."""
    row = row_of(weight, act, "gemm_sm90", tokens)
    if may_refuse(row["name"], tokens, 64):
        pytest.skip(f"{row['name']} is not for this device")
    return row


def name(row: dict) -> str:
    return row["name"]


def group_for(row: dict, fine: int = 64) -> int:
    """A fine group size for a kernel that takes it, else 128."""
    return fine if row.get("least_group", 16) <= fine else 128


def kind_for(row: dict, wanted: str = "zero") -> str:
    """A kind of zeros that a kernel takes: decode takes none with floats, gemm_sm90 whole ones alone where it takes no
    fine groups.
    """
    if row["family"] == "decode" and row["weight"].startswith("float"):
        return "none"
    whole = row["family"] == "gemm_sm90" and row.get("least_group", 16) >= 128
    return "whole" if whole and wanted != "none" else wanted


def skip_refused(refused: list[str], right: int) -> None:
    """At the end of a test: say what kernels refused, which they may for the length of x or the device alone."""
    if refused:
        pytest.skip(f"{right} products right, {len(refused)} refused as they may be: {'; '.join(refused[:3])}")


@lru_cache(maxsize=64)
def weight_of(dtype, shape, group_size, zero_kind, scale_type):
    return oracle.make(dtype, shape, group_size, zero_kind, scale_type, seed=shape[0] + 7 * shape[1])


def placed(x: torch.Tensor, spread: bool) -> torch.Tensor:
    """x [m, k], dense, or aligned for the kernels with rows apart: NaN before, between and behind them."""
    m, k = x.shape
    if not spread:
        return x.clone()
    around = torch.full((m + 2, -(-k // 8) * 8 + 8), torch.nan, dtype=x.dtype, device="cuda")
    around[1:-1, :k] = x
    return around[1:-1, :k]


def bias_for(n, i):
    return None if i % 4 == 3 else oracle.normal(n, dtype=FLOATS[i % 4], seed=i)


def why_wrong(kernel: str, y, x, weight, bias=None, together=True) -> str | None:
    """What is wrong with a product by one kernel, or None; ``together`` as in oracle.wrong_rounded."""
    if scales_values(kernel, weight.pw):
        return oracle.wrong_rounded(y, x, weight, bias, together)
    exact, size = oracle.product(x, weight, bias)
    if family(kernel) == "decode" and (weight.qt.dtype.kind != "float" or 0 < weight.pw.group_size < 128):
        # It multiplies two 8-bit digits of x, which are off by up to 2^-15 of the largest x of 128 k.
        size = size + 2**-15 / oracle.SHARE * x.double().abs().amax(1, keepdim=True) * weight.size.sum(1)
    return oracle.wrong(y, exact, size)


def right_by_split(name: str, split: tuple, x, weight, bias) -> bool:
    """Whether a kernel takes a split (``struct Split`` of csrc/args.h); its product is right then, and the same a
    second and a third time, when the next one has begun before it ends."""
    with forced(name), extension.force_cuda_split(*split):
        try:
            y = lowbit.matmul(x, weight.pw, bias)
        except RuntimeError as error:
            assert "was forced and can't hold" in str(error)
            return False
        again = [lowbit.matmul(x, weight.pw, bias) for _ in range(2)]
    reason, what = why_wrong(name, y, x, weight, bias), f"{name} by {split}, x {tuple(x.shape)}, {weight.pw}"
    assert reason is None, f"{what}: {reason}"
    assert all(oracle.same_bits(one, y) for one in again), f"{what}: runs differ"
    return True


def assert_exact(x, weight, bias=None, y=None):
    """For kernels that round no value of the weight, and for plain weights."""
    y = lowbit.matmul(x, weight.pw, bias) if y is None else y
    reason = oracle.wrong(y, *oracle.product(x, weight, bias))
    assert reason is None, f"{reason}; x {tuple(x.shape)} {x.dtype}, {weight.pw}"


def assert_right(x, weight, bias=None, y=None):
    """For any way to compute it: some round the values of the weight to x's type first."""
    y = lowbit.matmul(x, weight.pw, bias) if y is None else y
    reason = oracle.wrong_rounded(y, x, weight, bias)
    assert reason is None, f"{reason}; x {tuple(x.shape)} {x.dtype}, {weight.pw}"
