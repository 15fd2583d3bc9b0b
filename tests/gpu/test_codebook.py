"""Risk: on a GPU a weight with a codebook is expanded by another table, or multiplied by a kernel that reads none."""

import copy

import pytest
import torch

import lowbit
from lowbit import extension
from lowbit.commands.selftest import random_weight
from lowbit.dtypes import kernel_type

from . import oracle
from .kernels import kernels_launched, needs_kernels
from .test_dequant import FLOATS, SCALES, bits_of, expanded, skip_unbuilt

pytestmark = needs_kernels
BOOKS = [kernel_type(f"codebook{bits}") for bits in range(1, 9)]


def make(bits=4, shape=(200, 520), group_size=64, kind="none", scale_type=torch.float16, seed=0, perm=False):
    """A weight with a table of either sign, up to 1e3 and far below, with a 0 in it, on the host."""
    chance = torch.Generator().manual_seed(seed)
    qt = random_weight(BOOKS[bits - 1], shape, group_size, kind, scale_type, chance)
    qt.codebook.mul_(10 ** (6 * torch.rand(2**bits, generator=chance) - 3))
    qt.codebook[0] = 0
    qt.codebook.mul_(1e3 / qt.codebook.abs().max())
    if perm:
        qt.perm = torch.randperm(shape[1], generator=chance).int()
    qt.scales.div_(2000)
    return qt


def exact(qt):
    """The weight and what its values are the sum or difference of, float64 [N, K] on the GPU."""
    weight = qt.to("cuda").dequantize(torch.float64)
    size = weight.abs()
    if qt.zeros is not None:
        spread = qt.zeros.cuda().double().abs() * (qt.scales.cuda().double().abs() if qt.zero_kind == "zero" else 1)
        wide = spread if qt.group_size == -1 else spread.repeat_interleave(qt.group_size, 1)[:, : qt.shape[1]]
        size = size + 2 * wide.expand_as(size).max()
    return weight, size


def assert_product(y, x, qt, bias=None):
    weight, size = exact(qt)
    wide = x.double()
    found, bound = wide @ weight.T, wide.abs() @ size.T
    if bias is not None:
        found, bound = found + bias.double(), bound + bias.double().abs()
    # The weight is rounded to x's type for torch's product; the kernels round values, scales and their product.
    share = (3 if qt.dtype.bits == 4 else 1) * torch.finfo(x.dtype).eps / 2 + oracle.SHARE
    reason = oracle.wrong(y, found, bound, share, together=False)
    assert reason is None, f"{reason}; x {tuple(x.shape)} {x.dtype}, {qt}"


# ---- the kernel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_kernel_has_the_bits_of_the_canonical_weight(bits, dtype):
    skip_unbuilt(BOOKS[bits - 1], dtype)
    for i, kind in enumerate(("none", "zero", "min")):
        for group_size in (16, 32, 64, 128, 256, -1):
            for shape in ((1, 16), (37, 200), (65, 1303)):
                qt = make(bits, shape, group_size, kind, SCALES[(i + group_size // 16) % 3], seed=shape[1] + i)
                found = expanded(lowbit.pack_weight(qt, "cuda"), dtype).cpu()
                assert torch.equal(bits_of(found), bits_of(qt.dequantize(dtype))), (shape, kind, group_size)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_rows_to_any_place(dtype):
    skip_unbuilt(BOOKS[2], dtype)
    for k in (1304, 1303):
        qt = make(3, (100, k), kind="min")
        pw, whole = lowbit.pack_weight(qt, "cuda"), qt.dequantize(dtype).cuda()
        for first, rows in ((0, 100), (16, 48), (5, 1), (99, 1), (50, 0)):
            around = torch.full((rows + 2, k + 8), 7.0, dtype=dtype, device="cuda")
            expanded(pw, dtype, first, rows, around[1:-1, 8:])
            assert torch.equal(around[1:-1, 8:], whole[first : first + rows]), (first, rows)
            assert (around[[0, -1]] == 7).all() and (around[:, :8] == 7).all()


def test_a_table_of_another_kind_is_refused():
    pw = lowbit.pack_weight(make(), "cuda")
    out = torch.empty(pw.shape, device="cuda")
    given = (pw.codes, pw.scales, pw.zeros, *pw.numbers, 0, out)
    for book, words in (
        (pw.codebook.half(), "codebook must be float32"),
        (pw.codebook[:8], "codebook must have shape"),
        (pw.codebook.cpu(), "codebook must be on cuda"),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch.ops.lowbit.dequantize_out(*given, book)


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits, kind", [(1, "none"), (3, "zero"), (4, "none"), (4, "min"), (8, "none")])
def test_product_of_any_number_of_rows(bits, kind, dtype, perm):
    skip_unbuilt(BOOKS[bits - 1], dtype)
    qt = make(bits, (200, 521), kind=kind, perm=perm)
    pw = lowbit.pack_weight(qt, "cuda")
    for m in (0, 1, 7, 17, 100, 1030):
        x, bias = oracle.normal(m, 521, dtype=dtype, seed=m), oracle.normal(200, dtype=FLOATS[m % 3])
        y = lowbit.matmul(x, pw, bias)
        assert y.shape == (m, 200)
        if m:
            assert_product(y, x, qt, bias)


@pytest.mark.parametrize(("bits", "kind"), [(3, "none"), (4, "min"), (5, "none")])
@pytest.mark.parametrize("m", [1, 8, 300])
def test_products_without_a_kernel_expand_the_weight(m, bits, kind):
    """Not a kernel of the uint type, which would take the codes for values."""
    skip_unbuilt(BOOKS[bits - 1], torch.float16)
    pw, x = lowbit.pack_weight(make(bits, kind=kind), "cuda"), oracle.normal(m, 520, dtype=torch.float16)
    launched = kernels_launched(lambda: lowbit.matmul(x, pw))
    assert any("dequant::expand_rows" in name and "Codebook" in name for name in launched), launched
    assert not any(family in name for name in launched for family in ("lowbit::decode", "lowbit::gemm_sm")), launched


needs_wgmma = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


@needs_wgmma
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("m", [1, 9, 16, 40, 64, 100, 300, 1030])
def test_products_of_four_bits_run_one_kernel(m, dtype):
    skip_unbuilt(BOOKS[3], dtype)
    pw, x = lowbit.pack_weight(make(scale_type=torch.float32), "cuda"), oracle.normal(m, 520, dtype=dtype)
    launched = kernels_launched(lambda: lowbit.matmul(x, pw))
    assert any("gemm_sm90::multiply" in name and "Codebook" in name for name in launched), launched
    assert not any("dequant" in name for name in launched), launched


@needs_wgmma
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("tile", [8, 16, 32, 64, 128, 256])
def test_sanitizer_every_tile_is_right(tile, dtype):
    """Every group size and type of scales, ragged N and K, tables whose largest value is tiny, negative or huge."""
    act = "a16" if dtype == torch.float16 else "ab16"
    for i, group_size in enumerate((16, 32, 64, 128, 256, -1)):
        for scale_type in SCALES:
            if scale_type == torch.float32 and group_size == 16:
                continue
            qt = make(4, (200, 1032), group_size, scale_type=scale_type, seed=i)
            factor = (1.0, -1e-3, 2.0**-20, 2.0**10)[i % 4] if scale_type == torch.float32 else (1.0, -0.1, 8.0)[i % 3]
            qt.codebook.mul_(factor)
            if scale_type == torch.float32:
                qt.scales.div_(factor)
            pw = lowbit.pack_weight(qt, "cuda")
            for m in {1, tile - 1, tile, 2 * tile + 3} if tile > 16 else {1, tile - 1, tile}:
                x, bias = oracle.normal(m, 1032, dtype=dtype, seed=m), oracle.normal(200, dtype=dtype)
                with extension.force_cuda_kernel(f"wc4{act}_gemm_sm90_n{tile}"):
                    y = lowbit.matmul(x, pw, bias)
                    assert_product(y, x, qt, bias)
                    for blocks in (1, 2) if tile == 64 else ():  # of 64 rows, whose warpgroups share K
                        with extension.force_cuda_split(4, 2, blocks, 1, 16, 0):
                            assert_product(lowbit.matmul(x, pw, bias), x, qt, bias)


@needs_wgmma
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_error_of_nf4_is_what_the_readme_promises(dtype):
    skip_unbuilt(BOOKS[3], dtype)
    nf4 = torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(0.03, 0.97, 16)).sort().values
    qt = make(4, (512, 4096), 64, scale_type=torch.float32)
    qt.codebook.copy_(nf4 / nf4.abs().max())
    qt.scales.copy_(torch.rand(qt.scales.shape, generator=torch.Generator().manual_seed(1)) * 0.05 + 0.01)
    pw, (weight, _) = lowbit.pack_weight(qt, "cuda"), exact(qt)
    for m in (1, 8, 16, 32, 64, 128, 256, 2048):
        x = oracle.normal(m, 4096, dtype=dtype, seed=m)
        found, expected = lowbit.matmul(x, pw).double(), x.double() @ weight.T
        error = float((found - expected).norm() / expected.norm())
        assert error <= (5e-4 if dtype == torch.float16 else 4e-3), f"M={m}: {error:.2e}"


def test_a_table_of_zeros_gives_zeros():
    qt = make(4)
    qt.codebook.zero_()
    pw, x = lowbit.pack_weight(qt, "cuda"), oracle.normal(20, 520, dtype=torch.float16)
    for m in (1, 20):
        assert not lowbit.matmul(x[:m], pw).any()


def test_scratch_is_bounded():
    skip_unbuilt(BOOKS[1], torch.float16)
    n, k = 12000, 8200
    qt = make(2, (n, k), 256)
    pw, x = lowbit.pack_weight(qt, "cuda"), oracle.normal(33, k, dtype=torch.float16)
    lowbit.matmul(x, pw)  # torch keeps memory of its own for products
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = lowbit.matmul(x, pw)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= (64 << 20) + 4 * y.nbytes + (8 << 20)
    assert_product(y, x, qt)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_a_layer(dtype):
    skip_unbuilt(BOOKS[3], dtype)
    qt = make(perm=True)
    layer = lowbit.Linear.from_quant_tensor(qt, torch.zeros(200, dtype=dtype)).cuda()
    assert layer.layout == "nvidia" and layer.quant_tensor() == qt.to("cuda")
    x, dy = oracle.normal(30, 520, dtype=dtype).requires_grad_(), oracle.normal(30, 200, dtype=dtype, seed=2)
    dx, dbias = torch.autograd.grad(layer(x), (x, layer.bias), dy)
    weight, size = exact(qt)
    share = torch.finfo(dtype).eps / 2 + oracle.SHARE
    wide = dy.double()
    reason = oracle.wrong(dx, wide @ weight, wide.abs() @ size, share, together=False)
    assert reason is None, reason
    torch.testing.assert_close(dbias, dy.sum(0, dtype=torch.float32).to(dtype))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x)) and layer.cpu().quant_tensor() == qt


def test_compiled_code_and_graphs_keep_it():
    skip_unbuilt(BOOKS[3], torch.float16)
    layer = lowbit.Linear.from_quant_tensor(make(), dtype=torch.float16).cuda()
    compiled, x = (
        torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager"),
        oracle.normal(40, 520, dtype=torch.float16),
    )
    for part in (x, x[:7], x[:1]):
        assert torch.equal(compiled(part), layer(part))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.neg_()
    graph.replay()
    assert torch.equal(y, layer(x))


def test_batch_invariant_mode_refuses_what_has_no_kernel():
    skip_unbuilt(BOOKS[2], torch.float16)
    qt = make(3)
    pw, x = lowbit.pack_weight(qt, "cuda"), oracle.normal(3, 520, dtype=torch.float16)
    with extension.batch_invariant(), pytest.raises(RuntimeError, match="codebooks.*LOWBIT_BATCH_INVARIANT=0"):
        lowbit.matmul(x, pw)
    assert_product(lowbit.matmul(x, pw), x, qt)  # the block has ended


@needs_wgmma
def test_batch_invariant_products_of_four_bits():
    pw, x = lowbit.pack_weight(make(), "cuda"), oracle.normal(150, 520, dtype=torch.float16)
    with extension.batch_invariant():
        whole = lowbit.matmul(x, pw)
        for rows in (slice(0, 1), slice(7, 30), slice(60, 150)):
            assert torch.equal(lowbit.matmul(x[rows], pw), whole[rows])


def test_opcheck_of_every_op():
    skip_unbuilt(BOOKS[3], torch.float16)
    pw = lowbit.pack_weight(make(4, (40, 96), 32, "min"), "cuda")
    held, x = (pw.codes, pw.scales, pw.zeros), oracle.normal(3, 96, dtype=torch.float16)
    out, dy = torch.zeros(3, 40, dtype=x.dtype, device="cuda"), oracle.normal(3, 40, dtype=x.dtype).requires_grad_()
    torch.library.opcheck(torch.ops.lowbit.matmul_out, (x, *held, None, *pw.numbers, 1, out, pw.codebook))
    trained = (x.requires_grad_(), *held, None, *pw.numbers, 1, pw.codebook)
    torch.library.opcheck(torch.ops.lowbit.matmul_grad, trained)
    torch.library.opcheck(torch.ops.lowbit.matmul_grad_x, (dy, *held, *pw.numbers, pw.codebook))
    rows = torch.zeros(9, 96, dtype=x.dtype, device="cuda")
    torch.library.opcheck(torch.ops.lowbit.dequantize_out, (*held, *pw.numbers, 5, rows, pw.codebook))
