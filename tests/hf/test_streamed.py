"""Risk: a checkpoint calibrated block by block differs from the model in memory, or more than a block is in memory.

The oracle is quantize_model, which holds the whole float model that transformers loads.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import lowbit
from lowbit import FormatError, QuantizationError
from lowbit.checkpoint import calibrated_files, streamed

IDS = torch.randint(0, 96, (10, 32), generator=torch.Generator().manual_seed(3))
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
CHANGES = {
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 32, "init_std": 0.2},  # layers in front of the blocks, and behind
    "Gemma2": {"head_dim": 16, "sliding_window": 8},
    "Phi3": {"pad_token_id": 0},
}


def source(folder, kind="Llama", dtype=torch.float32, **changes):
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **CHANGES.get(kind, {}), **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():  # biases and norms that are not all alike
            p.add_(torch.randn_like(p) * 0.02)
    model.to(dtype).save_pretrained(folder, max_shard_size="150KB")
    return folder


def tensors_of(folder):
    made = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        made |= load_file(path)
    return made


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma2", "GPTNeoX", "OPT", "Phi3", "Bloom"])
def test_block_by_block_is_the_whole_model_to_the_bit(tmp_path, monkeypatch, kind, tied, method):
    monkeypatch.setattr("lowbit.checkpoint.blocks._TOKENS_AT_ONCE", 96)
    dtype = torch.bfloat16 if kind in ("Qwen2", "Phi3") else torch.float32
    src = source(tmp_path / "src", kind, dtype, tie_word_embeddings=tied)
    settings = {"group_size": 32, "method": method}
    head = {} if tied else {"lm_head": "int8"}
    lowbit.quantize_checkpoint(src, tmp_path / "q", "int4", calibration=IDS, **settings, **head)
    model = transformers.AutoModelForCausalLM.from_pretrained(src, dtype="auto").eval()
    name = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    rules = {"skip": [name]} if tied else {"skip": [], "dynamic": {name: {"dtype": "int8"}}}
    expected = lowbit.quantize_model(model, "int4", calibration=IDS, prepare=False, **settings, **rules).state_dict()
    found, keys = lowbit.from_pretrained(tmp_path / "q", dtype="auto").state_dict(), set(tensors_of(tmp_path / "q"))
    assert found.keys() == expected.keys() and sum(key.endswith("qweight") for key in keys) >= 12
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


def test_float_layers_that_share_a_norm_with_folded_ones_are_written(tmp_path):
    src = source(tmp_path / "src")
    dynamic = {"q_proj": {"method": "rtn"}}
    options = {"group_size": 32, "method": "awq", "calibration": IDS, "dynamic": dynamic}
    lowbit.quantize_checkpoint(src, tmp_path / "q", "int3", skip=["k_proj"], **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(src, dtype="auto").eval()
    expected = lowbit.quantize_model(model, "int3", skip=["lm_head", "k_proj"], **options)
    before, after = tensors_of(src), tensors_of(tmp_path / "q")
    keys = [key for key in before if key.endswith("k_proj.weight")]
    assert any(not torch.equal(before[key], after[key]) for key in keys), "the test sees no fold"
    assert all(torch.equal(after[key], expected.get_parameter(key)) for key in keys)
    loaded = lowbit.from_pretrained(tmp_path / "q", dtype="auto")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected(IDS).logits)


def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path):
    """Blocks of 42 MB: what 6 more of them add to the peak is less than one."""
    code = (
        "import sys, torch, transformers, lowbit, resource\n"
        "src, dst, count = sys.argv[1], sys.argv[2], int(sys.argv[3])\n"
        "transformers.logging.set_verbosity_error()\n"
        "if dst == 'make':\n"
        "    sizes = {'hidden_size': 1024, 'intermediate_size': 2048, 'num_attention_heads': 8}\n"
        "    config = transformers.LlamaConfig(vocab_size=256, num_hidden_layers=count, **sizes)\n"
        "    transformers.LlamaForCausalLM(config).save_pretrained(src, max_shard_size='60MB')\n"
        "else:\n"
        "    few = {r'layers\\.1\\..*k_proj': {'method': 'gptq'}}\n"
        "    ids = torch.arange(64).view(2, 32)\n"
        "    lowbit.quantize_checkpoint(src, dst, group_size=64, method='rtn', dynamic=few, calibration=ids)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(lowbit.__file__).parents[1]), "MALLOC_ARENA_MAX": "1"}
    peaks = []
    for count in (2, 8):
        rest = [tmp_path / f"src{count}", "make", str(count)]
        subprocess.run([sys.executable, "-c", code, *rest], env=env, check=True, timeout=300)
        rest[1] = tmp_path / f"q{count}"
        done = subprocess.run([sys.executable, "-c", code, *rest], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
        shutil.rmtree(rest[0])
    assert peaks[1] - peaks[0] < 42e6, peaks


def test_between_two_blocks_only_what_is_around_them_is_in_memory(tmp_path, monkeypatch):
    real, seen = calibrated_files.CalibratedModel.done, []

    def done(self, *args):
        inside = {name for name, p in self.streamed.model.named_parameters() if p.device.type != "meta"}
        real(self, *args)
        seen.append((inside, {n for n, p in self.streamed.model.named_parameters() if p.device.type != "meta"}))

    monkeypatch.setattr(calibrated_files.CalibratedModel, "done", done)
    src = source(tmp_path / "src", tie_word_embeddings=False)
    options = {"group_size": 32, "method": "awq", "lm_head": "int8", "calibration": IDS}
    lowbit.quantize_checkpoint(src, tmp_path / "q", **options)
    around = {"model.embed_tokens.weight", "model.norm.weight"}
    assert [after for _, after in seen] == [around] * 4  # three blocks, the output layer
    for index, (before, _) in enumerate(seen[:3]):
        assert around < before and all(n in around or f".layers.{index}." in n for n in before), before


def test_what_is_read_is_freed(tmp_path):
    model = streamed.Streamed(lowbit.checkpoint.source.Source(source(tmp_path / "src")), torch.device("cpu"))
    before = tensors_of(tmp_path / "src")
    with model:
        block = model.model.model.layers[1]
        assert all(p.device.type == "meta" for p in model.model.parameters())
        model.enter(block.modules())
        for name, p in model.model.named_parameters():
            assert p.device.type == ("cpu" if ".layers.1." in name else "meta"), name
            assert ".layers.1." not in name or torch.equal(p, before[name])
        model.leave(block.modules())
        assert all(p.device.type == "meta" for p in model.model.parameters())


def spoil(src, change):
    path = next(p for p in sorted(src.glob("*.safetensors")) if any("layers.2" in name for name in load_file(p)))
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.2" in name and "proj" in name)
    if change == "nan":
        tensors[name][1, 1] = float("nan")
    else:
        name = next((name for name in tensors if "norm" in name), name)
        tensors.pop(name)
        index = json.loads((src / "model.safetensors.index.json").read_text())
        del index["weight_map"][name]
        (src / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors, path, {"format": "pt"})
    return name.removesuffix(".weight")


def test_a_bad_weight_is_known_before_the_work(tmp_path, monkeypatch):
    src = source(tmp_path / "src")
    name = spoil(src, "nan")
    monkeypatch.setattr("lowbit.checkpoint.blocks.Blocks.__init__", None)
    with pytest.raises(QuantizationError, match=f"^{name}: a weight must be finite"):
        lowbit.quantize_checkpoint(src, tmp_path / "q", group_size=32, method="gptq", calibration=IDS)
    assert not (tmp_path / "q").exists()


def test_a_tensor_that_is_not_there_is_named_and_not_made_up(tmp_path):
    src = source(tmp_path / "src")
    name = spoil(src, "missing")
    with pytest.raises(FormatError, match=f"lacks {name}"):
        lowbit.quantize_checkpoint(src, tmp_path / "q", group_size=32, method="gptq", calibration=IDS)
    assert not (tmp_path / "q").exists()


def test_a_source_that_changes_while_it_is_calibrated_is_noticed(tmp_path):
    src = source(tmp_path / "src")

    def touch(done, total, name):
        if done == 3:
            os.utime(sorted(src.glob("*.safetensors"))[-1], ns=(1, 1))

    with pytest.raises(FormatError, match="changed while it was read"):
        options = {"group_size": 32, "method": "gptq", "calibration": IDS, "progress": touch}
        lowbit.quantize_checkpoint(src, tmp_path / "q", **options)


def test_a_killed_run_leaves_nothing_that_the_next_one_mixes_in(tmp_path):
    src = source(tmp_path / "src")
    code = (
        "import sys, lowbit, os, signal, torch\n"
        "def progress(done, total, name):\n"
        "    if done == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "ids = torch.arange(64).view(2, 32)\n"
        "options = {'group_size': 32, 'method': 'gptq', 'calibration': ids, 'progress': progress}\n"
        "lowbit.quantize_checkpoint(sys.argv[1], sys.argv[2], **options)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(lowbit.__file__).parents[1])}
    for count in (5, 16):  # in the first block, in the third
        run = subprocess.run([sys.executable, "-c", code, src, tmp_path / "q", str(count)], env=env, timeout=120)
        assert run.returncode < 0 and not (tmp_path / "q").exists()
        assert not (tmp_path / ".q.partial" / "config.json").exists()
    options = {"group_size": 32, "method": "gptq"}
    lowbit.quantize_checkpoint(src, tmp_path / "q", **options, calibration=IDS)
    lowbit.quantize_checkpoint(src, tmp_path / "again", **options, calibration=IDS)
    files = sorted(p.name for p in (tmp_path / "q").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "again").iterdir()) and "blocks" not in files
    assert all((tmp_path / "q" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)
