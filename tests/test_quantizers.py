"""Risk: a scale that is not the documented one, a code that is not the nearest, a weight quantized that cannot be."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit import reference
from lowbit.dtypes import WEIGHT_TYPES, weight_type
from lowbit.errors import DeviceError, DtypeError, QuantizationError, SchemeError, ShapeError
from lowbit.quantizers import METHODS, quantize

every_type = pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)


def scale_and_zero(values, wtype, zero_kind, stored):
    """The rule for one group, a list of numbers, one fp32 step at a time; scale and zero as stored."""

    def f32(x):
        return torch.tensor(x, dtype=torch.float32)

    top, zero = f32(wtype.max_value), None
    high, low = f32(max(values)), f32(min(values))
    if wtype.name == "int1":
        scale = f32(math.fsum(abs(v) for v in values) / len(values))
    elif wtype.kind == "int":
        scale = max(high / (2 ** (wtype.bits - 1) - 1), -low / 2 ** (wtype.bits - 1))
    elif wtype.kind == "float":
        scale = max(high, -low) / top
    else:
        low = min(low, f32(0.0))
        scale = (max(high, f32(0.0)) - low) / top
    scale = scale.to(stored)
    if wtype.kind == "uint":
        if zero_kind == "min":
            zero = low
        else:
            zero = min(torch.round(-low / scale.float()), top) if scale > 0 else f32(0.0)
        zero = (zero if scale > 0 else f32(0.0)).to(stored)
    return scale, zero


@every_type
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rtn_follows_the_scale_rule_group_by_group(wtype, dtype, rng):
    n, k, size = 4, 75, 32  # the last group of a row is short
    w = torch.randn(n, k, generator=rng)
    w[1, :32] = w[1, :32].abs()  # a group that does not reach below zero, one that does not reach above, one of zeros
    w[2, 32:64] = -w[2, 32:64].abs()
    w[3, 64:] = 0
    w = w.to(dtype)
    stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    for zero_kind in ("zero", "min") if wtype.kind == "uint" else ("none",):
        qt = quantize(w, wtype, group_size=size, method="rtn", zero_kind=zero_kind).validate()
        assert (qt.scales.dtype, qt.zero_kind, qt.shape) == (stored, zero_kind, (n, k))
        for row in range(n):
            for group in range(3):
                values = w[row, group * size : (group + 1) * size].tolist()
                scale, zero = scale_and_zero(values, wtype, zero_kind, stored)
                assert qt.scales[row, group] == scale
                assert zero is None or qt.zeros[row, group] == zero
        assert qt.scales[3, 2] == 0 and not qt.dequantize()[3, 64:].any()


def nearest_is_chosen(w, qt):
    """Every weight is as near to its own stored value as to any that its group can store."""
    wtype, k = qt.dtype, w.shape[1]
    table = torch.tensor([v for c, v in enumerate(wtype.values) if c not in wtype.invalid_codes]).double()
    group = torch.arange(k) // (k if qt.group_size == -1 else qt.group_size)
    scales = qt.scales.double()[:, group].unsqueeze(-1)
    zeros = None if qt.zeros is None else qt.zeros.double()[:, group].unsqueeze(-1)
    choices = scales * (table - zeros if qt.zero_kind == "zero" else table)
    choices = choices + zeros if qt.zero_kind == "min" else choices
    best = (choices - w.double().unsqueeze(-1)).abs().amin(-1)
    taken = (reference.dequantize(qt) - w.double()).abs()
    return bool((taken <= best + 1e-6 * w.abs().max()).all())


@every_type
@pytest.mark.parametrize("method", METHODS)
def test_codes_are_the_nearest_to_the_stored_scale(wtype, method, rng):
    w = torch.randn(6, 100, generator=rng) * torch.logspace(-3, 2, 6).unsqueeze(1)
    for zero_kind in ("zero", "min") if wtype.kind == "uint" else ("none",):
        assert nearest_is_chosen(w, quantize(w, wtype, group_size=32, method=method, zero_kind=zero_kind))


@pytest.mark.parametrize("wtype", [t for t in WEIGHT_TYPES if t.kind == "float"], ids=str)
def test_floats_never_make_minus_zero_and_round_half_to_even(wtype):
    half = 1 << (wtype.bits - 1)
    positive = [v for c, v in enumerate(wtype.values[:half]) if c not in wtype.invalid_codes]
    middles = [(a + b) / 2 for a, b in zip(positive, positive[1:], strict=False)]
    points = torch.tensor(positive + middles + [1e-30, positive[1] / 2])
    w = torch.cat([points, -points]).unsqueeze(0)
    qt = quantize(w, wtype, group_size=-1, method="rtn", scale_dtype=torch.float32)
    assert qt.scales.item() == 1
    codes = qt.unpack()[0]
    assert not (codes == half).any()
    top = len(positive)
    assert codes[:top].tolist() == list(range(top))
    assert codes[top : 2 * top - 1].tolist() == [c + c % 2 for c in range(top - 1)]


@pytest.mark.parametrize("name, dtype", [("float8_e4m3", torch.float8_e4m3fn), ("float8_e5m2", torch.float8_e5m2)])
def test_8_bit_floats_round_like_torch(name, dtype, rng):
    w = torch.randn(20, 500, generator=rng) * torch.logspace(-4, 2, 500)
    w[:, 0] = weight_type(name).max_value
    w.clamp_(max=weight_type(name).max_value)
    qt = quantize(w, name, group_size=-1, method="rtn", scale_dtype=torch.float32)
    assert torch.equal(qt.dequantize(), w.to(dtype).float())


def squared_errors(w, qt):
    error = (reference.dequantize(qt) - w.double()).square()
    size = qt.shape[1] if qt.group_size == -1 else qt.group_size
    return torch.stack([part.sum(1) for part in error.split(size, dim=1)], dim=1)


@every_type
@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "outliers"])
def test_mse_is_never_worse_than_rtn_in_any_group(wtype, heavy, rng):
    w = torch.randn(24, 150, generator=rng)
    w = (w**5 if heavy else w).half()
    for zero_kind in ("zero", "min") if wtype.kind == "uint" else ("none",):
        rtn, mse = (quantize(w, wtype, group_size=64, method=m, zero_kind=zero_kind) for m in ("rtn", "mse"))
        before, after = squared_errors(w, rtn), squared_errors(w, mse)
        assert (after <= before * (1 + 1e-6)).all()
        if wtype.bits in (2, 3) and not heavy:
            assert after.sum() < 0.9 * before.sum()


@pytest.mark.parametrize("power", [1, 3])
def test_mse_comes_near_the_best_clip_of_a_dense_search(power, rng):
    w = torch.randn(16, 128, generator=rng) ** power
    found = squared_errors(w, quantize(w, "int3", method="mse", scale_dtype=torch.float32)).flatten()
    best = torch.full((16,), torch.inf, dtype=torch.float64)
    amax = torch.maximum(w.amax(1) / 3, w.amin(1) / -4).double()
    for ratio in torch.linspace(0.2, 1, 400):
        scale = (amax * ratio).unsqueeze(1)
        error = ((w.double() / scale).round().clamp(-4, 3) * scale - w.double()).square().sum(1)
        best = torch.minimum(best, error)
    assert (found < best * 1.05).all()


@settings(deadline=None, max_examples=60)
@given(
    wtype=st.sampled_from(WEIGHT_TYPES),
    n=st.integers(1, 3),
    k=st.integers(1, 140),
    size=st.sampled_from([16, 64, -1]),
    power=st.integers(-12, 3),
    method=st.sampled_from(sorted(METHODS)),
    seed=st.integers(0, 9),
)
def test_any_shape_and_magnitude_gives_a_valid_weight(wtype, n, k, size, power, method, seed):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    qt = quantize(w, wtype, group_size=size, method=method).validate()
    assert qt.shape == (n, k)
    assert nearest_is_chosen(w, qt)


def test_rows_do_not_depend_on_their_neighbours(rng):
    """Long weights are quantized some rows at a time."""
    w = torch.randn(90, 4000, generator=rng)
    whole = quantize(w, "uint3", group_size=64)
    for rows in (slice(0, 1), slice(31, 34), slice(89, 90)):
        part = quantize(w[rows], "uint3", group_size=64)
        assert torch.equal(part.codes, whole.codes[rows]) and torch.equal(part.zeros, whole.zeros[rows])


def test_int1_is_the_sign_times_the_mean(rng):
    w = torch.randn(3, 40, generator=rng)
    w[0, 0] = 0
    qt = quantize(w, "int1", group_size=-1)
    assert torch.equal(qt.unpack(), (w >= 0).to(torch.uint8))
    torch.testing.assert_close(qt.scales.float(), w.abs().mean(1, keepdim=True), rtol=1e-3, atol=0)


@every_type
def test_a_scale_too_small_for_its_type_becomes_zero_not_nonsense(wtype):
    w = torch.full((2, 16), 1e-12)
    w[1] = -w[1]
    for method in METHODS:
        qt = quantize(w, wtype, group_size=16, method=method).validate()
        assert not qt.scales.any() and not qt.dequantize(torch.float32).any()
        assert quantize(w, wtype, group_size=16, method=method, scale_dtype=torch.float32).scales.all()


def test_a_zero_without_a_scale_is_zero_too():
    qt = quantize(torch.full((1, 16), -1e-7), "uint4", zero_kind="min", method="rtn")
    assert not qt.scales.any() and not qt.zeros.any()


def test_zero_points_stay_inside_the_codes():
    """A stored scale below the true one would put the zero of an all-negative group beyond the last code."""
    w = -torch.linspace(1, 2, 4000).view(-1, 1).bfloat16()
    qt = quantize(w, "uint8", method="rtn").validate()
    tiny = quantize(torch.full((1, 16), -1.4 * 15 * 2.0**-24), "uint4", method="rtn")
    assert tiny.scales.item() == 2.0**-24
    assert qt.zeros.max() == 255 and tiny.zeros.max() == 15


def test_strides_gradients_and_the_default_dtype_change_nothing(rng):
    w = torch.randn(40, 6, generator=rng)
    expected = quantize(w.T.contiguous(), "float4_e2m1", group_size=16)
    assert quantize(w.T, "float4_e2m1", group_size=16) == expected
    assert quantize(torch.nn.Parameter(w).T, "float4_e2m1", group_size=16) == expected
    torch.set_default_dtype(torch.float64)
    try:
        assert quantize(w.T, "float4_e2m1", group_size=16) == expected
        assert quantize(w, "int1").dequantize().dtype == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_weight_itself_is_not_touched(rng):
    w = torch.randn(4, 64, generator=rng)
    before = w.clone()
    for wtype in WEIGHT_TYPES:
        quantize(w, wtype)
    assert torch.equal(w, before)


_W = torch.ones(2, 32)
_NAN = torch.ones(2, 32).index_fill_(1, torch.tensor([3]), math.nan)
_BAD = {
    "list": (([[1.0]],), {}, DtypeError, "torch.Tensor, got list"),
    "integers": ((_W.int(),), {}, DtypeError, "got int32"),
    "float64": ((_W.double(),), {}, DtypeError, "got float64"),
    "float8": ((_W.to(torch.float8_e4m3fn),), {}, DtypeError, "got float8_e4m3fn"),
    "sparse": ((_W.to_sparse(),), {}, DtypeError, "dense .*, got sparse_coo"),
    "vector": ((_W[0],), {}, ShapeError, r"\[N, K\].*got \(32,\)"),
    "empty": ((_W[:0],), {}, ShapeError, r"got \(0, 32\)"),
    "no data": ((_W.to("meta"),), {}, DeviceError, "meta"),
    "unknown type": ((_W, "int44"), {}, SchemeError, "'int44'; did you mean int4"),
    "begin of a type": ((_W, "float3"), {}, SchemeError, "'float3'; did you mean float3_e1m1[?]"),
    "type of torch": ((_W, torch.int8), {}, DtypeError, "name of a weight type"),
    "unknown method": ((_W,), {"method": "msee"}, SchemeError, "'msee'; did you mean mse"),
    "group size": ((_W,), {"group_size": 48}, SchemeError, "got 48"),
    "negative group size": ((_W,), {"group_size": -16}, SchemeError, "got -16"),
    "int with a zero": (
        (_W,),
        {"zero_kind": "zero"},
        SchemeError,
        "int4 is quantized with .*'none', got 'zero'",
    ),
    "uint without": ((_W, "uint4"), {"zero_kind": "none"}, SchemeError, "'zero' or 'min', got 'none'"),
    "zero kind": ((_W, "uint4"), {"zero_kind": "max"}, SchemeError, "zero_kind must be one of"),
    "scales of float64": ((_W,), {"scale_dtype": torch.float64}, SchemeError, "got 'float64'"),
    "scales by name": ((_W,), {"scale_dtype": "float16"}, DtypeError, "must be a torch.dtype"),
    "NaN": ((_NAN,), {}, QuantizationError, "2 of 64 values are NaN or infinite"),
    "infinity": ((_W * math.inf,), {}, QuantizationError, "64 of 64"),
    "scale overflow": ((_W * 1e6,), {}, QuantizationError, "2 scales overflow float16 .*1e.06"),
    "zero overflow": ((_W * -7e4, "uint8"), {"zero_kind": "min"}, QuantizationError, "2 zeros overflow float16"),
}


@pytest.mark.parametrize("arguments, options, error, words", _BAD.values(), ids=_BAD)
def test_what_cannot_be_quantized_is_refused_in_one_sentence(arguments, options, error, words):
    with pytest.raises(error, match=words) as caught:
        quantize(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_a_wider_scale_takes_what_overflowed():
    qt = quantize(_W * 1e6, "int4", scale_dtype=torch.float32)
    torch.testing.assert_close(qt.dequantize(), _W * 1e6)
    qt = quantize((_W * 1e6).bfloat16(), "int4")
    torch.testing.assert_close(qt.dequantize().float(), _W * 1e6, rtol=1e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_nearest_codes_too(rng):
    w = torch.randn(50, 1000, generator=rng)
    for wtype in WEIGHT_TYPES:
        for method in METHODS:
            qt = quantize(w.cuda(), wtype, method=method)
            assert qt.device.type == "cuda" and nearest_is_chosen(w, qt.cpu())
            assert method != "rtn" or qt == quantize(w, wtype, method=method)
