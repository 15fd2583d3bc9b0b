"""Risk: hqq that is worse in its own norm than what it starts from, or that stores a scale nobody can use."""

import pytest
import torch

import lowbit
from lowbit import reference
from lowbit.dtypes import WEIGHT_TYPES
from lowbit.quantizers import quantize

every_type = pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)


def norm(w, qt, p=0.7):
    """Sum of |error|^p of each group, float64."""
    error = (reference.dequantize(qt) - w.double()).abs().pow(p)
    return torch.stack([part.sum(1) for part in error.split(qt.group_size, dim=1)], dim=1)


@every_type
@pytest.mark.parametrize("power", [1, 5])
def test_no_group_is_worse_than_rtn_or_mse_in_its_norm(wtype, power, rng):
    w = (torch.randn(16, 150, generator=rng) ** power).half()
    for zero_kind in ("zero", "min") if wtype.kind == "uint" else ("none",):
        options = {"group_size": 64, "zero_kind": zero_kind}
        found = norm(w, quantize(w, wtype, method="hqq", **options).validate())
        for other in ("rtn", "mse"):
            assert (found <= norm(w, quantize(w, wtype, method=other, **options)) * (1 + 1e-4)).all()


@pytest.mark.parametrize("zero_kind", ["zero", "min"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_it_pays_where_zeros_can_move(bits, zero_kind, rng):
    w = torch.randn(32, 256, generator=rng)
    options = {"group_size": 64, "zero_kind": zero_kind}
    found, start = (norm(w, quantize(w, f"uint{bits}", method=m, **options)).sum() for m in ("hqq", "rtn"))
    assert found < 0.97 * start


def test_the_unit_of_the_weights_does_not_matter(rng):
    w = torch.randn(8, 128, generator=rng)
    for wtype in ("uint3", "int2", "float4_e2m1"):
        one, other = (quantize(w * unit, wtype, method="hqq", scale_dtype=torch.float32) for unit in (1.0, 2.0**-30))
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales * 2.0**30)


def test_zeros_of_hqq_multiply_like_any_other(rng):
    w, x = torch.randn(64, 128, generator=rng), torch.randn(5, 128, generator=rng)
    qt = quantize(w, "uint3", group_size=32, method="hqq")
    assert (qt.zeros != qt.zeros.round()).any()
    y = lowbit.matmul(x, lowbit.pack_weight(qt))
    torch.testing.assert_close(y.double(), reference.matmul(x, qt), rtol=1e-4, atol=1e-4)
