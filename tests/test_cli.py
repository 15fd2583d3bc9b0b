"""Risk: a command exits with the wrong code, prints a traceback, or passes a kernel that is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import extension, kernel_list, libraries
from lowbit.checkpoint.safetensors_file import write
from lowbit.cli import COMMANDS, main
from lowbit.commands import selftest as module
from lowbit.commands import selftest_cuda
from lowbit.commands.info import _cuda_kernels as cuda_kernels

ROOT = Path(lowbit.__file__).parents[1]
#: What a command cannot do without.
NEEDED = {
    "convert": ("SRC", "DST"),
    "export": ("SRC", "DST"),
    "eval": ("byte_llama",),
    "quantize": ("src", "dst"),
    "tune": ("src",),
}


def command(*arguments, **variables):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "lowbit", *arguments], env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0 and f"lowbit {name}" in capsys.readouterr().out


def test_help_and_version_do_not_load_torch():
    code = "import sys; from lowbit.cli import main\ntry: main([{!r}])\nfinally: assert 'torch' not in sys.modules"
    for flag, words in (("--help", "selftest"), ("--version", f"lowbit {lowbit.__version__}")):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code.format(flag)], env=env, capture_output=True, text=True)
        assert done.returncode == 0 and words in done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "required: COMMAND"),
        (["sefltest"], "invalid choice: 'sefltest'"),
        (["info", "--loud"], "unrecognized arguments: --loud"),
        (["selftest", "--only"], "expected one argument"),
    ],
)
def test_bad_arguments_exit_with_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_bad_input_is_one_sentence_and_exit_code_2():
    done = command("selftest", "--only", "w9*")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("lowbit selftest: no kernel's name matches 'w9*'") and done.stderr.count("\n") == 1
    for name in COMMANDS:
        done = command(name, *NEEDED.get(name, ()), LOWBIT_FORCE_ISA="neon")
        assert done.returncode == 2 and "LOWBIT_FORCE_ISA" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "source, words",
    [
        ("float", "quantizing a checkpoint needs transformers, which is not installed"),
        ("quantized", "is already quantized"),
    ],
)
def test_quantize_without_transformers_says_what_is_in_the_way(source, words, tmp_path):
    config = {"architectures": ["X"]} | ({"quantization_config": {"quant_method": "fp8"}} if source != "float" else {})
    (src := tmp_path / "src").mkdir()
    (src / "config.json").write_text(json.dumps(config))
    write(src / "model.safetensors", {"x.weight": torch.ones(2, 32)}, {})
    code = "import sys; sys.modules['transformers'] = None; from lowbit.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["quantize", str(src), str(tmp_path / "q")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_output_that_nobody_reads_ends_without_a_traceback():
    read, write_end = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "lowbit", "info"]
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_info_names_what_runs(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for fact in (lowbit.__version__, torch.__version__, str(libraries.LIBRARY), *extension.isas()):
        assert fact in text
    pw = lowbit.pack_weight(lowbit.quantize(torch.ones(64, 128), "uint3"))
    facts = lowbit.info(pw)
    assert facts["in use"] == extension.isa() and facts["kernels"] == len(kernel_list.kernel_rows())
    assert facts["kernel for x bfloat16"] == kernel_list.kernel_name("uint3", "bfloat16")
    assert facts["kernel for act='int8'"].startswith("wu3a8_cpu_") and facts["bits per weight"] == "3.25"
    with extension.force_isa("scalar"):
        assert lowbit.info(pw)["kernel for x float32"] == "wu3a32_cpu_scalar"
    with pytest.raises(lowbit.DtypeError, match="expected a PackedWeight, got int"):
        lowbit.info(3)


def test_selftest_passes_and_says_how_much_it_did(capsys):
    before = extension.isa()
    assert main(["selftest", "--only", "w*3a*"]) == 0
    seen = capsys.readouterr()
    here = [name for name in kernel_list.kernel_rows() if name.split("_")[-1] in extension.isas()]
    wanted = [name for name in here if "3a" in name]
    assert f"{len(wanted)} kernels right, 0 wrong" in seen.out and extension.isa() == before
    summary = lowbit.selftest("w4a32_cpu_scalar")
    assert summary and (summary.passed, summary.failures) == (1, [])


def test_selftest_finds_a_kernel_that_is_wrong(monkeypatch, capsys):
    right = module.matmul

    def wrong(x, pw, bias, act):
        y = right(x, pw, bias, act=act)
        if act == "int8" and extension.isa() == "scalar":
            y[-1, -1] += y.norm() / 100  # one value of the last row
        return y

    monkeypatch.setattr(module, "matmul", wrong)
    assert main(["selftest", "--only", "w2a*_cpu_scalar"]) == 1
    seen = capsys.readouterr()
    assert "3 kernels right, 1 wrong" in seen.err and "w2a8_cpu_scalar: expected an error of at most" in seen.err
    monkeypatch.setattr(module, "matmul", lambda x, pw, bias, act: right(x, pw, bias, act=act) * float("nan"))
    assert not lowbit.selftest("w2a32_cpu_scalar")


def test_selftest_says_why_no_cuda_kernel_was_tried(monkeypatch):
    row = {"name": "w4a16_decode_n1", "family": "decode", "weight": "int4", "act": "float16", "tokens": 1}
    scalar = [row for row in kernel_list.manifest("cpu") if row["name"] == "w4a32_cpu_scalar"]
    monkeypatch.setattr(kernel_list, "manifest", lambda family=None: [row, *scalar])
    monkeypatch.setattr(extension, "_cuda", "torch sees no CUDA device")
    summary = lowbit.selftest("w4a*")
    assert summary and summary.passed == 1
    assert str(summary).splitlines()[1] == "no CUDA kernel was tried: torch sees no CUDA device"
    assert "CUDA" not in str(lowbit.selftest("*_cpu_*"))


def test_selftest_counts_cuda_kernels_right_and_wrong(monkeypatch):
    rows = [tile("decode", tokens, "80") for tokens in (1, 2)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(kernel_list, "manifest", lambda family=None: rows)
    monkeypatch.setattr(selftest_cuda, "why_not_here", lambda: None)
    monkeypatch.setattr(selftest_cuda, "check", lambda rows: zip(rows, (None, "got 2"), strict=True))
    summary = lowbit.selftest()
    assert (summary.passed, summary.failures, summary.without_cuda) == (1, ["w4a16_decode_n2: got 2"], "")


def tile(family: str, tokens: int, *archs: str) -> dict:
    name = f"w4a16_{family}_n{tokens}"
    return {"name": name, "family": family, "weight": "int4", "act": "float16", "tokens": tokens, "archs": archs}


TILES = [
    tile("decode", 4, "80", "90a", "100", "120"),
    tile("gemm_sm80", 64, "80", "100", "120"),
    *(tile("gemm_sm90", tokens, "90a", "100") for tokens in (8, 16)),
    tile("gemm_sm90", 32, "90a"),
]


@pytest.mark.parametrize("capability, count", [((8, 0), 2), ((9, 0), 5), ((10, 0), 4), ((12, 0), 2)])
def test_selftest_leaves_out_kernels_for_another_gpu(monkeypatch, capability, count):
    monkeypatch.setattr(kernel_list, "manifest", lambda family=None: TILES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(selftest_cuda, "why_not_here", lambda: None)
    monkeypatch.setattr(selftest_cuda, "check", lambda rows: [(row, None) for row in rows])
    summary = lowbit.selftest()
    assert (summary.passed, summary.not_usable) == (count, 5 - count)
    assert count == 5 or f"({5 - count} kernels need another processor)" in str(summary)


def test_info_names_the_tiles_that_a_gpu_runs(monkeypatch):
    dequant = {"name": "w4a16_dequant_rows", "family": "dequant", "archs": ("80", "90a", "100", "120")}
    rows = [*TILES, dequant | {"weight": "int4", "act": "float16"}]
    monkeypatch.setattr(kernel_list, "manifest", lambda family=None: rows)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))

    def up_to(family, rows):
        return f"{family} in tiles of up to {rows} rows of x"

    for device, scale_type, expected in (
        ("cuda", "float16", f"{up_to('decode', 4)}, {up_to('gemm_sm80', 64)}, {up_to('gemm_sm90', 16)}, dequant"),
        ("cpu", "float16", f"{up_to('decode', 4)}, {up_to('gemm_sm80', 64)}, {up_to('gemm_sm90', 32)}, dequant"),
        ("cuda", "float32", f"{up_to('gemm_sm90', 16)}, dequant"),
    ):
        scheme = lowbit.scheme.Scheme.make("int4", scale_type=scale_type)
        assert cuda_kernels(scheme, "float16", torch.device(device)) == expected
    assert cuda_kernels(scheme, "float32", torch.device("cpu")) == ""
