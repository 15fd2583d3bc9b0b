"""Risk: a model cut over two processes multiplies with the wrong part of a weight, or is saved in pieces.

Two processes on the CPU (gloo); what one process computes is the oracle.
"""

import json

import pytest
import torch
from packaging.version import Version

import lowbit

from .models import LLAMA, TOKENS, small

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from lowbit.checkpoint.convert import convert

from .parallel import prepare_folder, run
from .test_scales_of_8_bits import checkpoint

fsdp2 = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="FSDP2 of torch 2.11 takes float parameters only, 2.13 others too",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_folder(tmp_path_factory.mktemp("parallel"), LLAMA)


def test_tensor_parallel_loads_quantizes_multiplies_and_saves_the_same(folder):
    run("tensor_parallel", folder)


def test_a_cut_through_a_group_is_refused(folder):
    run("cut_groups", folder)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_scales_of_8_bits_and_factors_of_rows_are_cut_with_their_rows_and_saved_whole(kind, tmp_path):
    even = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    checkpoint(kind, tmp_path / "src", **even)
    convert(tmp_path / "src", tmp_path / "q")
    with torch.no_grad():
        torch.save(lowbit.from_pretrained(tmp_path / "q", dtype=torch.float32)(TOKENS).logits, tmp_path / "expected.pt")
    run("scales_of_8_bits", tmp_path)


@fsdp2
def test_fully_sharded_layers_compute_and_train_the_same(folder):
    run("fully_sharded", folder)


@fsdp2
def test_layers_that_are_cut_while_packed_compute_the_same_and_refuse_the_rest(folder):
    run("fully_sharded_packed", folder)


@fsdp2
def test_fused_layers_that_are_cut_compute_the_same_and_ask_to_be_unfused(folder):
    run("fused", folder)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_lie_whole_in_each_process_and_count_once(kind, tmp_path):
    settings = {"dtype": "int4", "group_size": 16, "method": "rtn"}
    model = small(kind)
    # Why not any plan: from transformers 5.24 on that of gpt_oss has its embedding alone.
    if any("proj" in name for name in model.config.base_model_tp_plan or ()):
        (tmp_path / "cut").touch()
    model.save_pretrained(tmp_path / "src")
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    lowbit.quantize_checkpoint(tmp_path / "src", tmp_path / "q", **settings)
    with torch.no_grad():
        torch.save(lowbit.from_pretrained(tmp_path / "q", dtype=torch.float32)(TOKENS).logits, tmp_path / "expected.pt")
    run("experts", tmp_path)
