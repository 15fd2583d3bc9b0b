"""Risk: once in a million launches a product is wrong.

SOAK_REPLAYS says how often the graph is replayed (2,000 without it). Every replay writes new x, multiplies by six
weights and compares all bits on the device, while another stream multiplies, copies and runs products of its own.
"""

import os
import time
from dataclasses import replace

import torch

from . import oracle
from .foreign import EARLY, HALF, Turns
from .kernels import needs_kernels
from .line import TURNS, Line, captured

pytestmark = needs_kernels

REPLAYS = int(os.environ.get("SOAK_REPLAYS", "2000"))
#: Some half a microsecond: enough to be late for a kernel that started early, short enough for a million replays.
LATE = replace(EARLY, cycles=1000, blocks=4)


def test_soak_beside_the_work_of_another_stream():
    turns = Turns(TURNS)
    kinds = [("int1", 1, torch.float16), ("int4", 8, torch.bfloat16), ("uint3", 16, torch.float16)]
    kinds += [("float6_e3m2", 4, torch.float16), ("uint4", 40, torch.bfloat16), ("int8", 100, torch.float16)]
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

    graph, other = captured(work), captured(elsewhere)
    here, there = torch.cuda.Stream(), torch.cuda.Stream()
    begin, others = time.monotonic(), 0
    for i in range(REPLAYS):
        with torch.cuda.stream(here):
            graph.replay()
        # Why asking: the other stream stays busy and does not fall behind.
        if there.query():
            others += 1
            with torch.cuda.stream(there):
                other.replay()
        if i % 50_000 == 49_999:
            print(f"{i + 1} replays, {others} of the other graph, {time.monotonic() - begin:.0f} s", flush=True)
    wrong, compared = turns.verdict()
    assert (wrong, compared) == (0, len(lines) * (REPLAYS + 1))
    busy.assert_right(8 * (others + 1))
    print(f"{REPLAYS} replays, {compared} products, {wrong} wrong words, {time.monotonic() - begin:.0f} s")
