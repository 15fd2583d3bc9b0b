"""Risk: the CUDA library is built for the wrong GPUs, clashes with the CPU library, or is used where it cannot run."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowbit import cuda_devices, extension, libraries
from tools import build_graph, cuda
from tools.link_stubs import CUDA_LIBRARIES


def test_architectures_become_machine_code_and_one_ptx():
    toolkit = cuda.Cuda("nvcc", Path("/cuda"), ("80", "90a", "120"))
    assert toolkit.gencode().split() == [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
    ]
    assert toolkit.gencode(["90a"]) == "-gencode=arch=compute_90a,code=sm_90a"


@pytest.mark.parametrize(
    ("value", "archs"),
    [("80;90a", ("80", "90a")), (" 90a, 90a ;", ("90a",)), ("none", ()), ("sm_90", None), ("9.0", None), (";", None)],
)
def test_the_variable_is_read_or_refused(monkeypatch, value, archs):
    monkeypatch.setenv("LOWBIT_CUDA_ARCHS", value)
    if archs is None:
        with pytest.raises(ValueError, match="expected LOWBIT_CUDA_ARCHS to be like '80;90a' or 'none', got "):
            cuda.wanted_archs()
    else:
        assert cuda.wanted_archs() == archs


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_unset_means_the_gpus_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("LOWBIT_CUDA_ARCHS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda.wanted_archs() == ()
    tool(tmp_path, "nvidia-smi", "printf '9.0\\n7.5\\n9.0\\n8.6\\n12.0\\n'")
    assert cuda.wanted_archs() == ()  # GPUs, but no compiler
    tool(tmp_path, "nvcc", "exit 1")
    assert cuda.wanted_archs() == ("90a", "86", "120")
    tool(tmp_path, "nvidia-smi", "echo 'No devices were found'; exit 6")
    assert cuda.wanted_archs() == ()


def test_a_toolkit_that_cannot_do_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda.find(()) is None
    with pytest.raises(ValueError, match="no nvcc is on PATH"):
        cuda.find(("90a",))
    tool(tmp_path, "nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.1'")
    with pytest.raises(ValueError, match="need nvcc 13.0 or newer, got 12.4: update"):
        cuda.find(("90a",))
    tool(tmp_path, "nvcc", f"echo 'release 13.0, V13.0.88'; echo '#$ TOP={tmp_path}/bin/..' >&2")
    found = cuda.find(("90a",))
    assert found.home == tmp_path
    with pytest.raises(ValueError, match="libcudart_static.a"):
        found.runtime  # noqa: B018


def test_sources_of_one_name_get_objects_of_their_own():
    sources = ["csrc/pack.cpp", "csrc/cuda/pack.cpp", "csrc/cuda/pack.cu", "build/gen/decode_4_a16.cu"]
    objects = [build_graph.object_of(source) for source in sources]
    assert len(set(objects)) == len(sources)
    assert [o.startswith("build/obj/cuda/") for o in objects] == [False, True, True, True]


@pytest.mark.parametrize("lists_headers", [True, False])
@pytest.mark.parametrize("name", ["cxx", "nvcc"])
def test_an_object_without_a_list_of_its_headers_is_a_failure(tmp_path, name, lists_headers):
    """ninja would never compile it again when they change."""
    listing = f"echo 'a.o: a.h' > {tmp_path}/a.o.d" if lists_headers else ":"
    tool(tmp_path, "compiler", f"touch {tmp_path}/a.o; {listing}")
    compiler = str(tmp_path / "compiler")
    rules = build_graph.compile_rules(compiler, cuda.Cuda(compiler, tmp_path, ("90a",)))
    command = re.search(rf"rule {name}\n  command = (.*)", rules)[1]
    for variable, value in (("in", "a.cpp"), ("out", str(tmp_path / "a.o")), ("torch", ""), ("gencode", "")):
        command = command.replace(f"${variable}", value)
    assert (subprocess.run(["sh", "-c", command]).returncode == 0) == lists_headers


def test_each_library_is_linked_from_its_own_objects(tmp_path):
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libcudart_static.a").touch()
    sources = ["csrc/pack.cpp", "csrc/cuda/pack.cpp", "build/gen/cpu_scalar_4.cpp", "build/gen/decode_4_a16.cu"]
    toolkit = cuda.Cuda("nvcc", tmp_path, ("90a",))
    edges = dict(
        line.removeprefix("build ").split(": ", 1)
        for line in build_graph.ninja_file("g++", Path("/torch"), sources, toolkit).splitlines()
        if line.startswith("build ")
    )
    for kind in ("plain", "portable"):
        cpu, gpu = (edges[f"build/{kind}/{name}"] for name in ("liblowbit_cpu.so", "liblowbit_cuda.so"))
        assert "build/obj/pack.o build/obj/cpu_scalar_4.o" in cpu and "obj/cuda" not in cpu
        assert "build/obj/cuda/pack.cpp.o build/obj/cuda/decode_4_a16.cu.o" in gpu and "cpu_scalar" not in gpu
    assert edges["build/obj/cuda/decode_4_a16.cu.o"].startswith("nvcc ")
    assert "cuda" not in build_graph.ninja_file("g++", Path("/torch"), sources[::2]).replace(
        "tools/", ""
    ).lower().replace(" ".join(f"build/stubs/{name}" for name in CUDA_LIBRARIES), "")


def test_each_unit_is_compiled_for_what_its_kernels_run_on(tmp_path):
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libcudart_static.a").touch()
    units = {
        "kernels": [
            {"unit": "decode_4_a16.cu", "archs": ["80", "90a"]},
            {"unit": "gemm_4_a16.cu", "archs": ["90a"]},
            {"unit": "gemm_4_a16.cu", "archs": ["100", "90a"]},
            {"unit": "cpu_scalar_4.cpp"},
        ]
    }
    archs = build_graph.unit_archs(units)
    assert archs == {"decode_4_a16.cu": ["80", "90a"], "gemm_4_a16.cu": ["90a", "100"]}
    sources = ["csrc/cuda/pack.cu", "build/gen/decode_4_a16.cu", "build/gen/gemm_4_a16.cu"]
    toolkit = cuda.Cuda("nvcc", tmp_path, ("80", "90a", "100"))
    text = build_graph.ninja_file("g++", Path("/torch"), sources, toolkit, archs)
    found = dict(zip(sources, re.findall(r"^  gencode = (.*)$", text, re.MULTILINE), strict=True))
    assert [re.findall(r",code=(\S+)", options) for options in found.values()] == [
        ["[sm_80,compute_80]", "sm_90a", "sm_100"],
        ["[sm_80,compute_80]", "sm_90a"],
        ["sm_90a", "sm_100"],
    ]


@pytest.mark.skipif(not libraries.CUDA_LIBRARY.is_file(), reason="this build has no CUDA kernels")
def test_the_cuda_library_loads_without_a_gpu_and_beside_the_other():
    code = (
        "import torch; from lowbit import extension, libraries\n"
        "cpu = extension.load(); gpu = libraries.open_cuda()\n"
        "print(gpu.lowbit_cuda_archs().decode(), gpu.lowbit_cuda_runtime(), gpu.lowbit_cuda_driver() >= 0)\n"
        "print(any(hasattr(gpu, n) for n in ('lowbit_isa', 'lowbit_kernel_rows')), hasattr(cpu, 'lowbit_cuda_archs'))\n"
        "torch.ops.load_library(libraries.CUDA_LIBRARY); torch.ops.load_library(libraries.LIBRARY)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    archs, runtime, driver = first.split()
    assert all(arch[:2].isdigit() for arch in archs.split(";")) and int(runtime) >= 12080 and driver == "True"
    assert second == "False False" and done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("80", (8, 0), True), ("80", (7, 5), False), ("80", (12, 1), True), ("90a", (9, 0), True),
        ("90a", (10, 0), False), ("86", (8, 0), False), ("86", (8, 9), True), ("100", (10, 3), True),
        ("100", (12, 0), False), ("120", (12, 1), True),
    ],
)  # fmt: skip
def test_which_gpus_code_runs_on(arch, capability, runs):
    assert cuda_devices.code_runs(arch, *capability) == runs


def fake_library(archs: str, driver: int):
    return SimpleNamespace(
        lowbit_cuda_runtime=lambda: 13000, lowbit_cuda_driver=lambda: driver, lowbit_cuda_archs=archs.encode
    )


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (fake_library("90a", 13010), None),
        (fake_library("90a", 12080), "built with CUDA 13.0, this driver has 12.8: CUDA 13 needs driver 580 or newer"),
        (
            fake_library("100;120", 13000),
            "built for 100;120, cuda:1 has compute capability 9.0: build lowbit with LOWBIT_C",
        ),
        ("this lowbit was built without CUDA kernels", "built without CUDA kernels"),
    ],
)
def test_a_gpu_that_the_kernels_cannot_use_is_told_once(monkeypatch, library, words):
    extension.load()
    monkeypatch.setattr(extension, "_cuda", library)
    monkeypatch.setattr(cuda_devices, "_warned", set())
    monkeypatch.setattr(cuda_devices, "_tables_read", set())
    monkeypatch.setenv("LOWBIT_TUNED", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert [cuda_devices.cuda_kernels(1), cuda_devices.cuda_kernels(1)] == [words is None] * 2
    assert len(seen) == (words is not None)
    if words:
        assert words in str(seen[0].message) and "torch operations" in str(seen[0].message)
