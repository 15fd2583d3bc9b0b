"""Risk: products of several Python threads disturb each other, or hang or crash in a child process or a new thread."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import extension

ROOT = Path(lowbit.__file__).parents[1]


def packed(kind="int3", n=256, k=512):
    torch.manual_seed(0)
    return lowbit.pack_weight(lowbit.quantize(torch.randn(n, k), kind, group_size=64, method="rtn"))


def python(code, **variables):
    """Run code in a process of its own; its output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_many_python_threads_get_the_results_of_one(two_threads):
    weights = [packed(kind) for kind in ("int3", "uint4", "float6_e3m2")]
    calls = [
        (torch.randn(m, 512).to(dtype), pw, act)
        for pw in weights
        for m in (1, 5, 64)
        for dtype, act in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8"))
    ]
    expected = [lowbit.matmul(x, pw, act=act) for x, pw, act in calls]
    barrier = threading.Barrier(8)

    def work(start):
        barrier.wait()
        for i in range(2 * len(calls)):
            i = (start + i) % len(calls)
            x, pw, act = calls[i]
            if not torch.equal(lowbit.matmul(x, pw, act=act), expected[i]):
                return i
        return None

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(0, 24, 3))) == [None] * 8


def test_number_of_threads_does_not_change_a_result(two_threads):
    pw = packed()
    for m in (1, 3, 40):
        for act in (None, "int8"):
            x = torch.randn(m, 512)
            torch.set_num_threads(1)
            alone = lowbit.matmul(x, pw, act=act)
            torch.set_num_threads(2)
            assert torch.equal(lowbit.matmul(x, pw, act=act), alone)


def test_fresh_thread_makes_the_first_call():
    code = """
import threading, torch, lowbit
torch.set_num_threads(2)
qt = lowbit.quantize(torch.ones(64, 256), "int4", method="rtn")
x, done = torch.ones(5, 256), []
threads = [threading.Thread(target=lambda: done.append(lowbit.matmul(x, lowbit.pack_weight(qt)))) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(done) == 4 and all(torch.equal(y, done[0]) for y in done); print("ok")
"""
    assert python(code) == "ok\n"


def test_other_python_threads_run_during_a_product():
    pw, x, stop, ticks = packed("int8", 2048, 2048), torch.randn(512, 2048), threading.Event(), []

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.monotonic()
    while len([t for t in ticks if t > begin]) < 3 and time.monotonic() - begin < 20:
        lowbit.matmul(x, pw)
    stop.set()
    ticker.join()
    assert len([t for t in ticks if t > begin]) >= 3


FORK = """
import os, sys, torch, lowbit
torch.set_num_threads(2)
qt = lowbit.quantize(torch.randn(512, 512), "int4", method="rtn")
pw, x = lowbit.pack_weight(qt), torch.randn(64, 512)
y = lowbit.matmul(x, pw)                     # the parent's workers exist now
pid = os.fork()
if pid == 0:
    # Why bytes: torch's own comparison of this size would hang here.
    same = lowbit.matmul(x, pw).numpy().tobytes() == y.numpy().tobytes()
    packed = lowbit.pack_weight(qt)
    same = same and packed.codes.numpy().tobytes() == pw.codes.numpy().tobytes()
    os._exit(0 if same and packed.unpack().codes.numpy().tobytes() == qt.codes.numpy().tobytes() else 3)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert torch.equal(lowbit.matmul(x, pw), y)  # the parent goes on
print("child", code)
"""


def test_forked_child_neither_hangs_nor_differs():
    assert python(FORK, OMP_NUM_THREADS="2") == "child 0\n"


def spawned(queue, layer, x):
    queue.put(layer(x).detach().numpy())


def test_layer_travels_to_a_spawned_process():
    torch.manual_seed(0)
    layer = lowbit.Linear.from_linear(torch.nn.Linear(96, 40), "uint5", group_size=32)
    context, x = multiprocessing.get_context("spawn"), torch.randn(3, 96)
    queue = context.Queue()
    process = context.Process(target=spawned, args=(queue, layer, x))
    process.start()
    y = torch.from_numpy(queue.get(timeout=60))
    process.join()
    assert torch.equal(y, layer(x).detach())


def test_library_is_loaded_once_by_many_threads():
    code = """
import threading
from lowbit import extension
found = []
threads = [threading.Thread(target=lambda: found.append(extension.load())) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(set(map(id, found))) == 1 and len(found) == 8; print("ok")
"""
    assert python(code) == "ok\n"


def test_forced_instruction_set_is_given_back():
    before = extension.isa()
    with pytest.raises(ZeroDivisionError), extension.force_isa("scalar"):
        assert extension.isa() == "scalar"
        raise ZeroDivisionError
    assert extension.isa() == before
