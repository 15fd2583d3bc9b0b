"""Risk: scales of 8 bits, or the factors of rows that go with them, are lost or rounded where a model is loaded, fused,
saved or converted.

The checkpoints are written byte by byte; what they mean is computed here, in float64.
"""

import copy
import io
import json
import pickle

import pytest
import torch
from formats.test_fp8 import value
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import FormatError, reference
from lowbit.checkpoint.convert import convert
from lowbit.checkpoint.safetensors_file import Reader
from lowbit.fused import FusedLinear
from lowbit.tensor import as_bytes

from .folders import tensors_of
from .models import TOKENS, small

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.tensor([value(code, 4, 3) for code in range(256)], dtype=torch.float64)


def compressed_tensors(layout, **weights):
    weights = {"num_bits": 4, "type": "float", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "version": "0.20.0",
    }  # fmt: skip


CONFIGS = {
    "nvfp4": compressed_tensors("nvfp4-pack-quantized", strategy="tensor_group", group_size=16),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": compressed_tensors("mxfp4-pack-quantized", strategy="group", group_size=32),
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 48]},
}
#: What lowbit makes of the scales.
SCALES = {"nvfp4": "float8_e4m3fn", "modelopt": "float8_e4m3fn", "mxfp4": "float8_e8m0fnu", "fp8": "float8_e8m0fnu"}


def spread(t, rows, columns, n, k):
    return t.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def written(kind, n, k, number):
    """``(tensors of a layer by their last names, the weight [n, k] float64)``; number: of the layer."""
    generator = torch.Generator().manual_seed(number)

    def bytes_of(low, high, *shape):
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    if kind == "fp8":
        codes, exponents = bytes_of(0, 0x7F, n, k), bytes_of(108, 114, -(-n // 32), -(-k // 48))
        tensors = {
            "weight": codes.view(torch.float8_e4m3fn),
            "weight_scale_inv": exponents.view(torch.float8_e8m0fnu),
        }
        return tensors, E4M3[codes.int()] * spread(torch.exp2(exponents.double() - 127), 32, 48, n, k)
    packed = bytes_of(0, 256, n, k // 2)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    if kind == "mxfp4":
        exponents = bytes_of(116, 122, n, -(-k // 32))
        factor = spread(torch.exp2(exponents.double() - 127), 1, 32, n, k)
        return {"weight_packed": packed, "weight_scale": exponents}, values * factor
    scales = bytes_of(0x58, 0x7F, n, -(-k // 16))
    tensors, total = {"weight_scale": scales.view(torch.float8_e4m3fn)}, torch.tensor([20000.0 + 1000.7 * number])
    factor = spread(E4M3[scales.int()], 1, 16, n, k)
    if kind == "modelopt":
        return {**tensors, "weight": packed, "weight_scale_2": 1 / total[0]}, values * factor * (1 / total).double()
    return {**tensors, "weight_packed": packed, "weight_global_scale": total}, values * factor * (1 / total).double()


def checkpoint(kind, folder, **changes):
    """A checkpoint of others; returns ``(a float model of the same weights, their values by layer)``."""
    model, weights = small("llama", **changes), {}
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for number, name in enumerate(sorted(key.removesuffix(".weight") for key in tensors if "_proj" in key)):
        made, weights[name] = written(kind, *tensors.pop(f"{name}.weight").shape, number)
        tensors |= {f"{name}.{role}": tensor for role, tensor in made.items()}
        model.get_submodule(name).weight.data = weights[name].float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[kind]}))
    return model, weights


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


def layers_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, lowbit.Linear)}


def same(a, b):
    """Whether two state dicts hold the same bytes."""
    return a.keys() == b.keys() and all(
        t.dtype == b[name].dtype and torch.equal(as_bytes(t), as_bytes(b[name])) for name, t in a.items()
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_checkpoint_of_others_is_loaded_saved_and_converted_with_its_own_scales(kind, tmp_path):
    oracle, weights = checkpoint(kind, tmp_path / "src")
    model = lowbit.from_pretrained(tmp_path / "src", dtype=torch.float32)
    layers, expected = layers_of(model), logits(model)
    assert layers.keys() == weights.keys()
    for name, layer in layers.items():
        qt = layer.quant_tensor()
        assert qt.scheme.scale_type == SCALES[kind] and torch.equal(reference.dequantize(qt), weights[name]), name
    assert model.config.quantization_config.to_dict()["scale_dtype"] == SCALES[kind]
    torch.testing.assert_close(expected, logits(oracle), rtol=1e-4, atol=1e-4)

    model.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    convert(tmp_path / "src", tmp_path / "converted")
    held = [load_file(tmp_path / "src" / "model.safetensors"), tensors_of(tmp_path / "saved")]
    held.append(tensors_of(tmp_path / "converted"))
    for name in layers:
        role = f"{name}.weight_scale_inv" if kind == "fp8" else f"{name}.weight_scale"
        for made in held[1:]:
            assert made[f"{name}.scales"].dtype == getattr(torch, SCALES[kind])
            assert (f"{name}.row_scales" in made) == (SCALES[kind] == "float8_e4m3fn")
            if kind != "fp8":  # whose blocks have more than one row
                assert torch.equal(as_bytes(made[f"{name}.scales"]), as_bytes(held[0][role]))
    for folder in ("saved", "converted"):
        for load in (lowbit.from_pretrained, AutoModelForCausalLM.from_pretrained):
            again = load(tmp_path / folder, dtype=torch.float32)
            assert same(again.state_dict(), model.state_dict()) and torch.equal(logits(again), expected)
    again = lowbit.from_pretrained(tmp_path / "converted", dtype=torch.bfloat16)
    assert all(layer.quant_tensor() == layers[name].quant_tensor() for name, layer in layers_of(again).items())


def test_other_global_scales_of_q_k_and_v_survive_fuse(tmp_path):
    checkpoint("nvfp4", tmp_path / "src")
    plain = lowbit.from_pretrained(tmp_path / "src", dtype=torch.float32)
    fused = lowbit.fuse(copy.deepcopy(plain))
    expected, before = logits(plain), layers_of(plain)
    attention = fused.model.layers[0].self_attn
    members = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert all(type(layer) is FusedLinear for layer in members)
    assert len({float(layer.quant_tensor().row_scales[0]) for layer in members}) == 3
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(file, weights_only=False)]
    for model in (fused, *copies, lowbit.unfuse(copy.deepcopy(fused))):
        assert torch.equal(logits(model), expected) and same(model.state_dict(), plain.state_dict())
        assert all(layer.quant_tensor() == before[name].quant_tensor() for name, layer in layers_of(model).items())
    other = copy.deepcopy(fused)
    for layer in layers_of(other).values():
        layer.row_scales.data.fill_(1)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(logits(other), expected)
    fused.to(torch.bfloat16)
    assert same({n: t for n, t in fused.state_dict().items() if "_proj" in n}, {
        n: t for n, t in plain.state_dict().items() if "_proj" in n
    })  # fmt: skip


@pytest.mark.parametrize("form", ["saved", "converted"])
def test_what_a_folder_lacks_or_denies_is_refused_by_name(form, tmp_path):
    checkpoint("nvfp4", tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "converted")
    lowbit.from_pretrained(tmp_path / "converted").save_pretrained(tmp_path / "saved")
    path, name = tmp_path / form / "model.safetensors", "model.layers.0.mlp.up_proj"
    with Reader(path) as reader:
        metadata = reader.metadata
    tensors = load_file(path)
    save_file({key: t for key, t in tensors.items() if key != f"{name}.row_scales"}, path, metadata)
    with pytest.raises(FormatError, match=rf"{name}\.row_scales: the checkpoint must hold it"):
        lowbit.from_pretrained(tmp_path / form)
    if form == "converted":  # a file that describes its weights
        save_file({**tensors, f"{name}.row_scales": tensors[f"{name}.row_scales"].half()}, path, metadata)
        with pytest.raises(FormatError, match=f"{name}: row_scales must be float32, got float16"):
            lowbit.from_pretrained(tmp_path / form)
    save_file(tensors, path, metadata)
    held = json.loads((tmp_path / form / "config.json").read_text())
    for scale_type, words in {
        "float8_e8m0fnu": "denies: .*row_scales"
        if form == "saved"
        else r"its tensors is .*'scales'., the file .*row_sc",
        "float16": "denies: .*row_scales" if form == "saved" else r"its tensors is .*'scales'., the file .*row_sc",
        "float8_e5m2": "scales must be one of float16, .*float8_e4m3fn, got 'float8_e5m2'",
    }.items():
        changed = {**held, "quantization_config": {**held["quantization_config"], "scale_dtype": scale_type}}
        (tmp_path / form / "config.json").write_text(json.dumps(changed))
        with pytest.raises(lowbit.LowbitError, match=words):
            lowbit.from_pretrained(tmp_path / form)
