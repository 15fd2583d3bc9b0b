"""Risk: a search that makes a weight worse by its own measure, or scales that data of dead channels spoil."""

import math

import pytest
import torch

from lowbit import reference
from lowbit.dtypes import WEIGHT_TYPES
from lowbit.errors import QuantizationError, SchemeError, ShapeError
from lowbit.quantizers import Moments, awq_scales, clip, quantize


def data(n, k, rng):
    """A weight, tokens [300, k] of which some channels are 30 times as large, and their moments."""
    w, x = torch.randn(n, k, generator=rng), torch.randn(300, k, generator=rng)
    x[:, ::19] *= 30
    moments = Moments(k)
    moments.add(x)
    return w, x, moments


def change(w, read, x):
    """The mean squared change of the output, from the tokens themselves, float64."""
    return float((x.double() @ (read.double() - w.double()).T).square().sum() / len(x))


@pytest.mark.parametrize("name", ["int3", "int4", "uint2", "uint4", "float4_e2m1"])
def test_scales_protect_what_large_activations_meet(name, rng):
    w, x, moments = data(32, 150, rng)
    s = awq_scales(w, moments.mean_abs, moments.second, name, group_size=64)
    assert s.shape == (150,) and s.dtype == torch.float32 and (s > 0).all()
    assert float(s[::19].min()) > float(s[1]) and math.isclose(float(s.max() * s.min()), 1, rel_tol=1e-4)
    plain = reference.dequantize(quantize(w, name, group_size=64, method="rtn"))
    scaled = reference.dequantize(quantize(w * s, name, group_size=64, method="rtn")) / s.double()
    assert change(w, scaled, x) < 0.7 * change(w, plain, x)


def test_scales_are_the_best_of_the_grid(rng):
    w, x, moments = data(16, 96, rng)
    errors = []
    for step in range(20):
        s = moments.mean_abs.double() ** (step / 20)
        s = (s / (s.max() * s.min()).sqrt()).float()
        qt = quantize(w * s, "int3", group_size=32, method="rtn", scale_dtype=torch.float32)
        errors.append((change(w, reference.dequantize(qt) / s.double(), x), s))
    found = awq_scales(w, moments.mean_abs, moments.second, "int3", group_size=32)
    torch.testing.assert_close(found, min(errors, key=lambda e: e[0])[1], rtol=1e-5, atol=0)


def test_even_activations_need_no_scales_and_dead_channels_do_no_harm(rng):
    w = torch.randn(8, 64, generator=rng)
    assert torch.equal(awq_scales(w, torch.ones(64), torch.eye(64)), torch.ones(64))
    assert torch.equal(awq_scales(w, torch.zeros(64), torch.zeros(64, 64)), torch.ones(64))
    w, _, moments = data(8, 64, rng)
    size, second = moments.mean_abs.clone(), moments.second.clone()
    size[3], second[3], second[:, 3] = 0, 0, 0
    s = awq_scales(w, size, second, "int3", group_size=32)
    assert s.isfinite().all() and (s > 0).all()


def test_layers_that_read_the_same_share_their_scales(rng):
    w, _, moments = data(16, 64, rng)
    options = {"mean_abs": moments.mean_abs, "moments": moments.second, "group_size": 32}
    together = awq_scales([w, w], dtype="int3", **options)
    assert torch.equal(together, awq_scales(w, dtype="int3", **options))
    weighty = awq_scales([w, 1e-3 * w[:4]], dtype=["int3", "int8"], **options)
    assert torch.equal(weighty, together)
    with pytest.raises(ShapeError, match="dtype must have one entry for each of 2 weights, got 1"):
        awq_scales([w, w], dtype=["int3"], **options)
    with pytest.raises(ShapeError, match=r"mean_abs must have shape \(64,\)"):
        awq_scales(w, torch.ones(3), moments.second)
    with pytest.raises(QuantizationError, match="not negative"):
        awq_scales(w, -moments.mean_abs, moments.second)
    with pytest.raises(SchemeError, match="steps"):
        awq_scales(w, moments.mean_abs, moments.second, steps=0)
    with pytest.raises(ShapeError, match="at least one"):
        awq_scales([], moments.mean_abs, moments.second)


def group_errors(w, qt, x):
    """The mean squared change of the output that each group makes alone, [N, G], float64, from the tokens."""
    lost = reference.dequantize(qt) - w.double()
    size = w.shape[1] if qt.group_size == -1 else qt.group_size
    pairs = zip(lost.split(size, 1), x.double().split(size, 1))
    return torch.stack([(part @ tokens.T).square().mean(1) for part, tokens in pairs], 1)


@pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, -1])
def test_clipping_never_costs_a_group(wtype, group_size, rng):
    w, x, moments = data(12, 75, rng)
    for zero_kind in ("zero", "min") if wtype.kind == "uint" else ("none",):
        options = {"group_size": group_size, "zero_kind": zero_kind}
        found = clip(w, moments.second, wtype, **options).validate()
        plain = quantize(w, wtype, method="rtn", **options)
        after, before = group_errors(w, found, x), group_errors(w, plain, x)
        assert (after <= before * (1 + 1e-4) + 1e-9).all()
        if wtype.bits in (2, 3):
            assert after.sum() < 0.9 * before.sum()


def test_clipping_reads_the_data_and_rows_stand_alone(rng):
    w, x, moments = data(40, 4000, rng)
    found = clip(w, moments.second, "int3", group_size=32)
    blind = quantize(w, "int3", group_size=32, method="mse")
    assert group_errors(w, found, x).sum() < 0.95 * group_errors(w, blind, x).sum()
    part = clip(w[33:35], moments.second, "int3", group_size=32)
    assert torch.equal(part.codes, found.codes[33:35]) and torch.equal(part.scales, found.scales[33:35])
