"""Risk: an expanded weight is not the one that was quantized, or products through it are wrong for some x."""

import pytest
import torch

import lowbit
from lowbit import kernel_list
from lowbit.commands.selftest import random_weight
from lowbit.dtypes import WEIGHT_TYPES, weight_type

from . import oracle
from .kernels import BUILT, forced, needs_kernels

pytestmark = needs_kernels

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SCALES = (torch.float16, torch.bfloat16, torch.float32)
INTEGER = {2: torch.int16, 4: torch.int32}
ROWS = {(row["weight"], row["act"]): row["name"] for row in kernel_list.manifest("dequant")} if BUILT else {}


def bits_of(tensor):
    return tensor.view(INTEGER[tensor.element_size()])


def expanded(pw, dtype, first=0, rows=None, out=None):
    """Rows of a packed weight by the kernel."""
    n, k = pw.shape
    out = torch.full((n - first if rows is None else rows, k), 7.0, dtype=dtype, device="cuda") if out is None else out
    torch.ops.lowbit.dequantize_out(pw.codes, pw.scales, pw.zeros, *pw.numbers, first, out, pw.codebook, pw.row_scales)
    return out


def skip_unbuilt(wtype, dtype) -> str:
    """The name of the kernel."""
    name = ROWS.get((wtype.name, str(dtype).removeprefix("torch.")))
    return name or pytest.skip("this build lacks the kernel")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)
def test_kernel_has_the_bits_of_the_canonical_weight(wtype, dtype):
    skip_unbuilt(wtype, dtype)
    kinds = ("zero", "min") if wtype.kind == "uint" else ("none", "zero", "min")
    for i, kind in enumerate(kinds):
        for group_size in (16, 32, 64, 128, 256, -1):
            for shape in ((1, 16), (37, 200), (65, 1303)):
                scale_type = SCALES[(i + group_size // 16) % 3]
                chance = torch.Generator().manual_seed(shape[1] + i)
                qt = random_weight(wtype, shape, group_size, kind, scale_type, chance)
                if chance.initial_seed() % 2:
                    qt.scales.mul_(-1)  # zeros of either sign
                found = expanded(lowbit.pack_weight(qt, "cuda"), dtype).cpu()
                expected = qt.dequantize(dtype)
                assert torch.equal(bits_of(found), bits_of(expected)), (shape, kind, group_size, scale_type)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extreme_scales_round_like_the_canonical_weight(dtype):
    codes = torch.arange(16, dtype=torch.uint8).repeat(8, 8)
    scales = torch.tensor([0.0, -0.0, 6e-8, 65504.0, 3e38, 1e-40, 1e-38, -1e30])[:, None].repeat(1, 2)
    for kind in ("none", "zero", "min"):
        zeros = None if kind == "none" else torch.tensor([0.0, -0.0, 7.5, 1e-40, 65504.0, 3e38, -3.0, 8.0])[:, None]
        zeros = None if zeros is None else zeros.repeat(1, 2)
        for name in ("int4", "uint4", "float4_e2m1"):
            if name == "uint4" and kind == "none":
                continue
            qt = lowbit.QuantTensor.from_codes(codes, scales, zeros, dtype=name, group_size=64, zero_kind=kind)
            found = expanded(lowbit.pack_weight(qt, "cuda"), dtype).cpu()
            expected = qt.dequantize(dtype)
            same = (bits_of(found) == bits_of(expected)) | (found.isnan() & expected.isnan())
            assert same.all(), (kind, name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_rows_to_any_place(dtype):
    for k in (1304, 1303):  # with and without whole vectors
        qt = random_weight(weight_type("uint3"), (100, k), 64, "zero", torch.float16, torch.Generator().manual_seed(k))
        pw, expected = lowbit.pack_weight(qt, "cuda"), qt.dequantize(dtype).cuda()
        for first, rows in ((0, 100), (16, 48), (5, 1), (3, 30), (99, 1), (50, 0)):
            for columns, at in ((k, 0), (k + 8, 0), (k + 8, 8), (k + 5, 1)):
                around = torch.full((rows + 2, columns), 7.0, dtype=dtype, device="cuda")
                expanded(pw, dtype, first, rows, around[1:-1, at : at + k])
                assert torch.equal(around[1:-1, at : at + k], expected[first : first + rows]), (first, rows, columns)
                assert (around[[0, -1]] == 7).all() and (around[:, :at] == 7).all() and (around[:, at + k :] == 7).all()
    with pytest.raises(RuntimeError, match="rows must be"):
        expanded(pw, dtype, 90, 11)


# ---- products through it --------------------------------------------------------------------------------------------


def matmul(x, weight, bias=None, **options):
    """The product by the expanded weight, for few rows of x too."""
    with forced(skip_unbuilt(weight.qt.dtype, x.dtype)):
        return lowbit.matmul(x, weight.pw, bias, **options)


def assert_product(x, weight, bias=None, y=None):
    y = matmul(x, weight, bias) if y is None else y
    share = torch.finfo(x.dtype).eps / 2 + oracle.SHARE
    reason = oracle.wrong(y, *oracle.product(x, weight, bias), share)
    assert reason is None, f"{reason}; x {tuple(x.shape)} {x.dtype}, {weight.pw}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name, kind", [("int4", "none"), ("uint3", "zero"), ("float6_e3m2", "min"), ("int8", "none")])
def test_product_of_any_number_of_rows(dtype, name, kind):
    skip_unbuilt(weight_type(name), dtype)
    weight = oracle.make(name, (200, 520), 128, kind)
    for m in (1, 17, 32, 100, 1030):
        for inputs, change in oracle.INPUTS.items():
            x = change(oracle.normal(m, 520, seed=m)).to(dtype)
            bias = None if inputs == "silu" else oracle.normal(200, dtype=FLOATS[m % 3])
            assert_product(x, weight, bias)


@pytest.mark.parametrize("m", [1, 5, 16, 17, 64])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_x_of_any_form(m, dtype):
    weight = oracle.make("int4", (70, 261), 64)
    wide = oracle.normal(m + 1, 300, dtype=dtype, seed=m)
    for x in (
        wide[:m, :261],  # rows apart, and not at multiples of 16 bytes
        wide[:m, 1:262].contiguous(),
        wide.flatten()[3 : 3 + m * 261].view(m, 261),  # at an odd address
        wide.flatten()[: m * 261].view(261, m).T,
        wide[:1, :261].expand(m, 261),
        wide[:m, :261].reshape(1, m, 1, 261),
    ):
        assert_product(x, weight, oracle.normal(70))
    assert lowbit.matmul(wide[:0, :261], weight.pw).shape == (0, 70)


@pytest.mark.parametrize("m", [3, 40])
def test_product_into_a_given_place(m):
    weight = oracle.make("uint4", (70, 256), 32, "zero")
    x = oracle.normal(m, 256, dtype=torch.float16)
    around = torch.full((m + 2, 100), torch.nan, dtype=torch.float16, device="cuda")
    for out in (torch.full((m, 70), torch.nan, dtype=torch.float16, device="cuda"), around[1:-1, 3:73]):
        assert matmul(x, weight, out=out) is out
        assert_product(x, weight, None, out)
    assert around[[0, -1]].isnan().all() and around[:, :3].isnan().all() and around[:, 73:].isnan().all()
    with pytest.raises(lowbit.ShapeError, match="share memory"):
        lowbit.matmul(x, weight.pw, out=x[:, :70])


def test_scratch_is_bounded_and_pieces_meet():
    """Three pieces of 64 MB: no seam between them, and no more memory than one."""
    n, k = 12000, 8200
    weight = oracle.make("int2", (n, k), 256)
    x, bias = oracle.normal(33, k, dtype=torch.float16), oracle.normal(n)
    matmul(x, weight, bias)  # torch keeps memory of its own for products
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = matmul(x, weight, bias)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= (64 << 20) + 4 * y.nbytes + (8 << 20)
    assert_product(x, weight, bias, y)


def test_float32_is_exact_and_says_once_that_it_is_slow(monkeypatch):
    monkeypatch.setattr("lowbit.ops.launch._warned_float32", False)
    weight = oracle.make("int8", (64, 1024), -1, scale_type="float32")
    x = oracle.normal(4, 1024)
    with pytest.warns(UserWarning, match="float32") as caught:
        y = lowbit.matmul(x, weight.pw)
        lowbit.matmul(x, weight.pw)
    assert len(caught) == 1
    assert (y.double() - x.double() @ weight.exact.T).norm() <= 1e-6 * y.double().norm()


def test_int8_activations_are_refused_by_name():
    weight = oracle.make("int4", (64, 256))
    with pytest.raises(lowbit.SchemeError, match="act='int8' has no CUDA kernels yet"):
        lowbit.matmul(oracle.normal(3, 256, dtype=torch.float16), weight.pw, act="int8")


@pytest.mark.parametrize("m", [2, 12, 40, 300])
def test_graph_replays_the_product(m):
    weight, x = oracle.make("int4", (512, 512)), oracle.normal(m, 512, dtype=torch.float16)
    lowbit.matmul(x, weight.pw)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = lowbit.matmul(x, weight.pw)
    for seed in range(3):
        x.copy_(oracle.normal(m, 512, seed=seed))
        graph.replay()
        assert_product(x, weight, None, y)
