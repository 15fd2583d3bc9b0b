"""Risk: blocks that share the stages of tasks leave one out, do one twice, or a task is added from the wrong parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native.build import load

SIZES = st.tuples(st.integers(1, 60), st.integers(1, 70), st.integers(1, 140)).filter(lambda s: s[2] <= s[0] * s[1])


@pytest.fixture(scope="module")
def native():
    return load("cut_math")


@given(sizes=SIZES)
def test_every_stage_of_every_task_belongs_to_one_part(native, sizes):
    tasks, stages, blocks = sizes
    parts = native.parts(tasks, stages, blocks)
    assert [at for _, _, begin, end in parts for at in range(begin, end)] == list(range(tasks * stages))
    for _, task, begin, end in parts:
        assert task * stages <= begin < end <= (task + 1) * stages


@given(sizes=SIZES)
def test_blocks_have_as_much_to_do_but_for_one_stage(native, sizes):
    tasks, stages, blocks = sizes
    work = dict.fromkeys(range(blocks), 0)
    for block, _, begin, end in native.parts(tasks, stages, blocks):
        work[block] += end - begin
    assert max(work.values()) - min(work.values()) <= 1


@given(sizes=SIZES)
def test_parts_of_a_task_are_found_again(native, sizes):
    """A part lies at block + task: no other does, and those of a task are one after the other."""
    tasks, stages, blocks = sizes
    each, more = divmod(tasks * stages, blocks)
    parts = native.parts(tasks, stages, blocks)
    assert len({block + task for block, task, _, _ in parts}) == len(parts)
    for task in range(tasks):
        first = native.part_of(each, more, task * stages)
        last = native.part_of(each, more, (task + 1) * stages - 1)
        assert [block for block, own, _, _ in parts if own == task] == list(range(first, last + 1))


@given(each=st.integers(1, 50), more=st.integers(0, 40), at=st.integers(0, 3000))
def test_part_that_holds_a_place_begins_at_or_before_it(native, each, more, at):
    part = native.part_of(each, more, at)
    assert native.start(each, more, part) <= at < native.start(each, more, part + 1)


@given(tasks=st.integers(1, 3000), stages=st.integers(1, 70), most=st.integers(1, 140))
def test_workers_are_as_many_as_may_be_and_waste_little(native, tasks, stages, most):
    """Shares that end where tasks do may be longer by a twentieth and a stage, no more."""
    all_stages = tasks * stages
    for even in (False, True):
        workers = native.workers_for(tasks, stages, most, even)
        assert 1 <= workers <= min(most, all_stages)
        longest, least = -(-all_stages // workers), -(-all_stages // most)
        assert longest <= (least * 1.05 + 1 if even else least)


def test_shares_end_where_tasks_do_where_that_costs_little(native):
    assert native.workers_for(64, 64, 132, True) == 128  # two blocks a task
    assert native.workers_for(128, 64, 66, True) == 64  # two tasks a block
    assert native.workers_for(224, 32, 132, True) == 131  # 112 of them would work 64 stages, not 55
