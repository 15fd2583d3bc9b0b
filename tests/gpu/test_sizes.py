"""Risk: an index overflows where a weight or a product has more than 2^31 values, or x very many rows."""

import pytest
import torch

import lowbit

from . import oracle
from .kernels import needs_kernels

pytestmark = needs_kernels

PIECE = 4096  # rows of a large weight that are quantized at a time: its floats would not fit


def needs_memory(gigabytes: int) -> None:
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of free memory on the device, found {free >> 30}")


def large_weight(dtype: str, n: int, k: int) -> tuple[lowbit.PackedWeight, dict[int, torch.Tensor]]:
    """Random codes and scales; also some of its rows, by number, as float64."""
    chance, pieces, kept = oracle.generator(n), [], {}
    crossings = [(2**bits // k + i) % n for bits in (30, 31, 32) for i in (-1, 0, 1)]
    watched = {0, 1, 15, 16, n // 2, n - 17, n - 1, *crossings}
    for first in range(0, n, PIECE):
        rows = min(PIECE, n - first)
        codes = torch.randint(2 ** int(dtype[-1]), (rows, k), generator=chance, device="cuda", dtype=torch.uint8)
        scales = (torch.rand(rows, 1, generator=chance, device="cuda") + 0.5) / 256
        piece = oracle.weight_of(dtype, codes, scales, group_size=-1)
        kept |= {row: piece.exact[row - first] for row in watched if first <= row < first + rows}
        pieces.append((piece.qt.codes, piece.qt.scales))
    stream, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    whole = lowbit.QuantTensor(stream, scales, dtype=dtype, shape=(n, k), group_size=-1)
    return lowbit.pack_weight(whole, "cuda"), kept


@pytest.mark.parametrize(("dtype", "shape"), [("int1", (70000, 61504)), ("int4", (57344, 40008))], ids=str)
def test_weight_of_more_than_2_31_values(dtype, shape):
    needs_memory(40)
    n, k = shape
    assert n * k > 2**31
    pw, rows = large_weight(dtype, n, k)
    exact = torch.stack(list(rows.values()))
    for m in (1, 2, 3, 7, 16, 30, 64, 100, 300):
        x = oracle.normal(m, k, dtype=torch.float16, seed=m)
        y = lowbit.matmul(x, pw)[:, list(rows)].double()
        expected = x.double() @ exact.T
        error = ((y - expected).norm() / expected.norm()).item()
        assert error <= 5e-4, f"M={m}: {error:.2e}"


@pytest.mark.parametrize("m", [100_000, 2**17 + 3])
def test_product_of_more_than_2_31_values(m):
    needs_memory(40)
    n, k = 28672, 264
    assert m * n > 2**31
    weight, x = oracle.make("int4", (n, k)), oracle.normal(m, k, dtype=torch.float16)
    y = torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda")
    lowbit.matmul(x, weight.pw, out=y)
    assert not any(part.isnan().any() for part in y.split(8192)), "values were not written"
    crossing = 2**31 // n
    for first in (0, crossing - 8, m // 2, m - 16):
        exact, size = oracle.product(x[first : first + 16], weight)
        error = ((y[first : first + 16].double() - exact).norm() / exact.norm()).item()
        assert error <= 5e-4, f"rows from {first} on: {error:.2e}"
