"""Risk: workers that share tasks leave a stage out, do one twice, or a task is added up from the wrong parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native.build import load

DEALS = st.tuples(st.integers(1, 400), st.integers(1, 70), st.integers(1, 140), st.booleans())


@pytest.fixture(scope="module")
def native():
    return load("deal_math")


NAMES = ("workers", "rounds", "left", "sharers", "in_parts", "longest", "each", "more", "meet")
#: Whether a weight is one of floats, of a codebook, fine, has whole zeros, others; how often 64 k are halved.
KINDS = [
    (0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 0, 0), (0, 0, 1, 0, 0, 2), (0, 0, 1, 0, 1, 1), (0, 1, 1, 0, 0, 0)
]  # fmt: skip
#: Clusters of 1 to 4 blocks that an H200 runs at once.
H200 = (0, 132, 66, 39, 30)


def deal(native, sizes) -> dict:
    return dict(zip(NAMES, native.deal(*sizes), strict=True))


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
    kind=st.sampled_from(KINDS),
)  # fmt: skip
def test_a_split_is_one_that_kernels_can_do(native, tiles, steps, tokens, bits, warps, blocks, fits, kind):
    """Sums meet once, in rooms for all warps, half of the row tiles in each block."""
    split = native.split_of(tiles, steps, tokens, bits, warps, (blocks, blocks // 2), 2 * fits, kind)
    rows, parts, together, early, own_warps, next_after, two_each = split
    if rows == 0:
        return  # the plan has another kernel for it
    assert own_warps == warps and 0 <= next_after <= 8 and (two_each or warps == 16 or parts * together > 1)
    if two_each:  # five of six blocks at least, eight of eleven of little work, and no sums of x (kind[4])
        assert warps == 8 and next_after == 0 and not kind[4]
        little = rows > 1 and rows * steps <= 64 and tokens == 8 and bits < 8
        least, of = (8, 11) if little else (5, 6)
        assert -(-tiles // rows) * together * of >= (blocks // 2 * 2 if together == 2 else blocks) * 2 * least
    assert rows * parts <= warps and rows >= 1 and together in (1, 2) and early >= 1
    assert parts == 1 or fits >> (parts - 1) & 1
    if together == 2:
        assert rows % 2 == 0
    if parts * together > 1 or two_each:
        most = (blocks // 2 * 2 if together == 2 else blocks) << two_each
        assert -(-tiles // rows) * together <= most


@given(tasks=st.integers(1, 400), stages=st.integers(1, 70), clusters=st.integers(0, 70), meet=st.integers(2, 4))
def test_clusters_share_what_is_left_over_of_whole_tasks(native, tasks, stages, clusters, meet):
    dealt = dict(zip(NAMES, native.deal_to_clusters(tasks, stages, clusters, meet), strict=True))
    if dealt["workers"] == 0:
        assert clusters == 0 or stages < meet or tasks % (clusters * meet) > clusters
        return
    parts = native.parts_of_clusters(tasks, stages, clusters, meet)
    found = sorted((task, at) for _, task, begin, end, _ in parts for at in range(begin, end))
    assert found == [(task, at) for task in range(tasks) for at in range(stages)]
    work, shared = {}, {}
    for worker, task, begin, end, _ in parts:
        # Sums meet once, behind all whole tasks of a block.
        assert worker not in shared, "a part is not the last one of its block"
        work[worker] = work.get(worker, 0) + end - begin
        if end - begin < stages:
            shared[worker] = task
    assert max(work.values()) == dealt["longest"] and len(work) == dealt["workers"] <= clusters * meet
    assert not dealt["in_parts"] and dealt["meet"] == meet
    for worker, task in shared.items():
        cluster = range(worker // meet * meet, worker // meet * meet + meet)
        assert [shared.get(block) for block in cluster] == [task] * meet, "a block of the cluster has another task"


@pytest.mark.parametrize(
    ("tasks", "stages", "meet"),
    [
        (64, 64, 2),  # 8192 x 8192: 32 stages
        (36, 28, 3),  # 4608 x 3584: 10 stages, not 14 by pairs, and there are no 36 clusters of 4
        (28, 112, 4),  # 3584 x 14336: 28 stages, in parts 24
        (448, 64, 1),  # 57344 x 8192: 224 stages by pairs, in parts 218
        (224, 32, 1),  # 28672 x 4096: whole tasks
        (80, 64, 1),  # 10240 x 8192: more tasks than pairs
        (32, 112, 1),  # 4096 x 14336: 38 stages by 3, in parts 28
    ],
)
def test_sums_meet_where_that_costs_no_more_than_it_saves(native, tasks, stages, meet):
    found = dict(zip(NAMES, native.best_deal(tasks, stages, H200, 4, native.kMeetSaves), strict=True))
    assert found["meet"] == meet


@given(sizes=DEALS, most_meet=st.integers(1, 4), allowance=st.integers(0, 8))
def test_the_best_deal_is_no_longer_than_allowed(native, sizes, most_meet, allowance):
    tasks, stages, blocks, _ = sizes
    plain = deal(native, (tasks, stages, blocks, True))
    clusters = (0, blocks, blocks // 2, blocks // 3, blocks // 4)
    best = dict(zip(NAMES, native.best_deal(tasks, stages, clusters, most_meet, allowance), strict=True))
    assert best["meet"] <= most_meet
    if best["meet"] == 1:
        assert best == plain
    else:
        assert plain["in_parts"] and best["workers"] > 0 and best["longest"] <= plain["longest"] + allowance


@pytest.mark.parametrize(
    ("rows", "stages", "meet"),
    [
        (64, 64, 2),  # 8192 x 8192: 32 stages, by pairs too, but those in parts
        (64, 224, 2),  # 8192 x 28672
        (56, 64, 1),  # 7168 x 8192: 32 stages, by pairs 28
        (36, 28, 3),  # 4608 x 3584: 10 stages, by pairs 8, but those in parts
        (28, 112, 1),  # 3584 x 14336: 28 stages by 4, by pairs 24
        (128, 64, 1),  # 8192 x 8192, twice as many rows of x: a whole task for each of 64 pairs
        (448, 64, 1),  # 57344 x 8192
        (80, 64, 1),  # 10240 x 8192: more tasks than clusters
    ],
)
def test_blocks_of_256_tokens_share_k_where_that_saves_a_kernel(native, rows, stages, meet):
    found = dict(zip(NAMES, native.best_deal_of_pairs(-(-rows // 2), rows, stages, H200, 4), strict=True))
    assert found["meet"] == meet


@given(rows=st.integers(1, 800), stages=st.integers(1, 120), blocks=st.integers(2, 140), most_meet=st.integers(1, 4))
def test_tasks_of_pairs_or_of_clusters_are_all_dealt_out(native, rows, stages, blocks, most_meet):
    pairs, clusters = -(-rows // 2), (0, blocks, blocks // 2, blocks // 3, blocks // 4)
    found = dict(zip(NAMES, native.best_deal_of_pairs(pairs, rows, stages, clusters, most_meet), strict=True))
    by_pairs = deal(native, (pairs, stages, blocks // 2, True))
    if found["meet"] == 1:
        assert found == by_pairs
    else:
        assert found["rounds"] * found["workers"] + found["left"] == rows and not found["in_parts"]
        most = by_pairs["longest"] + (3 if by_pairs["in_parts"] else -3)
        assert found["meet"] <= most_meet and found["workers"] <= blocks and found["longest"] < most


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
