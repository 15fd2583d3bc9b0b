"""Risk: a model that was compiled, exported or packaged on a GPU cannot be made, or computes something else there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.cpp_extension import CUDA_HOME

import lowbit

from . import oracle
from .kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("quiet_and_fresh")]

#: Rows that go to kernels of different families and tiles.
ROWS = (2, 3, 16, 17, 64, 130, 300)


def model(kind="uint3") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256, bias=False)).half().cuda()
    return lowbit.quantize_model(layers, kind, group_size=64, method="rtn").requires_grad_(False)


def rows(m: int) -> torch.Tensor:
    return oracle.normal(m, 256, dtype=torch.float16, seed=m)


def assert_same(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def exported(net: nn.Module):
    return torch.export.export(net, (rows(3),), dynamic_shapes=({0: torch.export.Dim("batch")},))


def test_one_graph_of_a_model_serves_every_number_of_rows():
    net, counter = model(), CompileCounterWithBackend("inductor")
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    for m in ROWS:
        assert_same(compiled(rows(m)), net(rows(m)))
    assert counter.frame_count == 1


def test_reduce_overhead_captures_several_numbers_of_rows_in_turn():
    net = model()
    compiled = torch.compile(net, fullgraph=True, mode="reduce-overhead")
    skipped = counters["inductor"]["cudagraph_skips"]
    for _ in range(3):
        for m in (1, 4, 16, 64):
            torch.compiler.cudagraph_mark_step_begin()
            assert_same(compiled(rows(m)).clone(), net(rows(m)))
    assert counters["inductor"]["cudagraph_skips"] == skipped, "torch found a reason not to capture"


@pytest.mark.parametrize("kind", ["int4", "uint3"])
def test_export_with_a_free_batch_size(kind):
    net = model(kind)
    program = exported(net)
    for m in ROWS:
        assert torch.equal(program.module()(rows(m)), net(rows(m)))


def test_exported_program_runs_in_another_process(tmp_path):
    net = model()
    torch.export.save(exported(net), tmp_path / "net.pt2")
    torch.save([(rows(m), net(rows(m))) for m in (2, 50)], tmp_path / "pairs.pt")
    code = (
        "import torch; from lowbit import extension; extension.load(); net = torch.export.load('net.pt2').module();"
        "assert all(torch.equal(net(x), y) for x, y in torch.load('pairs.pt')); print('equal')"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(lowbit.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.skipif(CUDA_HOME is None, reason="AOTInductor needs the headers of a CUDA toolkit (CUDA_HOME)")
def test_a_package_of_aot_inductor_runs_with_any_batch_size(tmp_path):
    own, found = packaged("torch", tmp_path), packaged("lowbit", tmp_path)
    if own.returncode:
        reason = (own.stderr.strip().splitlines() or [f"exit status {own.returncode}"])[-1]
        pytest.skip(f"AOTInductor fails here with torch's own layers too: {reason}")
    assert found.returncode == 0 and "the same" in found.stdout, f"{found.returncode}: {found.stderr[-3000:]}"


def packaged(kind: str, folder: Path) -> subprocess.CompletedProcess:
    (place := folder / kind).mkdir()
    command = [sys.executable, "-X", "faulthandler", "-m", "gpu.packaged", kind, str(place)]
    here = [str(Path(lowbit.__file__).parents[1]), str(Path(__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
