"""Risk: a product is wrong, for some kernel, some input, or some shape and stride that a caller may have."""

import os
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit
from lowbit import extension, kernel_list, reference
from lowbit.commands.selftest import TOLERANCE, random_weight
from lowbit.dtypes import KERNEL_TYPES, WEIGHT_TYPES, act_type, kernel_type

ROWS = kernel_list.manifest("cpu")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def name(dtype):
    return str(dtype).removeprefix("torch.")


def error(y, expected):
    return ((y.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_rounded_once(y, x, qt):
    """Every value of y is the exact product but for its last rounding and the sums' small share of |x| @ |W|.T.

    A weight counts with what it is the difference or sum of: scale * code and a zero. x may be rounded to digits below
    the largest value of its block, see csrc/templates/cpu/activations.h.
    Why not error(): a norm over one or two values is no better than their roundings and cancellations.
    """
    w = reference.dequantize(qt)
    weight_size = w.abs()
    if qt.zeros is not None:
        zeros = qt.zeros.double() * (qt.scales.double() if qt.zero_kind == "zero" else 1)
        group = qt.shape[1] if qt.group_size == -1 else qt.group_size
        weight_size += 2 * zeros.abs().repeat_interleave(group, 1)[:, : qt.shape[1]]
    exact, size = x.double() @ w.T, x.double().abs() @ weight_size.T
    share, digits = (1e-5, 2.0**-22) if y.dtype == torch.float32 else (3e-4, 2.0**-14)
    size += digits / share * x.double().abs().amax(-1, keepdim=True) * weight_size.sum(-1)
    eps, smallest = torch.finfo(y.dtype).eps, torch.finfo(y.dtype).smallest_normal
    bound = eps / 2 * exact.abs().clamp_min(smallest) + share * size  # subnormals lie as far apart as the first normals
    assert ((y.double() - exact).abs() <= bound).all(), ((y.double() - exact).abs() / bound).max()


def weight(dtype="int4", n=40, k=96, group_size=32, kind=None, scale_type=torch.float16, seed=0):
    wtype = kernel_type(dtype)
    kind = kind or ("zero" if wtype.kind == "uint" else "none")
    return random_weight(wtype, (n, k), group_size, kind, scale_type, torch.Generator().manual_seed(seed))


def normal(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def silu(x):
    return torch.nn.functional.silu(2 * x)


# ---- every kernel ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def cases(dtype, act):
    """Inputs that different mistakes cannot all survive, with their float64 products."""
    on_the_fly = act_type(act).on_the_fly
    kinds = {"uint": ("zero", "min"), "codebook": ("none", "min")}.get(dtype.rstrip("0123456789"), ("none", "none"))
    found = []
    for i, (k, group, kind, scale) in enumerate(
        [(203, 64, kinds[0], torch.float16), (1090, -1, kinds[1], torch.bfloat16), (64, 16, kinds[0], torch.float32)]
    ):
        qt = weight(dtype, 50, k, group, kind, scale, seed=i)
        pw, bias = lowbit.pack_weight(qt), normal(50, seed=9)
        for x_type in FLOATS if on_the_fly else [getattr(torch, act)]:
            zero_mean = [normal(m, k, seed=m) for m in (1, 4, 37)]
            xs = [f(x).to(x_type) for x in zero_mean for f in (lambda x: x, lambda x: x.abs() + 1, silu)]
            argument = act if on_the_fly else None
            # Why at once: the reference decodes the weight bit by bit on every call.
            expected = reference.matmul(torch.cat(xs), qt, bias, argument).split([len(x) for x in xs])
            found += [(x, pw, bias, argument, y) for x, y in zip(xs, expected, strict=True)]
    return found


@pytest.mark.parametrize("row", sorted(ROWS, key=lambda r: (r["weight"], r["act"])), ids=lambda row: row["name"])
def test_kernel_agrees_with_the_reference_in_float64(row):
    if row["isa"] not in extension.isas():
        pytest.skip(f"this CPU lacks {row['isa']}")
    with extension.force_isa(row["isa"]):
        assert kernel_list.kernel_name(row["weight"], row["act"]) == row["name"]
        for x, pw, bias, act, expected in cases(row["weight"], row["act"]):
            y = lowbit.matmul(x, pw, bias, act=act)
            assert y.dtype == x.dtype
            assert error(y, expected) <= TOLERANCE[name(x.dtype)], (tuple(x.shape), pw)


def test_build_has_every_kernel_of_every_instruction_set():
    if os.environ.get("LOWBIT_ONLY"):
        pytest.skip("a partial build was asked for")
    for isa in extension.isas():
        for wtype in KERNEL_TYPES:
            for act in ("float32", "float16", "bfloat16", "int8")[: 3 if wtype.kind == "codebook" else 4]:
                assert kernel_list.kernel_name(wtype.name, act, isa).endswith(f"_{isa}")


# ---- shapes and strides ---------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_product_is_right_for_any_shape_group_type_and_stride(data):
    draw = data.draw
    wtype = draw(st.sampled_from(WEIGHT_TYPES))
    n, k, m = draw(st.integers(1, 70)), draw(st.integers(1, 300)), draw(st.integers(0, 20))
    kind = draw(st.sampled_from(["zero", "min"])) if wtype.kind == "uint" else "none"
    group = draw(st.sampled_from([16, 32, 64, 128, 256, -1]))
    qt = weight(wtype.name, n, k, group, kind, draw(st.sampled_from(FLOATS)), seed=draw(st.integers(0, 9)))
    dtype = draw(st.sampled_from(FLOATS))
    x = draw(
        st.sampled_from(
            [
                normal(m, k),
                normal(k, m).T,  # columns are not adjacent
                normal(m, 2 * k)[:, ::2],
                normal(m, k + 7)[:, 3 : k + 3],  # rows apart, not aligned
                normal(2 * m, k)[::2],
                normal(1, k).expand(m, k),
                normal(m, 1, 3, k).transpose(0, 2),
                normal(k),
            ]
        )
    ).to(dtype)
    # Why: .to() may have made it dense; give it back the strides it was drawn with.
    strided = torch.empty_strided(x.shape, x.stride(), dtype=dtype)
    strided.copy_(x) if not any(s == 0 for s in x.stride()) else None
    x = x if any(s == 0 for s in x.stride()) else strided
    before = x.clone()
    y = lowbit.matmul(x, lowbit.pack_weight(qt))
    assert y.shape == (*x.shape[:-1], n) and y.dtype == dtype and torch.equal(x, before)
    if y.numel():
        assert_rounded_once(y, x, qt)


@pytest.mark.parametrize("shape", [(96,), (1, 96), (0, 96), (3, 0, 96), (2, 3, 96), (1, 2, 3, 96)])
def test_leading_dimensions_are_kept(shape):
    qt = weight()
    y = lowbit.matmul(normal(*shape), lowbit.pack_weight(qt))
    assert y.shape == (*shape[:-1], 40) and y.is_contiguous()
    if y.numel():
        assert error(y, reference.matmul(normal(*shape), qt)) <= 1e-5


def test_row_of_nan_or_infinity_stays_in_its_row():
    pw = lowbit.pack_weight(weight())
    for m in (3, 40):
        x = normal(m, 96)
        clean = lowbit.matmul(x, pw)
        x[1, 5], x[2, 7] = float("nan"), float("inf")
        y = lowbit.matmul(x, pw)
        assert y[1].isnan().all() and not y[2].isfinite().any()
        assert torch.equal(y[0], clean[0]) and torch.equal(y[3:], clean[3:])


def test_columns_beyond_k_are_never_read():
    # The padding of K must not meet what lies behind a row of x.
    qt, x = weight(k=70, group_size=64), torch.full((5, 96), float("nan"))
    x[:, :70] = normal(5, 70)
    assert error(lowbit.matmul(x[:, :70], lowbit.pack_weight(qt)), reference.matmul(x[:, :70], qt)) <= 1e-5


@pytest.mark.parametrize("act", [None, "int8"])
def test_act_order_gathers_x(act):
    perm = torch.randperm(96, generator=torch.Generator().manual_seed(0)).int()
    plain = weight()
    options = {"dtype": "int4", "shape": (40, 96), "group_size": 32, "perm": perm}
    qt = lowbit.QuantTensor(plain.codes, plain.scales, **options)
    for x in (normal(96), normal(2, 3, 96)):
        y = lowbit.matmul(x, lowbit.pack_weight(qt), act=act)
        assert error(y, reference.matmul(x, qt, act=act)) <= 1e-5


# ---- bias and out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_type", FLOATS, ids=name)
@pytest.mark.parametrize("x_type", FLOATS, ids=name)
def test_bias_of_any_float_type_is_added_before_the_only_rounding(x_type, bias_type):
    qt, x, bias = weight(), normal(3, 96, dtype=x_type), normal(80).mul(100).to(bias_type)[::2]
    y, exact = lowbit.matmul(x, lowbit.pack_weight(qt), bias), reference.matmul(x, qt, bias)
    assert error(y, exact) <= TOLERANCE[name(x_type)]
    # Rounding the sum before the bias is added would be seen where the two nearly cancel.
    half_a_place = {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[x_type]
    allowed = half_a_place * exact.abs() + 2e-5 * exact.abs().max()
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, 3, 40),
        lambda: torch.empty(2, 40, 3).transpose(1, 2),
        lambda: torch.empty(2, 3, 80)[..., ::2],
        lambda: torch.empty(2, 3, 50)[..., 5:45],
    ],
    ids=["dense", "transposed", "every second", "slice"],
)
def test_out_of_any_stride_is_written_and_returned(make):
    qt, x, out = weight(), normal(2, 3, 96), make()
    assert lowbit.matmul(x, lowbit.pack_weight(qt), out=out) is out
    assert error(out, reference.matmul(x, qt)) <= 1e-5


def test_out_beside_x_in_one_buffer_leaves_the_rest_alone():
    qt, both = weight(), torch.full((4, 96 + 40 + 2), 7.0)
    both[:, :96] = normal(4, 96)
    lowbit.matmul(both[:, :96], lowbit.pack_weight(qt), out=both[:, 97:137])
    assert error(both[:, 97:137], reference.matmul(both[:, :96], qt)) <= 1e-5
    assert (both[:, 96] == 7).all() and (both[:, 137] == 7).all() and torch.equal(both[:, :96], normal(4, 96))


def test_out_of_memory_stays_an_error_of_torch():
    x = torch.zeros(1, 96).expand(1 << 44, 96)
    with pytest.raises(RuntimeError, match="allocate") as caught:
        lowbit.matmul(x, lowbit.pack_weight(weight()))
    assert not isinstance(caught.value, lowbit.LowbitError) and "API call failed" not in str(caught.value)


def test_autocast_treats_the_product_as_a_linear():
    qt, x = weight(), normal(3, 96)
    pw = lowbit.pack_weight(qt)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            y = lowbit.matmul(x, pw, normal(40))
            assert y.dtype == torch.nn.functional.linear(x, torch.ones(40, 96)).dtype == dtype
            into = lowbit.matmul(x, pw, out=torch.empty(3, 40))  # as for torch: out= decides
            assert into.dtype == torch.float32
            with pytest.raises(lowbit.DtypeError):
                lowbit.matmul(x.double(), pw)
        assert error(y, reference.matmul(x.to(dtype), qt, normal(40))) <= TOLERANCE[name(dtype)]
