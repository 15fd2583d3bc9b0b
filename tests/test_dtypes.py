"""Risk: a code that means another number than the format says, or an id that moves under compiled kernels."""

import math

import pytest
import torch

from lowbit import reference
from lowbit.dtypes import ACT_TYPES, WEIGHT_TYPES, WeightType, act_type, weight_id, weight_type
from lowbit.errors import DtypeError, SchemeError
from lowbit.scheme import GROUP_SIZES, SCALE_TYPES, WHOLE_ROW, ZERO_KINDS, Scheme, why_not

every_type = pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)


@every_type
def test_values_are_those_of_the_definition(wtype):
    defined = reference.decode(torch.arange(1 << wtype.bits, dtype=torch.uint8), wtype)
    listed = torch.tensor(wtype.values, dtype=torch.float64)
    assert torch.equal(defined.signbit(), listed.signbit())
    torch.testing.assert_close(listed, defined, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name, positive",
    [
        ("float3_e1m1", [0, 1, 2, 3]),
        ("float4_e2m1", [0, 0.5, 1, 1.5, 2, 3, 4, 6]),
        ("float5_e3m1", [0, 0.125, 0.25, 0.375, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24]),
    ],
)
def test_small_floats_written_out(name, positive):
    assert weight_type(name).values == tuple(positive) + tuple(-v for v in positive)


@pytest.mark.parametrize("name, largest", [("float6_e2m3", 7.5), ("float6_e3m2", 28), ("float8_e5m2", 57344)])
def test_largest_values_written_out(name, largest):
    assert weight_type(name).max_value == largest


@pytest.mark.parametrize(
    "name, dtype", [("float8_e4m3", torch.float8_e4m3fn), ("float8_e5m2", torch.float8_e5m2)], ids=str
)
def test_8_bit_floats_are_torchs(name, dtype):
    theirs = torch.arange(256, dtype=torch.uint8).view(dtype).double().tolist()
    for code, (mine, other) in enumerate(zip(weight_type(name).values, theirs, strict=True)):
        same = mine == other and math.copysign(1, mine) == math.copysign(1, other)
        assert same or (mine != mine and other != other), code


@every_type
def test_invalid_codes_are_exactly_those_without_a_finite_value(wtype):
    assert set(wtype.invalid_codes) == {c for c in range(1 << wtype.bits) if not math.isfinite(wtype.values[c])}
    assert len(wtype.invalid_codes) == {"float8_e4m3": 2, "float8_e5m2": 8}.get(wtype.name, 0)


def test_integers_written_out():
    assert weight_type("int1").values == (-1, 1)
    assert weight_type("int3").values == (-4, -3, -2, -1, 0, 1, 2, 3)
    assert weight_type("uint2").values == (0, 1, 2, 3)


@every_type
def test_planes_hold_every_bit_once(wtype):
    assert sum(wtype.planes) == wtype.bits
    assert list(wtype.planes) == sorted(set(wtype.planes), reverse=True)


@every_type
def test_byte_form_is_exact_and_fits_a_byte(wtype):
    if wtype.byte_form is None:
        assert wtype.exponent >= 3  # from there on the range is more than 255 of the smallest steps
        return
    shift, offset = wtype.byte_form
    numbers = [v * 2**shift + offset for v in wtype.values]
    assert all(n == int(n) and 0 <= n <= 255 for n in numbers)


def test_ids_never_move():
    """Ids stand in compiled kernels and files name types: append to this list, never change it."""
    names = [f"int{b}" for b in range(1, 9)] + [f"uint{b}" for b in range(1, 9)]
    names += "float3_e1m1 float4_e2m1 float5_e2m2 float5_e3m1 float6_e2m3".split()
    names += "float6_e3m2 float7_e3m3 float7_e4m2 float8_e4m3 float8_e5m2".split()
    assert [t.name for t in WEIGHT_TYPES][: len(names)] == names
    assert [weight_id(weight_type(name)) for name in names] == list(range(len(names)))
    assert [a.name for a in ACT_TYPES][:4] == ["float32", "float16", "bfloat16", "int8"]
    assert ZERO_KINDS[:3] == ("none", "zero", "min") and SCALE_TYPES[:3] == ("float16", "bfloat16", "float32")


def test_unknown_names_are_answered_with_near_ones():
    with pytest.raises(SchemeError, match="'itn4'.*int4"):
        weight_type("itn4")
    with pytest.raises(SchemeError, match="'float61'.*float16"):
        act_type("float61")
    with pytest.raises(DtypeError, match="got int"):
        weight_type(4)
    assert isinstance(weight_type(WEIGHT_TYPES[0]), WeightType)


@pytest.mark.parametrize("size", [0, -2, 1, 100, 512, 128.0, True, "128"])
def test_group_sizes_outside_the_list_are_refused(size):
    with pytest.raises(SchemeError, match="group_size"):
        Scheme.make("int4", group_size=size)


def test_scheme_defaults_and_groups():
    assert Scheme.make("uint4").zero_kind == "zero" and Scheme.make("int4").zero_kind == "none"
    assert Scheme.make("int4", 128).groups(129) == 2 and Scheme.make("int4", WHOLE_ROW).groups(1000) == 1
    assert all(why_not("int4", group_size=g) is None for g in GROUP_SIZES)
    with pytest.raises(SchemeError, match="scales must be one of"):
        Scheme.make("int4", scale_type="float64")
    with pytest.raises(SchemeError, match="zero_kind must be one of"):
        Scheme.make("int4", zero_kind="max")
