"""Risk: a pickle of scales of 8 bits cannot be read (torch's of such a tensor cannot), or comes back as plain bytes."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import QuantTensor, pack_weight
from lowbit.checkpoint import native

GOLDEN = Path(__file__).parent / "golden" / "format1" / "scales_of_8_bits.safetensors"


def through_torch(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"pickle": lambda thing: pickle.loads(pickle.dumps(thing)), "torch.save": through_torch, "copy": copy.deepcopy}


@pytest.mark.parametrize("name", ["e8m0", "e4m3"])
@pytest.mark.parametrize("way", COPIES)
def test_weights_and_layers_come_back_with_the_same_bytes(name, way):
    again, qt, x = COPIES[way], native.load(GOLDEN)[name], torch.randn(3, 37)
    assert again(qt) == qt and again(qt).scales.dtype == qt.scales.dtype
    for layout in ("cpu", "nvidia"):
        pw = pack_weight(qt, layout=layout)
        made = again(pw)
        assert made.unpack() == qt and type(made.scales) is type(pw.scales) and made.scales.dtype == pw.scales.dtype
    for prepare in (False, True):
        layer = lowbit.Linear.from_quant_tensor(qt, dtype=torch.float32, prepare=prepare)
        made = again(layer)
        assert made.quant_tensor() == qt and made.layout == layer.layout
        assert type(made._parameters["scales"]) is torch.nn.Parameter and not made._parameters["scales"].requires_grad
        if prepare:
            # Why NaN may be: the largest weights are beyond float32, and some instruction sets add up infinities.
            torch.testing.assert_close(made(x), layer(x), rtol=0, atol=0, equal_nan=True)


def test_pickles_from_before_there_were_factors_of_rows_are_read():
    qt = QuantTensor.from_codes(torch.ones(4, 32).byte(), torch.ones(4, 1).half(), dtype="int4", group_size=32)
    state = {key: value for key, value in qt.__dict__.items() if key != "row_scales"}
    made = QuantTensor.__new__(QuantTensor)
    made.__setstate__(state)
    assert made == qt and made.row_scales is None
