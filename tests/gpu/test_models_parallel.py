"""Risk: a model cut over two GPUs multiplies with the wrong part of a weight, or is saved in pieces.

Two processes (nccl) do what tests/hf has two on the CPU do; what one process on the CPU computes is the oracle.
"""

import pytest
import torch

pytest.importorskip("transformers", reason="models need the extra hf")

from hf.models import LLAMA
from hf.parallel import prepare_folder, run

TWO = torch.cuda.device_count() >= 2 and torch.distributed.is_available() and torch.distributed.is_nccl_available()
pytestmark = pytest.mark.skipif(not TWO, reason="needs two CUDA devices and nccl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_folder(tmp_path_factory.mktemp("parallel"), LLAMA)


@pytest.mark.parametrize("task", ["tensor_parallel", "cut_groups"])
def test_two_gpus_load_quantize_multiply_and_save_the_same(folder, task):
    run(task, folder, "nccl")
