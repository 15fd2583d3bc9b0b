"""Risk: a scale of 8 bits changes its byte in a reader, a block gets the scale of another, a row another's factor."""

import struct

import pytest
import torch

from lowbit import FormatError, reference
from lowbit.checkpoint.formats import find, gguf
from lowbit.checkpoint.gguf_source import take_rows

from . import gguf_values
from .test_compressed_tensors import MX, config, fp4, mx
from .words import only

#: Every exponent that is a number, one a row.
EXPONENTS = torch.arange(255, dtype=torch.uint8).view(255, 1)
#: Every finite number of float8_e4m3fn, -0 and both signs included, as bytes: one a group of a row.
BYTES = [code for code in range(256) if code & 0x7F != 0x7F]


def compressed(bits):
    """mxfp4, mxfp6 or mxfp8, [255, 64]: the second half of a row has the scale of the next row."""
    settings, tensors, weight = mx(bits)
    role = "weight" if bits == 8 else "weight_packed"
    scale = torch.exp2(tensors["weight_scale"].double() - 127).repeat_interleave(32, 1)
    places = torch.arange(255) % 8
    exponents = torch.cat((EXPONENTS, EXPONENTS.roll(-1, 0)), 1)
    qt = only(find(config(MX[bits], **settings)), {role: tensors[role][places], "weight_scale": exponents})
    return qt, (weight / scale)[places], exponents


def gpt_oss():
    data, values = fp4(255, 32)
    keys = {"l.experts.down_proj_blocks": data.view(1, 255, 1, 16), "l.experts.down_proj_scales": EXPONENTS[None]}
    fmt = find({"num_local_experts": 1, "quantization_config": {"quant_method": "mxfp4"}})
    (layer,) = fmt.layers(keys)
    return fmt.decode(layer, {role: keys[key] for role, key in layer.tensors.items()}), values, EXPONENTS


def blocks_of_gguf():
    data, _ = fp4(255, 32)
    held = torch.cat((EXPONENTS, data), 1)
    values = [[gguf_values.mxfp4(bytes([127, *row]), i) for i in range(32)] for row in data.tolist()]
    return gguf.decode(held.flatten(), "MXFP4", 255, 32), torch.tensor(values, dtype=torch.float64), EXPONENTS


READERS = {
    "mxfp4": lambda: compressed(4), "mxfp6": lambda: compressed(6), "mxfp8": lambda: compressed(8),
    "GPT-OSS": gpt_oss, "GGUF": blocks_of_gguf,
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_powers_of_two_keep_every_exponent_and_its_byte(name):
    qt, values, exponents = READERS[name]()
    assert qt.scales.dtype == torch.float8_e8m0fnu and qt.row_scales is None
    assert torch.equal(qt.scales.view(torch.uint8), exponents)
    factor = torch.tensor([[2.0 ** (e - 127) for e in row] for row in exponents.tolist()], dtype=torch.float64)
    expected = values * factor.repeat_interleave(32, 1)
    assert torch.equal(reference.dequantize(qt.validate()), expected)
    assert torch.equal(qt.dequantize(torch.float64), expected)
    assert qt.dequantize().dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:overflow encountered")  # 6 * 2^127 is infinite in float32, in both
def test_the_library_of_gguf_reads_every_exponent_alike():
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed")
    held = torch.cat((EXPONENTS, fp4(255, 32)[0]), 1)
    expected = quants.dequantize(held.numpy(), gguf_values.TYPES["MXFP4"][0])  # 2^(e - 128) times twice the value
    qt = gguf.decode(held.flatten(), "MXFP4", 255, 32)
    assert torch.equal(qt.dequantize(torch.float32), torch.from_numpy(expected))


def test_exponent_255_is_refused():
    bad = torch.full((8, 2), 255, dtype=torch.uint8)
    settings, tensors, _ = mx(4)
    with pytest.raises(FormatError, match=r"must have exponents 0\.\.254, 16 are 255, NaN"):
        only(find(config(MX[4], **settings)), {**tensors, "weight_scale": bad})
    with pytest.raises(FormatError, match=r"exponents 0\.\.254, 1 are 255"):
        gguf.decode(torch.full((17,), 255, dtype=torch.uint8), "MXFP4", 1, 32)


def nvfp4(kind, total):
    """``(weight, values)``, [2, 16 * 254]: every scale, in the second row the other way round."""
    data, values = fp4(2, 16 * len(BYTES))
    scales = torch.tensor([BYTES, BYTES[::-1]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    if kind == "modelopt":
        tensors = {"weight": data, "weight_scale": scales, "weight_scale_2": torch.tensor(total)}
        return only(find({"quant_method": "modelopt", "quant_algo": "NVFP4"}), tensors), values
    tensors = {"weight_packed": data, "weight_scale": scales, "weight_global_scale": torch.tensor([total])}
    settings = {"type": "float", "strategy": "tensor_group", "group_size": 16}
    return only(find(config("nvfp4-pack-quantized", **settings)), tensors), values


def float32(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


@pytest.mark.parametrize("kind", ["compressed-tensors", "modelopt"])
def test_nvfp4_keeps_every_scale_and_its_byte(kind):
    qt, values = nvfp4(kind, 726.5)
    assert qt.scales.dtype == torch.float8_e4m3fn and qt.scales.view(torch.uint8).tolist() == [BYTES, BYTES[::-1]]
    factor = 726.5 if kind == "modelopt" else float32(1 / 726.5)
    assert qt.row_scales.tolist() == [[factor], [factor]] and qt.row_scales.dtype == torch.float32
    scales = qt.scales.double().repeat_interleave(16, 1)
    assert torch.equal(reference.dequantize(qt), values * scales * factor)
    assert torch.equal(qt.dequantize(torch.float64), values * scales * factor)
    assert qt.dequantize().dtype == torch.float32


def test_scales_of_nvfp4_are_within_a_unit_of_the_rounded_quotient():
    totals = torch.exp2(torch.rand(300, generator=torch.Generator().manual_seed(0)) * 40 - 20).tolist()
    for total in (1.0, 3.0, 2688 / 3.7, *totals):
        qt, _ = nvfp4("compressed-tensors", total)
        ours = qt.scales.float() * qt.row_scales
        theirs = qt.scales.float() / torch.tensor(total)
        assert int((ours.view(torch.int32) - theirs.view(torch.int32)).abs().max()) <= 1
        exact = qt.scales.double() / torch.tensor(total).double()
        held = qt.scales.double() * qt.row_scales.double()
        assert bool(((held - exact).abs() <= 2.0**-24 * exact.abs()).all())


def test_rows_that_are_taken_keep_their_factors():
    qt, _ = nvfp4("modelopt", 0.37)
    qt.row_scales[1] = 5.0
    made = take_rows(qt, torch.tensor([1, 0, 1]))
    assert made.row_scales.tolist() == [[5.0], qt.row_scales[0].tolist(), [5.0]]
    assert torch.equal(reference.dequantize(made), reference.dequantize(qt)[[1, 0, 1]])
    assert take_rows(gpt_oss()[0], torch.tensor([254, 3])).scales.view(torch.uint8).tolist() == [[254], [3]]
