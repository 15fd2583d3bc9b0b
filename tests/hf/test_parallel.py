"""Risk: a model cut over two processes multiplies with the wrong part of a weight, or is saved in pieces.

Two processes on the CPU (gloo); what one process computes is the oracle.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowbit

from .models import LLAMA, TOKENS

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

SETTINGS = {"dtype": "uint4", "group_size": 32, "method": "rtn", "dynamic": {"up_proj$": {"dtype": "int3"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    made = tmp_path_factory.mktemp("parallel")
    AutoModelForCausalLM.from_pretrained(LLAMA).save_pretrained(made / "src")
    (made / "settings.json").write_text(json.dumps(SETTINGS))
    lowbit.quantize_checkpoint(made / "src", made / "q", **SETTINGS)
    model = lowbit.from_pretrained(made / "q", dtype=torch.float32)
    logits = model(TOKENS).logits
    torch.save(logits.detach(), made / "expected.pt")
    logits.square().mean().backward()
    torch.save(model.model.norm.weight.grad, made / "gradient.pt")
    return made


def run(task, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("parallel.py")
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
    started = []
    for rank in "01":
        env = {**common, "RANK": rank, "LOCAL_RANK": rank}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([sys.executable, script, task, folder], env=env, **pipes))
    try:
        said = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0 and text.strip().endswith("same"), text[-3000:]


def test_tensor_parallel_loads_quantizes_multiplies_and_saves_the_same(folder):
    run("tensor_parallel", folder)


def test_a_cut_through_a_group_is_refused(folder):
    run("cut_groups", folder)


def test_fully_sharded_layers_compute_and_train_the_same(folder):
    run("fully_sharded", folder)
