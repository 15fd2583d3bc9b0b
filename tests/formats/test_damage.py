"""Risk: a tensor or a setting of an unexpected kind crashes a reader, or gives values that are not finite."""

import pytest
import torch

from lowbit import FormatError
from lowbit.checkpoint.formats import find

from . import (
    test_awq,
    test_bitsandbytes,
    test_compressed_tensors,
    test_fp8,
    test_gptq,
    test_hqq,
    test_small_formats,
)
from .words import floats, only


def compressed():
    settings, tensors, _ = test_compressed_tensors.packed(3, symmetric=False, order=list(range(159, -1, -1)))
    return test_compressed_tensors.config("pack-quantized", **settings), tensors


def block_fp8():
    weight, _ = test_fp8.weights(40, 128)
    scales = floats(2, 4, torch.float32)
    return {**test_fp8.CONFIG, "weight_block_size": [32, 32]}, {"weight": weight, "weight_scale_inv": scales}


def nvfp4():
    data, _ = test_compressed_tensors.fp4(8, 64)
    scales = floats(8, 4, torch.float32).to(torch.float8_e4m3fn)
    tensors = {"weight_packed": data, "weight_scale": scales, "weight_global_scale": torch.tensor([3.0])}
    weights = {"type": "float", "strategy": "tensor_group", "group_size": 16}
    return test_compressed_tensors.config("nvfp4-pack-quantized", **weights), tensors


def mxfp4():
    settings, tensors, _ = test_compressed_tensors.mx(4)
    return test_compressed_tensors.config(test_compressed_tensors.MX[4], **settings), tensors


def plain_int8():
    tensors = {"weight": torch.ones(8, 64).to(torch.int8), "weight_scale": floats(8, 1, torch.float32)}
    tensors["weight_zero_point"] = torch.ones(8, 1).to(torch.int8)
    weights = {"num_bits": 8, "symmetric": False, "strategy": "channel", "group_size": None}
    return test_compressed_tensors.config("int-quantized", **weights), tensors


def bitnet():
    return {"quant_method": "bitnet"}, {"weight": test_small_formats.bitnet()[0], "weight_scale": torch.ones(1)}


CHECKPOINTS = {
    "gptq": lambda: test_gptq.checkpoint(4, order=test_gptq.shuffled(96))[:2],
    "awq": lambda: test_awq.checkpoint()[:2],
    "pack-quantized": compressed,
    "int-quantized": plain_int8,
    "nvfp4": nvfp4,
    "nvfp4 of modelopt": lambda: (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, test_small_formats.modelopt("NVFP4")[0]
    ),
    "mxfp4": mxfp4,
    "nf4": lambda: (test_bitsandbytes.CONFIG, test_bitsandbytes.four_bits(8, 128, 64, nested=4)[0]),
    "int8": lambda: (test_bitsandbytes.CONFIG, {"weight": torch.ones(4, 8).to(torch.int8), "SCB": torch.ones(4)}),
    "fp8": block_fp8,
    "hqq": lambda: (test_hqq.CONFIG, test_hqq.checkpoint(3)[0]),
    "bitnet": bitnet,
}  # fmt: skip
DAMAGE = {
    "empty": lambda t: t.flatten()[:0],
    "number": lambda t: t.flatten()[:1].reshape(()),
    "flat": lambda t: t.flatten(),
    "deeper": lambda t: t.unsqueeze(0),
    "first row": lambda t: t[:1] if t.dim() else t,
    "row more": lambda t: torch.cat((t, t[:1])) if t.dim() else t.repeat(2),
    "column less": lambda t: t[..., :-1] if t.dim() else t,
    "transposed": lambda t: t.transpose(0, -1) if t.dim() > 1 else t.unsqueeze(-1),
    "as float64": lambda t: t.double(),
    "as int64": lambda t: t.to(torch.int64),
    "as bool": lambda t: t != 0,
    "as complex": lambda t: t.to(torch.complex64),
    "ones": lambda t: torch.full_like(t.view(torch.uint8) if t.is_contiguous() and t.dim() else t, 255).view(t.dtype),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_every_tensor_may_be_anything(name, damage):
    config, tensors = CHECKPOINTS[name]()
    assert only(find(config), tensors).dequantize(torch.float32).isfinite().all()
    for role in tensors:
        try:
            qt = only(find(config), {**tensors, role: DAMAGE[damage](tensors[role])})
        except FormatError as error:
            assert "m.up: " in str(error)
        else:
            assert qt.validate().dequantize(torch.float64).isfinite().all()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_setting_may_be_anything(name):
    config, tensors = CHECKPOINTS[name]()
    places = [config, config.get("config_groups", {}).get("group_0", {}).get("weights", {})]
    for place in places:
        for key, value in list(place.items()):
            for other in (None, 0, -3, 7, 1 << 39, 1 << 70, [1 << 39, 1 << 39], True, "x", [], {}, [1], 0.5):
                place[key] = other
                try:
                    fmt = find(config)
                    if fmt is not None and fmt.layers([f"m.up{fmt.joint}{role}" for role in tensors]):
                        only(fmt, tensors).validate()
                except FormatError:
                    pass
            place[key] = value
