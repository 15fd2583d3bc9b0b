"""Risk: a model that transformers places on a GPU, or only in part, multiplies with a weight in another layout."""

import pytest
import torch

import lowbit

from .kernels import needs_kernels

transformers = pytest.importorskip("transformers", reason="models need the extra hf")
pytest.importorskip("accelerate", reason="device_map needs accelerate")

from transformers import AutoModelForCausalLM  # noqa: E402

from lowbit import LowbitConfig  # noqa: E402

from .models import DEVICE, IDS, LAYOUT, OFF, dequantized, layers_of, logits, off, same_weights, tiny  # noqa: E402

pytestmark = needs_kernels
SETTINGS = {"dtype": "uint4", "group_size": 64, "method": "rtn", "dynamic": {"down_proj$": {"dtype": "int8"}}}
PROMPT = IDS[:2, :9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    tiny("qwen2", torch.float16).save_pretrained(made / "src", max_shard_size="800KB")
    lowbit.quantize_checkpoint(made / "src", made / "q", **SETTINGS)
    return made


@pytest.fixture(scope="module")
def host(folder):
    """The model on the CPU, and what it computes in float64."""
    model = lowbit.from_pretrained(folder / "q", dtype=torch.float16)
    return model, dequantized(model)


def load(folder, how, **options):
    if how == "lowbit":
        return lowbit.from_pretrained(folder / "q", dtype=torch.float16, **options)
    if how == "on the fly":
        options["quantization_config"] = LowbitConfig(**SETTINGS)
    path = folder / ("src" if how == "on the fly" else "q")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16, **options)


@pytest.mark.parametrize("place", [DEVICE, "auto", {"": 0}], ids=str)
@pytest.mark.parametrize("how", ["on the fly", "transformers", "lowbit"])
def test_on_the_device_it_is_the_model_of_the_host(folder, host, how, place):
    model = load(folder, how, device_map={"": DEVICE} if isinstance(place, dict) and DEVICE == "cpu" else place)
    assert {m.layout for m in layers_of(model).values()} == {LAYOUT} and same_weights(model, host[0])
    assert {p.device.type for p in model.parameters()} == {torch.device(DEVICE).type}
    assert off(model, host[1]) <= OFF[torch.float16]


def test_it_moves_there_and_back(folder, host):
    model = load(folder, "lowbit").to(DEVICE)
    assert {m.layout for m in layers_of(model).values()} == {LAYOUT} and off(model, host[1]) <= OFF[torch.float16]
    assert torch.equal(logits(model.cpu()), logits(host[0]))


@pytest.mark.parametrize("how", ["on the fly", "transformers", "lowbit"])
@pytest.mark.parametrize("elsewhere", ["cpu", "disk"])
def test_split_over_gpu_and_host_it_computes_the_same(folder, host, how, elsewhere, tmp_path):
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), DEVICE)
    places |= {f"model.layers.{i}": elsewhere if i in (1, 2) else DEVICE for i in range(4)}
    model = load(folder, how, device_map=places, offload_folder=tmp_path / "offloaded")
    for name, layer in layers_of(model).items():
        away = name.startswith(("model.layers.1.", "model.layers.2.")) and elsewhere != DEVICE
        assert layer.qweight.is_meta == away and (layer.layout is None) == away, name
    for _ in range(2):  # what was fetched is put away again
        assert off(model, host[1]) <= OFF[torch.float16]
    made = model.generate(PROMPT.to(DEVICE), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert made.shape == (2, 15) and torch.equal(made[:, :9].cpu(), PROMPT)
    model.save_pretrained(tmp_path / "again")
    assert same_weights(lowbit.from_pretrained(tmp_path / "again", dtype=torch.float16), host[0])


def test_saved_from_the_device_it_is_the_same_file(folder, host, tmp_path):
    load(folder, "on the fly", device_map=DEVICE).save_pretrained(tmp_path / "again")
    again = lowbit.from_pretrained(tmp_path / "again", dtype=torch.float16)
    assert same_weights(again, host[0]) and torch.equal(logits(again), logits(host[0]))
