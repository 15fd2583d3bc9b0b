"""Risk: on a GPU scales of 8 bits are read as other numbers, or the factors of rows are lost, or go to other rows."""

import copy

import pytest
import torch

import lowbit
from lowbit import extension
from lowbit.commands.selftest import random_weight
from lowbit.dtypes import WEIGHT_TYPES, weight_type

from . import oracle
from .kernels import FAMILIES, kernels_launched, needs_kernels
from .products import BY_TILE, ROWS, group_for, name
from .test_dequant import FLOATS, bits_of, expanded, skip_unbuilt

pytestmark = needs_kernels
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
NARROW = [E8M0, E4M3]
SYMMETRIC = [wtype for wtype in WEIGHT_TYPES if wtype.kind != "uint"]
#: Kernels of every tile, with types in turn.
TILES = sorted({(row["act"], row["family"], row["tokens"]) for row in BY_TILE})


def make(scale_type, dtype="float4_e2m1", shape=(200, 1032), group=16, seed=0):
    """A weight on the host, factors of either sign."""
    chance = torch.Generator().manual_seed(seed)
    qt = random_weight(weight_type(dtype), shape, group, "none", scale_type, chance)
    if qt.row_scales is not None:
        qt.row_scales.mul_(torch.randint(2, (shape[0], 1), generator=chance) * 2 - 1)
    return qt


def assert_product(y, x, qt, bias=None):
    weight, wide = qt.to("cuda").dequantize(torch.float64), x.double()
    found, bound = wide @ weight.T, wide.abs() @ weight.abs().T
    if bias is not None:
        found, bound = found + bias.double(), bound + bias.double().abs()
    # Kernels that apply scales to values round these to x's type; so does the expanded weight.
    reason = oracle.wrong(y, found, bound, torch.finfo(x.dtype).eps + oracle.SHARE, together=False)
    assert reason is None, f"{reason}; x {tuple(x.shape)} {x.dtype}, {qt}"


@pytest.mark.parametrize("scale_type", NARROW, ids=str)
@pytest.mark.parametrize("wtype", SYMMETRIC, ids=str)
def test_packing_gives_back_every_byte_and_expanding_every_bit(wtype, scale_type):
    for group in (16, 128, -1):
        for shape in ((1, 16), (37, 203)):
            qt = make(scale_type, wtype.name, shape, group)
            pw = lowbit.pack_weight(qt, "cuda")
            assert pw.unpack() == qt and pw.to("cpu").unpack() == qt
            for dtype in FLOATS:
                skip_unbuilt(wtype, dtype)
                assert torch.equal(bits_of(expanded(pw, dtype).cpu()), bits_of(qt.dequantize(dtype))), (shape, group)


@pytest.mark.parametrize("scale_type", NARROW, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_sanitizer_every_tile_is_right(tile, scale_type):
    """With and without bias, ragged N, every way that y is stored."""
    rows = [row for row in ROWS if (row["act"], row["family"], row["tokens"]) == tile]
    rows = [row for row in rows if not row["weight"].startswith("uint")]
    for i, row in enumerate(rows[:: max(1, len(rows) // 3)]):
        dtype, most = getattr(torch, row["act"]), row["tokens"]
        for shape in ((200, 1032), (33, 520)):
            qt = make(scale_type, row["weight"], shape, group_for(row, (16, 32, 64)[i % 3]), seed=i)
            pw, bias = lowbit.pack_weight(qt, "cuda"), oracle.normal(shape[0], dtype=dtype)
            for m in {1, most - 1 or 1, most} | ({2 * most + 3} if row["family"] != "decode" and most > 16 else set()):
                x = oracle.normal(m, shape[1], dtype=dtype, seed=m)
                with extension.force_cuda_kernel(name(row)):
                    assert_product(lowbit.matmul(x, pw), x, qt)
                    assert_product(lowbit.matmul(x, pw, bias), x, qt, bias)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("scale_type", "group"), [(E8M0, 32), (E4M3, 16), (E4M3, 128), (E8M0, -1)], ids=str)
def test_product_of_any_number_of_rows(scale_type, group, dtype, quiet_and_fresh):
    skip_unbuilt(weight_type("float4_e2m1"), dtype)
    for shape in ((200, 1032), (4096, 4096)):
        qt = make(scale_type, shape=shape, group=group)
        pw = lowbit.pack_weight(qt, "cuda")
        for m in (0, 1, 2, 7, 17, 100, 200, 1030):
            x, bias = oracle.normal(m, shape[1], dtype=dtype, seed=m), oracle.normal(shape[0], dtype=FLOATS[m % 3])
            y = lowbit.matmul(x, pw, bias)
            assert y.shape == (m, shape[0])
            if m:
                assert_product(y, x, qt, bias)


@pytest.mark.parametrize("m", [1, 8, 40, 300])
@pytest.mark.parametrize(("scale_type", "group"), [(E8M0, 32), (E4M3, 16)], ids=str)
def test_kernels_multiply_and_nothing_is_expanded(scale_type, group, m):
    """MXFP4 and NVFP4."""
    skip_unbuilt(weight_type("float4_e2m1"), torch.bfloat16)
    pw, x = lowbit.pack_weight(make(scale_type, group=group), "cuda"), oracle.normal(m, 1032, dtype=torch.bfloat16)
    launched = kernels_launched(lambda: lowbit.matmul(x, pw))
    assert any(f"lowbit::{family}" in kernel for family in FAMILIES for kernel in launched), launched
    assert not any("dequant" in kernel for kernel in launched), launched


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale_type", NARROW, ids=str)
def test_a_layer_trains_compiles_and_moves(scale_type, dtype, quiet_and_fresh):
    skip_unbuilt(weight_type("float4_e2m1"), dtype)
    qt = make(scale_type)
    layer = lowbit.Linear.from_quant_tensor(qt, torch.zeros(200, dtype=dtype)).cuda()
    assert layer.layout == "nvidia" and layer.quant_tensor() == qt.to("cuda")
    x, dy = oracle.normal(30, 1032, dtype=dtype).requires_grad_(), oracle.normal(30, 200, dtype=dtype, seed=2)
    dx, dbias = torch.autograd.grad(layer(x), (x, layer.bias), dy)
    weight, wide = qt.to("cuda").dequantize(torch.float64), dy.double()
    share = torch.finfo(dtype).eps / 2 + oracle.SHARE
    assert oracle.wrong(dx, wide @ weight, wide.abs() @ weight.abs(), share, together=False) is None
    torch.testing.assert_close(dbias, dy.sum(0, dtype=torch.float32).to(dtype))
    with torch.no_grad():
        x = x.detach()
        expected = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), expected)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        state = layer.state_dict()
        assert state["scales"].dtype == scale_type
        layer.load_state_dict(state)
        assert torch.equal(layer.half().float().to(dtype)(x), expected)
    assert layer.cpu().quant_tensor() == qt


def test_opcheck_with_factors_of_rows():
    pw = lowbit.pack_weight(make(E4M3, "int4", (40, 96), 32), "cuda")
    held, x = (pw.codes, pw.scales, pw.zeros), oracle.normal(3, 96, dtype=torch.float16)
    extras = (None, pw.row_scales)
    out, dy = torch.zeros(3, 40, dtype=x.dtype, device="cuda"), oracle.normal(3, 40, dtype=x.dtype).requires_grad_()
    torch.library.opcheck(torch.ops.lowbit.matmul_out, (x, *held, None, *pw.numbers, 1, out, *extras))
    torch.library.opcheck(torch.ops.lowbit.matmul_grad, (x.requires_grad_(), *held, None, *pw.numbers, 1, *extras))
    torch.library.opcheck(torch.ops.lowbit.matmul_grad_x, (dy, *held, *pw.numbers, *extras))
    rows = torch.zeros(9, 96, dtype=x.dtype, device="cuda")
    torch.library.opcheck(torch.ops.lowbit.dequantize_out, (*held, *pw.numbers, 5, rows, *extras))


def test_scales_that_were_not_widened_are_refused():
    pw = lowbit.pack_weight(make(E4M3, "int4", (40, 96), 32), "cuda")
    x, out = oracle.normal(3, 96, dtype=torch.float16), torch.zeros(3, 40, dtype=torch.float16, device="cuda")
    for scales, factors, words in (
        (pw.scales.to(E4M3), pw.row_scales, "must be packed as 16-bit floats"),
        (pw.scales, pw.row_scales.cpu(), "row_scales must be on cuda"),
        (pw.scales, pw.row_scales[:39], "row_scales must have shape"),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch.ops.lowbit.matmul_out(x, pw.codes, scales, None, None, *pw.numbers, 1, out, None, factors)


def test_batch_invariant_products():
    pw, x = lowbit.pack_weight(make(E4M3), "cuda"), oracle.normal(150, 1032, dtype=torch.float16)
    with extension.batch_invariant():
        whole = lowbit.matmul(x, pw)
        for rows in (slice(0, 1), slice(7, 30), slice(60, 150)):
            assert torch.equal(lowbit.matmul(x[rows], pw), whole[rows])
