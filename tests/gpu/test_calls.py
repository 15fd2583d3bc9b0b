"""Risk: a product is wrong for some number of rows, stride, alignment, bias or out, whichever kernel it comes to."""

import threading

import pytest
import torch

import lowbit
from lowbit import extension
from lowbit.autotune.plan import candidates, device_of

from . import oracle
from .kernels import kernels_launched, needs_kernels, product_rows, ran
from .products import FLOATS, assert_right, bias_for

pytestmark = needs_kernels

#: Rows of x and the kernel that they go to on an H200, with an int4 weight of 8192 x 8192.
CHOICE = [(1, "decode_n1"), (2, "decode_n2"), (3, "gemm_sm90_n8"), (4, "gemm_sm90_n8"), (8, "gemm_sm90_n8")]
CHOICE += [(24, "gemm_sm90_n32"), (40, "gemm_sm90_n48"), (64, "gemm_sm90_n64"), (96, "gemm_sm90_n96")]
CHOICE += [(128, "gemm_sm90_n128"), (1024, "gemm_sm90_n256")]


@pytest.mark.parametrize("dtype", ["int1", "uint4", "int7", "float8_e4m3"])
@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
def test_any_number_of_tokens(dtype, act):
    weight = oracle.make(dtype, (200, 8200), 128, "zero" if dtype.startswith("uint") else "none")
    for m in (*range(1, 18), 33, 130, 300):
        assert_right(oracle.normal(m, 8200, dtype=act, seed=m), weight, bias_for(200, m))


@pytest.mark.parametrize("m, chosen", CHOICE)
def test_number_of_tokens_chooses_the_kernel(m, chosen):
    major, minor = torch.cuda.get_device_capability()
    if m > 2 and (major, minor) != (9, 0):
        least = min(tile for tile in (8, 16, 32, 48, 64, 96, 128) if tile >= min(m, 128))
        chosen = "decode_n4" if m <= 4 else f"gemm_sm80_n{least}"
    weight, x = oracle.make("int4", (8192, 8192)), oracle.normal(m, 8192, dtype=torch.float16)
    device = device_of(torch.cuda.current_device())
    planned = candidates(weight.pw.scheme, "float16", m, *weight.pw.shape, device)
    assert planned[0].name == f"w4a16_{chosen}" and (planned[0].us is not None) == ((major, minor) == (9, 0))
    table = lowbit.info(weight.pw)["plan for x float16"]
    assert m not in table or table[m] == planned
    launched = kernels_launched(lambda: lowbit.matmul(x, weight.pw))
    assert ran(launched, f"w4a16_{chosen}"), launched


@pytest.mark.parametrize("m, parts", [(6, 2), (16, 4), (17, None)])
def test_few_rows_go_in_parts_where_no_larger_tile_runs(m, parts):
    if any(row["family"] != "decode" for row in product_rows()):
        pytest.skip("this build has larger tiles")
    weight, x = oracle.make("int4", (200, 520)), oracle.normal(m, 520, dtype=torch.float16)
    launched = kernels_launched(lambda: lowbit.matmul(x, weight.pw))
    if parts is None:
        assert "dequant" in launched[0], launched
    else:
        assert len(launched) == parts and all("decode::" in seen for seen in launched), launched
    assert_right(x, weight)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_in_x_is_not_finite_in_y(value):
    weight = oracle.make("int4", (64, 512))
    for m in (1, 2, 4, 8, 16, 32, 64, 128, 200, 300):
        x = oracle.normal(m, 512, dtype=torch.float16)
        x[0, 300] = value
        y = lowbit.matmul(x, weight.pw)
        assert not y[0].isfinite().any() and y[1:].isfinite().all(), f"M={m}"


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize(
    ("dtype", "group_size", "kind", "m", "family"),
    [
        ("uint5", 64, "zero", 100, "dequant"), ("int4", 16, "none", 1, "dequant"), ("int3", 128, "none", 17, "dequant"),
        ("uint5", 64, "zero", 1, "gemm_sm90"), ("int4", 32, "none", 16, "gemm_sm90"),
        ("int2", -1, "min", 3, "gemm_sm90"), ("int8", -1, "none", 100, "gemm_sm90"),
        ("uint8", 128, "whole", 300, "gemm_sm90"),
        ("float8_e4m3", 128, "none", 1, "gemm_sm90"), ("float8_e4m3", 128, "none", 40, "gemm_sm90"),
        ("float4_e2m1", 256, "none", 1000, "gemm_sm90"), ("float6_e2m3", 32, "none", 8, "gemm_sm90"),
    ],
)  # fmt: skip
def test_scales_of_float32_are_read_or_go_to_the_expanded_weight(act, dtype, group_size, kind, m, family):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("gemm_sm90 is for compute capability 9.0")
    weight = oracle.make(dtype, (200, 1032), group_size, kind, "float32")
    x = oracle.normal(m, 1032, dtype=act)
    launched = kernels_launched(lambda: lowbit.matmul(x, weight.pw))
    assert family in launched[0], launched
    assert_right(x, weight, bias_for(200, m))


@pytest.mark.parametrize("act", FLOATS[:2], ids=str)
@pytest.mark.parametrize("m", [1, 5, 16, 17, 100, 257])
def test_x_of_any_stride_and_alignment(act, m):
    for k in (520, 203):
        weight = oracle.make("int3", (50, k), 64)
        x = oracle.normal(m, k, dtype=act)
        for offset in (1, 2, 4, 8):
            memory = torch.full((offset + m * k + 1,), torch.nan, dtype=act, device="cuda")
            memory[offset:-1] = x.flatten()
            assert_right(memory[offset:-1].view(m, k), weight)
        for strided in (
            x.T.contiguous().T,
            x.repeat_interleave(2, 1)[:, ::2],
            x.repeat_interleave(2, 0)[::2],
            torch.nn.functional.pad(x, (3, 4), value=torch.nan)[:, 3:-4],
            x[:1].expand(m, k),
            x.view(m, 1, k).expand(m, 2, k).transpose(0, 1),
        ):
            before = strided.clone()
            assert_right(strided, weight)
            assert oracle.same_bits(strided.contiguous(), before)


@pytest.mark.parametrize("shape", [(520,), (1, 520), (0, 520), (3, 0, 520), (2, 3, 520), (2, 2, 8, 520), (5, 40, 520)])
def test_leading_dimensions_are_kept(shape):
    weight = oracle.make("int4", (50, 520))
    x = oracle.normal(*shape, dtype=torch.float16)
    y = lowbit.matmul(x, weight.pw)
    assert y.shape == (*shape[:-1], 50) and y.is_contiguous() and y.dtype == x.dtype
    if y.numel():
        assert_right(x, weight, y=y)


@pytest.mark.parametrize("bias_type", FLOATS, ids=str)
@pytest.mark.parametrize("x_type", FLOATS, ids=str)
def test_bias_of_any_float_type(x_type, bias_type):
    weight = oracle.make("int4", (200, 520))
    for m in (1, 9, 40, 300):
        x = oracle.normal(m, 520, dtype=x_type)
        assert_right(x, weight, oracle.normal(400, dtype=bias_type, seed=2)[::2] * 100)


@pytest.mark.parametrize("x_type", FLOATS[:2], ids=str)
def test_bias_is_added_before_the_only_rounding(x_type):
    weight = oracle.make("int4", (200, 520))
    for m in (1, 9):
        x = oracle.normal(m, 520, dtype=x_type)
        bias = -oracle.product(x[:1], weight)[0][0].float()
        # Why so narrow: a sum rounded before all of it is taken off again would be wrong by half its own place.
        y, (exact, size) = lowbit.matmul(x, weight.pw, bias), oracle.product(x, weight, bias)
        reason = oracle.wrong(y[:1], exact[:1], size[:1], share=3e-6, together=False)
        assert reason is None, reason


@pytest.mark.parametrize("m", [3, 40, 300])
@pytest.mark.parametrize(
    "make",
    [
        lambda m, **o: torch.empty(2, m, 50, **o),
        lambda m, **o: torch.empty(2, 50, m, **o).transpose(1, 2),
        lambda m, **o: torch.empty(2, m, 100, **o)[..., ::2],
        lambda m, **o: torch.empty(2, m, 61, **o)[..., 5:55],
    ],
    ids=["dense", "transposed", "every_second", "slice"],
)
def test_out_of_any_stride_is_written_and_returned(make, m):
    weight, x = oracle.make("int5", (50, 520)), oracle.normal(2, m, 520, dtype=torch.float16)
    out = make(m, dtype=torch.float16, device="cuda").fill_(torch.nan)
    assert lowbit.matmul(x, weight.pw, out=out) is out
    assert_right(x, weight, y=out)


def test_out_beside_x_in_one_buffer_leaves_the_rest_alone():
    weight, both = oracle.make("int4", (50, 520)), torch.full((4, 520 + 8 + 50 + 6), 7.0, device="cuda").half()
    both[:, :520] = x = oracle.normal(4, 520, dtype=torch.float16)
    lowbit.matmul(both[:, :520], weight.pw, out=both[:, 528:578])
    assert_right(x, weight, y=both[:, 528:578])
    assert (both[:, 520:528] == 7).all() and (both[:, 578:] == 7).all() and oracle.same_bits(both[:, :520].clone(), x)


def test_first_product_of_a_thread_runs_the_kernel_that_others_run():
    """A thread that never used CUDA has no context: tensors could not be described, and the weight was expanded."""
    weight, x, found = oracle.make("int4", (200, 1032)), oracle.normal(20, 1032, dtype=torch.float16), []
    expected = lowbit.matmul(x, weight.pw)
    name = "w4a16_gemm_sm90_n32" if torch.cuda.get_device_capability() == (9, 0) else "w4a16_gemm_sm80_n32"
    if all(row["name"] != name for row in product_rows()):
        pytest.skip(f"this build has no {name}")

    def multiply():
        try:
            found.append(lowbit.matmul(x, weight.pw))
        except Exception as error:
            found.append(error)

    with extension.force_cuda_kernel(name):
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    assert isinstance(found[0], torch.Tensor), found
    torch.testing.assert_close(found[0], expected)
