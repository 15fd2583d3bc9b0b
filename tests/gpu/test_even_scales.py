"""Risk: kernels for even scales run where scales are not, or lose digits at the ends of what counts as even."""

import pytest
import torch

from lowbit.dtypes import weight_type
from lowbit.scheme import EVEN_SCALES

from . import oracle
from .kernels import needs_kernels, product_by, scales_integers, tokens
from .products import ROWS, bias_for, name, skip_refused, why_wrong

pytestmark = needs_kernels

FUSED = [
    row
    for row in ROWS
    if row["act"] == "float16" and row["weight"].startswith("int") and row["family"] == "gemm_sm90"
    and scales_integers(row["name"], weight_type(row["weight"]).bits, 128, even=True)
    and tokens(row["name"]) >= 32
]  # fmt: skip


def weight_with(row: dict, rows: torch.Tensor, group: int, n: int, k: int, seed: int) -> oracle.Weight:
    """Codes of values with a normal distribution; scales are those of ``rows`` [N, 1], or up to a quarter less."""
    wtype, chance = weight_type(row["weight"]), oracle.generator(seed)
    values = torch.tensor(wtype.values, device="cuda")
    groups = 1 if group == -1 else -(-k // group)
    wanted = torch.randn(n, k, generator=chance, device="cuda") * values.abs().max() / 3
    codes = (wanted[..., None] - values).abs().argmin(-1) if wtype.bits < 5 else (wanted - values[0]).round()
    codes = codes.clamp(0, 2**wtype.bits - 1).to(torch.uint8)
    part = torch.rand(n, groups, generator=chance, device="cuda")
    return oracle.weight_of(row["weight"], codes, rows * (1 - part / 4), group_size=group)


@pytest.mark.parametrize("row", FUSED, ids=name)
def test_scales_at_the_ends_of_what_is_even(row):
    """Rows of large scales beside rows of small ones, from what counts as even to far beyond."""
    bits, m, refused, right, seen = weight_type(row["weight"]).bits, tokens(row["name"]), [], 0, set()
    step = 2 if bits == 1 else 1
    for j, group in enumerate((128, 256, -1)):
        for scale in (2.0**-9, 2.0**-5, 2.0**-1):
            n, k = ((40, 1100), (200, 640))[j % 2]
            for spread in (2.0**-14, 2.0**-5, 2.0**-3, 0.0):
                rows = torch.full((n, 1), scale / step, device="cuda")
                rows[1::3] *= spread
                weight = weight_with(row, rows, group, n, k, seed=7 * j + m)
                seen.add(weight.pw.numbers[-1] >= EVEN_SCALES)
                x, bias = oracle.normal(m - j, k, dtype=torch.float16, seed=m + j), bias_for(n, j)
                y = product_by(row["name"], x, weight.pw, bias)
                if y is None:
                    refused.append(f"M={m - j}, K={k}")
                    continue
                reason = why_wrong(row["name"], y, x, weight, bias)
                assert reason is None, f"groups of {group}, scales {scale}, {spread} of them: {reason}"
                for part in (slice(1, None, 3), slice(0, None, 3)):  # a row of small ones is right for itself
                    own = oracle.Weight(weight.qt, weight.pw, weight.exact[part], weight.size[part])
                    reason = why_wrong(row["name"], y[:, part], x, own, None if bias is None else bias[part])
                    assert reason is None, f"groups of {group}, scales {scale}, {spread} of them: {reason}"
                right += 1
    assert not right or seen == {True, False}
    skip_refused(refused, right)
