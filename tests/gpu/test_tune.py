"""Risk: what lowbit.tune measured does not reach products, later processes or other threads, or makes them wrong."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import cuda_devices, extension
from lowbit.autotune import cache, log, tuned
from lowbit.autotune.plan import candidates, device_of
from lowbit.autotune.problem import Problem, span_of, spans_of
from lowbit.autotune.tuner import winner, worth_timing

from . import oracle
from .kernels import kernels_launched, needs_kernels, ran
from .products import assert_right, row_of

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="the kernels that these tests choose between are for compute capability 9.0",
    ),
]

ROOT = Path(lowbit.__file__).parents[1]
SHAPE = (512, 1024)
INT4 = Problem("int4", "float16", *SHAPE, 128, "none")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """No times of others, and none left for the tests after it."""
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    cuda_devices.cuda_kernels(0)
    tuned.forget()
    yield tmp_path
    tuned.forget()


@pytest.fixture
def seen():
    """(kernel, why, thread) of every product that is launched."""
    found = []

    def note(pointer):
        product = pointer.contents
        found.append((product.kernel.decode(), product.why.decode(), threading.get_ident()))

    library, watcher = extension.cuda(), log._WATCHER(note)
    library.lowbit_cuda_watch(watcher)
    yield found
    library.lowbit_cuda_watch(None)


def weight():
    return oracle.make("int4", SHAPE)


def x_of(m: int, k: int = SHAPE[1]) -> torch.Tensor:
    return oracle.normal(m, k, dtype=torch.float16, seed=m)


def use(name: str, least: int, most: int, problem: Problem = INT4) -> None:
    tuned.use(device_of(0), {problem: {(least, most): {name: 1.0}}})


@pytest.mark.parametrize(
    "m, tiles",
    [(3, (16, 32)), (5, (32, 16)), (20, (96, 64)), (64, (48, 32)), (100, (256, 96)), (700, (64, 128))],
)
def test_the_tuned_kernel_runs_and_is_right(seen, m, tiles):
    one, x = weight(), x_of(m)
    lowbit.matmul(x, one.pw)
    planned, source = seen[-1][:2]
    assert source == "plan"
    names = [row_of("int4", torch.float16, "gemm_sm90", tokens)["name"] for tokens in tiles]
    name = next(n for n in names if n != planned)
    use(name, m, m)
    launched = kernels_launched(lambda: lowbit.matmul(x, one.pw))
    assert ran(launched, name), launched
    assert seen[-1][:2] == (name, "tuned")
    assert_right(x, one)
    lowbit.matmul(x_of(m + 1), one.pw)
    assert seen[-1][1] == "plan", "other rows go by the plan"


def test_what_is_forced_and_batch_invariance_come_before(seen):
    name = row_of("int4", torch.float16, "gemm_sm90", 96)["name"]
    forced = row_of("int4", torch.float16, "gemm_sm90", 128)["name"]
    one, x = weight(), x_of(20)
    use(name, 17, 32)
    with extension.force_cuda_kernel(forced):
        lowbit.matmul(x, one.pw)
    assert seen[-1][:2] == (forced, "forced")
    with extension.batch_invariant():
        lowbit.matmul(x, one.pw)
    assert seen[-1][1] == "batch-invariant"
    lowbit.matmul(x, one.pw)
    assert seen[-1][:2] == (name, "tuned")


def test_a_kernel_that_refuses_leaves_the_product_to_the_plan(seen):
    """Family decode keeps x in shared memory, which 4 rows of so many k don't fit into."""
    name, shape = row_of("int4", torch.float16, "decode", 4)["name"], (32, 400_000)
    one = oracle.make("int4", shape)
    use(name, 3, 4, Problem("int4", "float16", *shape, 128, "none"))
    x = x_of(4, shape[1])
    y, exact = lowbit.matmul(x, one.pw).double(), x.double() @ one.exact.T
    assert (y - exact).norm() < 1e-3 * exact.norm()
    assert seen[-1][1] in ("plan", "parts") and seen[-1][0] != name, seen[-1]


@pytest.mark.parametrize("dtype, zeros", [("int4", "none"), ("uint3", "zero"), ("float6_e3m2", "none")])
@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16], ids=str)
def test_tuned_products_are_right(seen, dtype, zeros, act):
    one, ms = oracle.make(dtype, (1000, 2048), 128, zeros), (1, 4, 8, 16, 20, 48, 64, 100, 200, 300)
    found = lowbit.tune(one.pw, ms=ms, act=str(act).removeprefix("torch."), seconds=5, save=False)
    ((problem, spans),) = found.items()
    assert set(spans) <= set(spans_of(ms)) and len(spans) >= 3, spans
    for m in ms:
        x = oracle.normal(m, 2048, dtype=act, seed=m)
        assert_right(x, one)
        lowbit.matmul(x, one.pw)
        assert seen[-1][1] == ("tuned" if span_of(m) in spans else "plan")
        if span_of(m) in spans:
            assert seen[-1][0] == winner(spans[span_of(m)])
    assert {why for _, why, _ in seen} == {"tried", "tuned", "plan"} or len(spans) == len(spans_of(ms))


def shared_with_others(pw: lowbit.PackedWeight) -> bool:
    """Whether other processes use this GPU too: 100 products take longer than 100 times the fastest one."""
    x, times = oracle.normal(2048, pw.shape[1], dtype=torch.float16), []
    for _ in range(100):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        lowbit.matmul(x, pw)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sum(times) > 1.5 * len(times) * min(times)


def test_the_time_that_tuning_may_take_is_enough_for_a_large_weight():
    """For all ranges of rows of x; the first call also loads kernels, which is done once in a process."""
    pw = oracle.make("int4", (8192, 8192)).pw
    lowbit.tune(pw, seconds=30, save=False)
    if shared_with_others(pw):
        pytest.skip("other processes use this GPU, and take some of the time")
    found = lowbit.tune(pw, save=False, again=True)
    device, problem = device_of(0), Problem("int4", "float16", 8192, 8192, 128, "none")
    plans = (candidates(problem.scheme, "float16", most, 8192, 8192, device) for _, most in spans_of(None))
    wanted = sum(len(worth_timing(plan)) > 1 for plan in plans)
    enough = len(found[problem]) >= 0.8 * wanted
    if not enough and shared_with_others(pw):
        pytest.skip("other processes have begun to use this GPU")
    assert enough, f"{len(found[problem])} of {wanted} ranges"


def test_what_was_measured_is_shown_and_each_layer_is_tuned_once(folder):
    layers = [lowbit.Linear.from_linear(torch.nn.Linear(1024, 512, bias=False).half(), "int4") for _ in range(2)]
    model, steps = torch.nn.Sequential(layers[0], torch.nn.Linear(512, 1024), layers[1]).cuda(), []
    found = lowbit.tune(model, ms=[20, 256], seconds=5, progress=lambda *step: steps.append(step))
    assert list(found) == [INT4] and steps == [(1, 1, str(INT4))]
    assert found.file.parent == folder and cache.of_machine(tuned.machine_of(0)) == {
        INT4: {span: {name: round(us, 2) for name, us in times.items()} for span, times in found[INT4].items()}
    }
    span, times = next(iter(found[INT4].items()))
    table = lowbit.info(weight().pw)["plan for x float16"]
    shown = tuned.candidates(INT4.scheme, "float16", span[1], *SHAPE, device_of(0))
    assert shown[0].name == winner(times) and shown[0].measured == times[shown[0].name]
    assert "measured" in str(table) and "by times of this machine" in lowbit.info()["tuned"]
    assert lowbit.tune(model, ms=[20, 256]) == {}, "what is known is not measured again"


CODE = """
import ctypes, torch, lowbit
from lowbit import extension
from lowbit.autotune import log
torch.manual_seed(0)
qt = lowbit.quantize(torch.randn({n}, {k}).half(), "int4", method="rtn")
pw = lowbit.pack_weight(qt, "cuda")
seen = []
watcher = log._WATCHER(lambda p: seen.append((p.contents.kernel.decode(), p.contents.why.decode())))
extension.cuda().lowbit_cuda_watch(watcher)
x = torch.randn(20, {k}, device="cuda").half()
y = lowbit.matmul(x, pw)
exact = x.double() @ qt.dequantize(torch.float32).double().cuda().T
print(*seen[-1], float((y - exact).norm() / exact.norm()) < 5e-4)
"""


def process(folder, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOWBIT_")}
    environment |= {"PYTHONPATH": str(ROOT), "LOWBIT_CACHE": str(folder)} | variables
    command = [sys.executable, "-c", CODE.format(n=SHAPE[0], k=SHAPE[1])]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_a_new_process_uses_the_file_and_survives_a_damaged_one(folder):
    name = row_of("int4", torch.float16, "gemm_sm90", 128)["name"]
    path = cache.add(tuned.machine_of(0), {INT4: {(17, 32): {name: 1.0}}})
    assert process(folder).stdout.split() == [name, "tuned", "True"]
    without = process(folder, LOWBIT_TUNED="0").stdout.split()
    assert without[1:] == ["plan", "True"] and without[0] != name
    path.write_text(path.read_text()[:-9])
    done = process(folder)
    assert done.stdout.split() == without and done.stderr.count("are ignored") == 1, done.stderr


def test_other_threads_multiply_while_one_tunes(seen):
    """They are never given a kernel that is only tried, and y stays right."""
    one, x, done, wrong = weight(), x_of(20), threading.Event(), []

    def multiply():
        try:
            while not done.is_set():
                for _ in range(50):
                    y = lowbit.matmul(x, one.pw)
                assert_right(x, one, y=y)
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        found = lowbit.tune(one.pw, ms=range(1, 500), seconds=5, save=False)
    finally:
        done.set()
        thread.join()
    assert not wrong, wrong
    mine = {why for _, why, where in seen if where != threading.get_ident()}
    assert mine and mine <= {"plan", "tuned"} and len(found[INT4]) > 5


def test_nothing_is_timed_while_a_graph_is_captured():
    pw, x, graph = weight().pw, x_of(1), torch.cuda.CUDAGraph()
    lowbit.matmul(x, pw)
    with torch.cuda.graph(graph):
        y = lowbit.matmul(x, pw)
        with pytest.raises(lowbit.DeviceError, match="tune before the capture"):
            lowbit.tune(pw)
    graph.replay()
    assert torch.equal(y, lowbit.matmul(x, pw))
