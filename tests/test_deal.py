"""Risk: workers that share tasks leave a stage out, do one twice, or a task is added up from the wrong parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native.build import load

DEALS = st.tuples(st.integers(1, 400), st.integers(1, 70), st.integers(1, 140), st.booleans())


@pytest.fixture(scope="module")
def native():
    return load("deal_math")


def deal(native, sizes) -> dict:
    names = ("workers", "rounds", "left", "sharers", "in_parts", "longest", "each", "more")
    return dict(zip(names, native.deal(*sizes), strict=True))


@given(sizes=DEALS)
def test_every_stage_of_every_task_belongs_to_one_part(native, sizes):
    tasks, stages, _, _ = sizes
    parts = native.parts(*sizes)
    found = sorted((task, at) for _, task, begin, end, _ in parts for at in range(begin, end))
    assert found == [(task, at) for task in range(tasks) for at in range(stages)]
    assert all(begin < end for _, _, begin, end, _ in parts)


@given(sizes=DEALS)
def test_workers_are_as_many_as_may_be_and_waste_little(native, sizes):
    """Whole tasks may be longer than even shares by a quarter and six stages, others that end where tasks do
    by a twentieth and one."""
    tasks, stages, most, even = sizes
    dealt, work = deal(native, sizes), {}
    for worker, _, begin, end, _ in native.parts(*sizes):
        work[worker] = work.get(worker, 0) + end - begin
    assert sorted(work) == list(range(dealt["workers"])) and len(work) <= most
    assert [native.stages_of(*sizes, worker) for worker in work] == list(work.values())
    assert max(work.values()) == dealt["longest"]
    whole, left = dealt["rounds"] * stages, dealt["left"] * stages
    assert left < most * stages and dealt["longest"] - whole <= stages
    least = -(-left // most)
    more = least if not even else least * 1.05 + 1 if dealt["in_parts"] else least * 1.25 + 6
    assert dealt["longest"] - whole <= more


@given(sizes=DEALS)
def test_parts_of_a_task_are_found_again(native, sizes):
    """As add_parts looks for them: the first part that a worker has of the tasks left over, or its second."""
    _, stages, _, _ = sizes
    dealt, parts = deal(native, sizes), native.parts(*sizes)
    kept = {(worker, place): (task, begin) for worker, task, begin, end, place in parts if end - begin < stages}
    assert len(kept) == sum(end - begin < stages for _, _, begin, end, _ in parts), "two parts in one place"
    assert all(place in (0, 1) for _, place in kept)
    assert bool(kept) == bool(dealt["in_parts"])
    for index in range(dealt["left"]):
        begin, task = index * stages, dealt["rounds"] * dealt["workers"] + index
        first, last = (native.part_of(dealt["each"], dealt["more"], at) for at in (begin, begin + stages - 1))
        if first == last:
            continue
        places = [int(native.start(dealt["each"], dealt["more"], first) != begin)] + [0] * (last - first)
        assert [kept.pop((first + i, place))[0] for i, place in enumerate(places)] == [task] * len(places)
    assert not kept, "a part that nothing adds"


@given(all_of=st.integers(0, 2**31 - 1), by=st.integers(1, 2**31 - 1) | st.integers(1, 300))
def test_quotients_without_a_division_are_those_of_one(native, all_of, by):
    near = [at for at in (all_of // by * by - 1, all_of // by * by) if 0 <= at]
    assert [native.quotient(at, by) for at in (all_of, *near)] == [at // by for at in (all_of, *near)]


@given(tasks=st.integers(1, 400), stages=st.integers(1, 70), most=st.integers(1, 140), blocks=st.sampled_from((1, 2)))
def test_tasks_that_are_never_cut_are_whole_or_halves(native, tasks, stages, most, blocks):
    stages *= blocks
    parts = native.parts_of_whole(tasks, stages, most, blocks)
    if blocks == 2:
        half = stages // 2
        assert parts == [[2 * task + i, task, i * half, (i + 1) * half, 0] for task in range(tasks) for i in range(2)]
    else:
        assert sorted(part[1:4] for part in parts) == [[task, 0, stages] for task in range(tasks)]
        assert len({part[0] for part in parts}) == min(tasks, most)


@given(
    tiles=st.integers(1, 5000), steps=st.integers(1, 300), tokens=st.sampled_from((8, 16)), bits=st.integers(1, 8),
    warps=st.sampled_from((8, 16)), blocks=st.integers(1, 200), fits=st.integers(0, 2**16 - 1),
)  # fmt: skip
def test_a_split_is_one_that_kernels_can_do(native, tiles, steps, tokens, bits, warps, blocks, fits):
    """Sums meet once, in rooms for all warps, half of the row tiles in each block."""
    split = native.split_of(tiles, steps, tokens, bits, warps, (blocks, blocks // 2), 2 * fits)
    rows, parts, together, early, own_warps, next_after = split
    if rows == 0:
        return  # the plan has another kernel for it
    assert own_warps == warps and 0 <= next_after <= 8 and (warps == 16 or parts * together > 1)
    assert rows * parts <= warps and rows >= 1 and together in (1, 2) and early >= 1
    assert parts == 1 or fits >> (parts - 1) & 1
    if together == 2:
        assert rows % 2 == 0
    if parts * together > 1:
        assert -(-tiles // rows) * together <= blocks // 2 * 2 if together == 2 else -(-tiles // rows) <= blocks


@given(row_blocks=st.integers(1, 40), token_tiles=st.integers(1, 40))
def test_every_row_block_and_tile_of_tokens_is_a_task(native, row_blocks, token_tiles):
    spots = [tuple(native.spot_of(task, row_blocks, token_tiles)) for task in range(row_blocks * token_tiles)]
    assert sorted(spots) == [(row, tile) for row in range(row_blocks) for tile in range(token_tiles)]


def test_what_runs_at_the_same_time_reads_little(native):
    """66 workers, 64 row blocks, 64 tiles of tokens: 8 or 9 of each at a time, but 16 row blocks where a patch ends."""
    for turn in range(62):
        spots = [native.spot_of(turn * 66 + worker, 64, 64) for worker in range(66)]
        assert len({row for row, _ in spots}) <= 16 and len({tile for _, tile in spots}) <= 10


@given(each=st.integers(1, 50), more=st.integers(0, 40), at=st.integers(0, 3000))
def test_part_that_holds_a_place_begins_at_or_before_it(native, each, more, at):
    part = native.part_of(each, more, at)
    assert native.start(each, more, part) <= at < native.start(each, more, part + 1)


@pytest.mark.parametrize(
    ("sizes", "sharers", "in_parts"),
    [
        ((64, 64, 132, True), 128, True),  # two blocks a task
        ((128, 64, 66, True), 62, False),  # a whole task each, twice
        ((224, 32, 132, True), 92, False),  # a whole task each, then 92 more: 32 stages, not 23 and parts
        ((108, 28, 132, True), 108, False),  # 28 stages, not 23: 23 us, with parts 30 (4608 x 3584, M = 384)
        ((72, 64, 132, True), 132, True),  # 35 stages, not 64
        ((36, 28, 132, True), 126, True),  # 8 stages; three blocks a task would have 10
        ((108, 28, 132, False), 132, True),
    ],
)
def test_shares_end_where_tasks_do_where_that_costs_little(native, sizes, sharers, in_parts):
    found = deal(native, sizes)
    assert (found["sharers"], bool(found["in_parts"])) == (sharers, in_parts)
