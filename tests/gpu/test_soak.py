"""Risk: once in a million launches a product is wrong.

SOAK_REPLAYS says how often the graph is replayed (2,000 without it). Every replay writes new x, multiplies by eight
weights and compares all bits on the device, while another stream multiplies, copies and runs products of its own.
SOAK_SECONDS (5 without it): how long products run beside those that fill the device, and beside another process, with
which they take turns.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import torch

from . import oracle
from .foreign import EARLY, HALF, Turns
from .kernels import needs_kernels
from .line import TURNS, Line, captured

pytestmark = needs_kernels

REPLAYS = int(os.environ.get("SOAK_REPLAYS", "2000"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "5"))
#: Some half a microsecond: enough to be late for a kernel that started early, short enough for a million replays.
LATE = replace(EARLY, cycles=1000, blocks=4)


#: What the other process does; it says when it begins.
WORK = """
import torch
a, x = torch.randn(2048, 2048, device="cuda").half(), torch.randn(64 << 20, device="cuda")
print("works", flush=True)
while True:
    for _ in range(20):
        a @ a, x.mul_(1)
    torch.cuda.synchronize()
"""


@contextmanager
def another_process():
    process = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "works\n", "the other process has no device"
        yield
    finally:
        process.kill()
        process.wait()


def replay(graph, other, goes_on) -> tuple[int, int]:
    """Replay two graphs on two streams while ``goes_on(replays, others)``; how often each was."""
    here, there = torch.cuda.Stream(), torch.cuda.Stream()
    replays = others = 0
    while goes_on(replays, others):
        with torch.cuda.stream(here):
            graph.replay()
        replays += 1
        # Why asking: the other stream stays busy and does not fall behind.
        if there.query():
            others += 1
            with torch.cuda.stream(there):
                other.replay()
    return replays, others


def test_soak_beside_the_work_of_another_stream():
    turns = Turns(TURNS)
    kinds = [("int1", 1, torch.float16), ("int4", 8, torch.bfloat16), ("uint3", 16, torch.float16)]
    kinds += [("float6_e3m2", 4, torch.float16), ("uint4", 40, torch.bfloat16), ("int8", 100, torch.float16)]
    kinds += [("int4", 24, torch.float16), ("int2", 64, torch.bfloat16)]  # by halves of a multiprocessor
    lines = [Line(t, (768, 1024), m, act, seed=i, turns=turns) for i, (t, m, act) in enumerate(kinds)]

    def work():
        for line in lines:
            line.write(LATE)
            line.multiply()
            line.compare(LATE)
        turns.advance(1, HALF)

    busy = Line("int8", (4096, 4096), m=16, seed=9)
    a, b = oracle.normal(1024, 1024, dtype=torch.float16), torch.empty(1024, 1024, dtype=torch.float16, device="cuda")

    def elsewhere():
        for _ in range(4):
            torch.mm(a, a, out=b)
            a.copy_(a.roll(1, 0))
            busy.rounds(LATE, LATE, count=2)

    graph, other, begin = captured(work), captured(elsewhere), time.monotonic()

    def goes_on(replays, others):
        if replays % 50_000 == 0 and replays:
            print(f"{replays} replays, {others} of the other graph, {time.monotonic() - begin:.0f} s", flush=True)
        return replays < REPLAYS

    _, others = replay(graph, other, goes_on)
    wrong, compared = turns.verdict()
    assert (wrong, compared) == (0, len(lines) * (REPLAYS + 1))
    busy.assert_right(8 * (others + 1))
    print(f"{REPLAYS} replays, {compared} products, {wrong} wrong words, {time.monotonic() - begin:.0f} s")


def test_soak_beside_another_process():
    # Found here: beside blocks that fill the device loads of n8 and n16 waited longer than the copy engine took to
    # write the next stage over what they were to read.
    large = Line("int8", (768, 4096), m=100, seed=1)
    kinds = [("int8", 1), ("int8", 16), ("int4", 1), ("int4", 8), ("uint4", 16)]
    lines = [Line(dtype, (4096, 4096), m, seed=i) for i, (dtype, m) in enumerate(kinds)]

    def work():
        for line in lines:
            line.rounds(LATE, LATE, count=2)

    graph, other = captured(lambda: large.rounds(LATE, HALF, count=2)), captured(work)
    with another_process():
        end = time.monotonic() + SECONDS
        replays, others = replay(graph, other, lambda *_: time.monotonic() < end)
        torch.cuda.synchronize()
    large.assert_right(2 * (replays + 1))
    for line in lines:
        line.assert_right(2 * (others + 1))
    print(f"{2 * len(lines) * others} products beside {2 * replays} larger ones and another process")
