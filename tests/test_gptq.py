"""Risk: GPTQ that is not GPTQ: errors made good in the wrong column, scales of the wrong group, a crash.

The oracle is the algorithm as the paper first derives it, in float64: the inverse of what is left of the Hessian, one
column removed at a time, without factors, blocks or lazy updates.
"""

import math

import pytest
import torch

from lowbit import reference
from lowbit.dtypes import WEIGHT_TYPES
from lowbit.errors import DeviceError, DtypeError, QuantizationError, SchemeError, ShapeError
from lowbit.quantizers import Moments, gptq, output_error, quantize
from lowbit.quantizers.second_order import inverse_factor

every_type = pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)


def data(n, k, rng, tokens=400):
    """A weight, and second moments of correlated inputs, some channels of which are ten times as large."""
    x = torch.randn(tokens, k, generator=rng) @ (torch.randn(k, k, generator=rng) / k**0.5 + torch.eye(k))
    x[:, ::7] *= 10
    moments = Moments(k)
    moments.add(x)
    return torch.randn(n, k, generator=rng), moments.second


def slow(w, moments, start, damping=0.01, act_order=True):
    """Codes [N, K] (list of lists) for the scales of ``start``, by optimal brain quantization, column after column."""
    wtype, (n, k) = start.dtype, w.shape
    table = torch.tensor([math.nan if c in wtype.invalid_codes else v for c, v in enumerate(wtype.values)]).double()
    table = torch.where((table == 0) & (torch.arange(len(table)) > 0) & (wtype.kind == "float"), math.nan, table)
    h = moments.double().clone()
    dead = h.diagonal() == 0
    mean = h.diagonal()[~dead].mean()
    h[dead, dead] = 1.0
    h += damping * mean * torch.eye(k)
    w, codes = w.double().clone(), torch.zeros(n, k, dtype=torch.uint8)
    order = sorted(range(k), key=lambda j: -float(moments[j, j])) if act_order else list(range(k))
    size = k if start.group_size == -1 else start.group_size
    scales = torch.from_numpy(reference.read_scales(start))
    for step, j in enumerate(order):
        left = order[step:]
        inverse = torch.linalg.inv(h[left][:, left])
        scale = scales[:, j // size, None]
        zero = 0.0 if start.zeros is None else start.zeros[:, j // size].double()[:, None]
        choices = scale * table + zero if start.zero_kind == "min" else scale * (table - zero)
        distance = (choices - w[:, j, None]).abs().nan_to_num(math.inf)
        codes[:, j] = distance.argmin(1)
        chosen = choices.gather(1, codes[:, j, None].long())[:, 0]
        error = (w[:, j] - chosen) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0][None]
    return codes


@every_type
@pytest.mark.parametrize("group_size, act_order", [(32, True), (-1, True), (32, False)])
def test_the_codes_are_those_of_the_slow_algorithm(wtype, group_size, act_order, rng):
    w, moments = data(6, 75, rng)
    moments[10], moments[:, 10] = 0, 0  # a channel that is never used
    for zero_kind in ("zero", "min") if wtype.kind == "uint" else ("none",):
        options = {"group_size": group_size, "zero_kind": zero_kind, "scale_dtype": torch.float32}
        found = gptq(w, moments, wtype, act_order=act_order, block=32, **options).validate()
        start = quantize(w, wtype, method="mse", **options)
        assert torch.equal(found.scales, start.scales) and found.perm is None
        assert found.zeros is None or torch.equal(found.zeros, start.zeros)
        wrong = found.unpack() != slow(w, moments, start, act_order=act_order)
        # Why not none: a value halfway between two codes may fall to either side, and then changes the rest of its row.
        # int1 and two-bit types with wide gaps have more of these.
        assert wrong.any(1).sum() <= 1, f"{int(wrong.sum())} codes differ"


@pytest.mark.parametrize("name", ["float4_e2m1", "int3", "int8"])
@pytest.mark.parametrize("scale_dtype, size", [(torch.float8_e8m0fnu, 32), (torch.float8_e4m3fn, 16)], ids=str)
def test_scales_of_8_bits_and_factors_of_rows_are_read_as_they_are_stored(name, scale_dtype, size, rng):
    w, moments = data(6, 75, rng)
    w *= torch.logspace(-2, 2, 6).unsqueeze(1)
    found = gptq(w, moments, name, group_size=size, scale_dtype=scale_dtype).validate()
    start = quantize(w, name, group_size=size, scale_dtype=scale_dtype)
    assert torch.equal(found.scales.view(torch.uint8), start.scales.view(torch.uint8))
    assert start.row_scales is None or torch.equal(found.row_scales, start.row_scales)
    assert (found.unpack() != slow(w, moments, start)).any(1).sum() <= 1


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "uint2", "uint3", "uint4", "float4_e2m1", "float3_e1m1"])
@pytest.mark.parametrize("grid", ["rtn", "mse", "hqq"])
def test_the_output_changes_less_than_by_rounding(name, grid, rng):
    w, moments = data(40, 256, rng)
    for group_size in (64, -1):
        found = gptq(w, moments, name, group_size=group_size, grid=grid)
        plain = quantize(w, name, group_size=group_size, method=grid)
        after, before = (output_error(reference.dequantize(q).float() - w, moments) for q in (found, plain))
        assert after < 0.8 * before


def test_the_order_of_the_largest_first_pays(rng):
    w, moments = data(40, 256, rng)
    errors = [
        output_error(gptq(w, moments, "int3", act_order=order).dequantize().float() - w, moments)
        for order in (True, False)
    ]
    assert errors[0] < errors[1]


def test_blocks_factors_and_runs_change_nothing(rng):
    w, moments = data(8, 200, rng)
    one = gptq(w, moments, "uint4", group_size=64)
    assert gptq(w, moments, "uint4", group_size=64) == one
    for other in (gptq(w, moments, "uint4", group_size=64, block=7), gptq(w, 64 * moments, "uint4", group_size=64)):
        same = (other.unpack() == one.unpack()).float().mean()
        assert torch.equal(other.scales, one.scales) and same > 0.99


def test_without_correlation_it_is_rounding_to_nearest(rng):
    w = torch.randn(5, 96, generator=rng)
    moments = torch.diag(torch.rand(96, generator=rng))
    for name in ("int3", "uint4", "float6_e2m3"):
        assert gptq(w, moments, name, group_size=32) == quantize(w, name, group_size=32)
    assert gptq(w, torch.zeros(96, 96), "int4") == quantize(w, "int4")


def test_fewer_tokens_than_channels_are_enough(rng):
    w, moments = data(8, 128, rng, tokens=3)
    found = gptq(w, moments, "int4", group_size=32)
    plain = quantize(w, "int4", group_size=32)
    after, before = (output_error(q.dequantize().float() - w, moments) for q in (found, plain))
    assert after < 0.3 * before


def test_damping_grows_until_the_factor_exists(rng):
    bad = torch.eye(16)
    bad[0, 1] = bad[1, 0] = 1.5  # no moments of anything: an eigenvalue of -0.5
    factor = inverse_factor(bad, 0.01).double()
    assert factor.isfinite().all() and torch.equal(factor, factor.triu())
    inverse = torch.linalg.inv(factor.T @ factor)
    added = inverse - bad.double()  # a multiple of one: 0.01 times a power of ten, the first above 0.5
    torch.testing.assert_close(added, torch.eye(16).double(), rtol=1e-3, atol=1e-3)
    with pytest.raises(QuantizationError, match="positive definite"):
        inverse_factor(torch.eye(4) - 1e7 * (1 - torch.eye(4)), 0.01)


def test_what_it_is_given_is_not_touched(rng):
    w, moments = data(4, 64, rng)
    before = w.clone(), moments.clone()
    gptq(w, moments, "int4", act_order=False)
    assert torch.equal(w, before[0]) and torch.equal(moments, before[1])


def test_half_precision_weights_keep_their_scale_type(rng):
    w, moments = data(4, 64, rng)
    assert gptq(w.bfloat16(), moments, "int4").scales.dtype == torch.bfloat16


_W, _M = torch.ones(2, 32), torch.eye(32)
_BAD = {
    "moments of another shape": ((_W, torch.eye(31)), {}, ShapeError, r"\(32, 32\).*got \(31, 31\)"),
    "whole numbers": ((_W, _M.int()), {}, DtypeError, "got int32"),
    "no tensor": ((_W, None), {}, DtypeError, "got NoneType"),
    "another device": ((_W, _M.to("meta")), {}, DeviceError, "device of the weight"),
    "NaN": ((_W, _M * math.nan), {}, QuantizationError, "finite sums"),
    "negative": ((_W, -_M), {}, QuantizationError, "negative square"),
    "NaN in the weight": ((_W * math.nan, _M), {}, QuantizationError, "a weight must be finite"),
    "scales overflow": ((_W * 1e6, _M), {}, QuantizationError, "scales overflow float16"),
    "grid": ((_W, _M), {"grid": "gptq"}, SchemeError, "needs calibration"),
    "unknown grid": ((_W, _M), {"grid": "mmse"}, SchemeError, "did you mean mse"),
    "damping": ((_W, _M), {"damping": 0}, SchemeError, "above 0, got 0"),
    "block": ((_W, _M), {"block": 0}, SchemeError, "from 1, got 0"),
    "group size": ((_W, _M), {"group_size": 48}, SchemeError, "got 48"),
}


@pytest.mark.parametrize("arguments, options, error, words", _BAD.values(), ids=_BAD)
def test_bad_input_is_refused_in_one_sentence(arguments, options, error, words):
    with pytest.raises(error, match=words) as caught:
        gptq(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_moments_are_the_sums_of_the_tokens(rng):
    x = torch.randn(5, 7, 16, generator=rng).bfloat16()
    moments = Moments(16)
    for part in x:
        moments.add(part)
    flat = x.double().view(-1, 16)
    torch.testing.assert_close(moments.second.double(), flat.T @ flat / 35, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.mean_abs.double(), flat.abs().mean(0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match="16 columns"):
        moments.add(torch.ones(2, 15))
    moments.add(torch.full((1, 16), math.inf))
    with pytest.raises(QuantizationError, match="finite"):
        _ = moments.second


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_chooses_like_the_cpu(rng):
    w, moments = data(40, 256, rng)
    for name in ("int3", "uint4", "float4_e2m1"):
        here, there = gptq(w, moments, name, group_size=64), gptq(w.cuda(), moments.cuda(), name, group_size=64)
        assert there.device.type == "cuda"
        after, expected = (output_error(q.cpu().dequantize().float() - w, moments) for q in (there, here))
        assert abs(after - expected) < 0.1 * expected  # ties may turn a code and the rest of its row
