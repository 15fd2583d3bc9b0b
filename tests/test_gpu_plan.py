"""Risk: the tests of the CUDA kernels leave out a shape, a group size, a number of tokens or a kernel."""

import pytest
from gpu.kernels import FAMILIES, family, is_wide, tile, tokens
from gpu.plan import SHAPES, WAYS, cases

from generator.enumerate import rows
from lowbit.dtypes import WEIGHT_TYPES

ROWS = [
    {"name": row.name, "weight": row.weight.name, "act": row.act.name}
    for row in rows(arch="cuda")
    if row.family.name in FAMILIES and row.weight.kind != "codebook"  # tests/gpu/test_codebook.py has a plan of its own
]
TILES = sorted({(row["act"], family(row["name"]), tile(row["name"])) for row in ROWS})


@pytest.fixture(scope="module")
def plan():
    return cases(ROWS)


def test_every_kernel_is_tried_with_several_weights(plan):
    assert set(plan) == {row["name"] for row in ROWS}
    assert min(len(found) for found in plan.values()) >= 4


def test_every_way_to_group_is_tried_with_every_weight_type(plan):
    for weight in WEIGHT_TYPES:
        tried = [case for row in ROWS if row["weight"] == weight.name for case in plan[row["name"]]]
        assert {(c.group_size, c.zero_kind, c.scale_type) for c in tried} == set(WAYS)
        assert {c.shape for c in tried} == set(SHAPES)


@pytest.mark.parametrize("act, kind, variant", TILES)
def test_every_tile_meets_every_way_shape_and_number_of_tokens(plan, act, kind, variant):
    names = [row["name"] for row in ROWS if row["act"] == act]
    names = [name for name in names if (family(name), tile(name)) == (kind, variant)]
    tried = [case for name in names for case in plan[name]]
    assert {(c.group_size, c.zero_kind, c.scale_type) for c in tried} == set(WAYS)
    assert {c.shape for c in tried} == set(SHAPES)
    most, ms = tokens(names[0]), {m for c in tried for m in c.ms}
    if is_wide(names[0]):  # 8 columns of a product take 8 tokens
        assert {-(-m // 8) for m in ms} == set(range(1, most // 8 + 1)) and {m % 8 for m in ms} == set(range(8))
    else:
        assert ms == set(range(1, most + 1))


def test_plan_is_the_same_in_every_run(plan):
    assert cases(ROWS) == plan
    assert all(case.ms[-1] == tokens(name) for name, found in plan.items() for case in found)
