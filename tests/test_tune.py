"""Risk: lowbit.tune measures too often, for the wrong problem or not at all, or bad input costs minutes first."""

import threading

import pytest
import torch
from test_plan import H200, needs_library
from test_tuned_cache import H

import lowbit
from lowbit import cuda_devices, extension, tuning
from lowbit.autotune import cache, tuned
from lowbit.autotune.problem import Problem
from lowbit.cli import main

pytestmark = needs_library


class Timer:
    """A GPU on which gemm_sm90_n64 is always the fastest, then what has fewer tokens; keeps what it was asked."""

    made = []

    def __init__(self, pw, act):
        self.pw, self.act, self.asked = pw, act, []
        self.made.append(self)

    def __call__(self, kernel, m):
        self.asked.append((kernel, m))
        tokens = int(kernel.rpartition("n")[2])
        return lambda: 1.0 if tokens == 64 else 2.0 + tokens


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    """As if weights of layout "nvidia", which are on the CPU here, were on an H200."""
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Timer, "made", [])
    monkeypatch.setattr(tuning, "GraphTimer", Timer)
    monkeypatch.setattr(tuning, "device_of", lambda index: H200)
    monkeypatch.setattr(tuned, "machine_of", lambda index: H)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: H.device)
    monkeypatch.setattr(cuda_devices, "cuda_kernels", lambda index: True)
    tuned.forget()
    yield
    tuned.forget()


def packed(dtype="int4", shape=(1024, 512), **options):
    pw = lowbit.pack_weight(lowbit.quantize(torch.ones(shape).half(), dtype, **options), layout="nvidia")
    pw.native = True
    return pw


def layer(dtype="int4", shape=(1024, 512), kind=torch.float16, **options):
    linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=kind)
    made = lowbit.Linear.from_linear(linear, dtype, prepare=False, **options)
    with torch.no_grad():
        pw = lowbit.pack_weight(made.quant_tensor(), layout="nvidia")
        made._hold(pw.codes, pw.scales, pw.zeros, pw.perm, pw.codebook, None, layout="nvidia")
    return made


def test_a_weight_is_tuned_kept_and_not_measured_again(capsys):
    pw, seen = packed(), []
    found = lowbit.tune(pw, ms=[40, 64, 20], progress=lambda *step: seen.append(step))
    problem = Problem("int4", "float16", 1024, 512, 128, "none")
    assert list(found) == [problem] and list(found[problem]) == [(17, 32), (33, 48), (49, 64)]
    assert found[problem][49, 64]["w4a16_gemm_sm90_n64"] == 1.0
    assert seen == [(1, 1, str(problem))] and {m for _, m in Timer.made[0].asked} == {32, 48, 64}
    assert found.file == cache.folder() / H.file and cache.of_machine(H) == dict(found)
    kernels = [tuned.candidates(problem.scheme, "float16", m, 1024, 512, H200)[0].name[-3:] for m in (20, 60)]
    assert kernels == [
        ("n64" if "w4a16_gemm_sm90_n64" in times else "n32") for times in list(found[problem].values())[::2]
    ]
    assert lowbit.tune(pw, ms=64) == {} and len(Timer.made) == 1
    assert list(lowbit.tune(pw, ms=[64, 96])[problem]) == [(65, 96)]
    assert list(lowbit.tune(pw, ms=64, again=True, save=False)[problem]) == [(49, 64)]
    text = str(found)
    assert f"{problem}: 3 ranges" in text and "49 to 64  w4a16_gemm_sm90_n64 1.0 us; " in text


def test_times_of_another_process_are_not_measured_again():
    pw = packed()
    found = lowbit.tune(pw, ms=64)
    tuned.forget()
    tuned.use(H200, cache.of_machine(H))
    assert lowbit.tune(pw, ms=64) == {} and len(Timer.made) == 1 and found


def test_what_is_not_saved_leaves_no_file():
    found = lowbit.tune(packed(), ms=64, save=False)
    assert found and found.file is None and not cache.folder().exists()


def test_each_shape_and_type_of_a_model_is_tuned_once():
    model = torch.nn.ModuleDict({
        "a": layer(), "b": layer(), "c": layer(shape=(512, 1024)), "d": layer("uint4"),
        "e": layer(kind=torch.bfloat16), "f": layer(kind=torch.float32), "g": layer(group_size=64),
        "plain": torch.nn.Linear(8, 8), "host": lowbit.Linear.from_linear(torch.nn.Linear(64, 64), "int4"),
    })  # fmt: skip
    steps = []
    found = lowbit.tune(model, ms=64, progress=lambda *step: steps.append(step[:2]))
    assert [str(problem) for problem in found] == [
        "int4 x float16, 1024x512, group 128",
        "int4 x float16, 512x1024, group 128",
        "uint4 x float16, 1024x512, group 128, zeros whole",
        "int4 x bfloat16, 1024x512, group 128",
        "int4 x float16, 1024x512, group 64",
    ]
    assert steps == [(done, 5) for done in range(1, 6)]
    assert [timer.act for timer in Timer.made] == ["float16"] * 3 + ["bfloat16", "float16"]
    assert all(isinstance(timer.pw, lowbit.PackedWeight) and timer.pw.layout == "nvidia" for timer in Timer.made)
    assert Timer.made[2].pw.numbers[-1] == 3, "whole zeros are those of the weight"
    assert [p.act for p in lowbit.tune(model["a"], ms=64, act="bfloat16", save=False, again=True)] == ["bfloat16"]


def test_fused_layers_are_tuned_as_the_one_that_they_are():
    from lowbit.fused import Fused

    parts = [
        lowbit.Linear.from_linear(torch.nn.Linear(256, n, dtype=torch.float16), "int4", prepare=False)
        for n in (64, 192)
    ]
    holder = torch.nn.Module()
    holder.q, holder.k = parts
    holder.fused = Fused.of(parts)
    whole = holder.fused.whole
    with torch.no_grad():
        pw = lowbit.pack_weight(whole.quant_tensor(), layout="nvidia")
        whole._hold(pw.codes, pw.scales, pw.zeros, None, None, None, layout="nvidia")
    for module in (holder, holder.q):
        problems = [problem for problem, _, _ in tuning.distinct(module)]
        assert [(p.n, p.k) for p in problems] == [(256, 256)]


def test_scales_that_a_tool_has_widened_get_their_type_back():
    made = layer()
    made.scales.data = made.scales.data.float()
    ((_, _, make),) = tuning.distinct(made)
    assert make().scales.dtype == torch.float16


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: lowbit.tune("int4"), lowbit.DtypeError, "a PackedWeight, a lowbit.Linear or a module, got str"),
        (lambda: lowbit.tune(packed(), ms=[0]), lowbit.ShapeError, "numbers of rows of x, whole and at least 1, got 0"),
        (lambda: lowbit.tune(packed(), act="int8"), lowbit.SchemeError, "act must be None or 'float16' or 'bfloat16'"),
        (lambda: lowbit.tune(packed(), seconds=0), lowbit.SchemeError, "seconds to be a number above 0, got 0"),
        (
            lambda: lowbit.tune(lowbit.pack_weight(lowbit.quantize(torch.ones(64, 64), "int4"))),
            lowbit.DeviceError,
            "packed for a CUDA device.*got PackedWeight.*'cpu'",
        ),
        (lambda: lowbit.tune(torch.nn.Linear(8, 8)), lowbit.DeviceError, "got a Linear with 0 layers of lowbit"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert Timer.made == []


def test_one_thread_at_a_time_measures(monkeypatch):
    inside, most = [], []

    def slow(self, kernel, m):
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.01)
        inside.pop()
        return lambda: 1.0

    monkeypatch.setattr(Timer, "__call__", slow)
    weights = [packed(shape=(64 * i, 1024)) for i in range(1, 5)]
    threads = [threading.Thread(target=lowbit.tune, args=(pw, 64)) for pw in weights]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Timer.made) == 4 and set(most) == {1} and len(cache.of_machine(H)) == 4


def test_a_forced_kernel_is_not_tuned_past(monkeypatch):
    monkeypatch.setattr(extension, "_cuda", extension.cuda_library())
    monkeypatch.setattr(extension, "_forced", b"w4a16_decode_n1")
    with pytest.raises(lowbit.SchemeError, match="w4a16_decode_n1 is forced"):
        with extension.try_cuda_kernel("w4a16_decode_n2"):
            pass
    monkeypatch.setattr(extension, "_forced", None)
    with pytest.raises(lowbit.SchemeError, match="no kernel for products on CUDA of this build is called 'w4'"):
        with extension.try_cuda_kernel("w4"):
            pass
    with extension.try_cuda_kernel("w4a16_decode_n2"):
        pass


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ms", "1,a"], "expected whole numbers, --ms 1,16,256, got '1,a'"),
        (["--ms", "0"], "at least 1, got 0"),
        (["--device", "cpu"], "expected --device to be cuda, or cuda:0 and so on, got 'cpu'"),
        ([], "there is none that lowbit's kernels run on: no GPU"),
    ],
)
def test_the_command_says_what_is_wrong_before_it_loads_a_model(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(cuda_devices, "why_no_cuda", lambda index: "no GPU")
    monkeypatch.setattr(lowbit, "from_pretrained", None, raising=False)
    assert main(["tune", "folder", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_the_command_tunes_a_model_and_says_where_it_is_kept(monkeypatch, capsys):
    model = torch.nn.ModuleDict({"a": layer(), "b": layer(shape=(512, 1024))})
    model.to = lambda device: model
    monkeypatch.setattr(lowbit, "from_pretrained", {"folder": model}.__getitem__, raising=False)
    monkeypatch.setattr(cuda_devices, "why_no_cuda", lambda index: None)
    assert main(["tune", "folder", "--ms", "20,64"]) == 0
    out, err = capsys.readouterr()
    assert "int4 x float16, 512x1024, group 128: 2 ranges" in out and f"kept in {cache.folder() / H.file}" in out
    assert "  0%  loading" in err
    assert main(["tune", "folder", "--ms", "20,64"]) == 0
    assert "nothing is left to measure" in capsys.readouterr().out
