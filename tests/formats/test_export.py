"""Risk: another program reads other weights than lowbit wrote, or a weight is written that the format cannot hold."""

import pytest
import torch

import lowbit
from lowbit import DtypeError, FormatError, QuantTensor, reference
from lowbit.checkpoint import export_files, native
from lowbit.checkpoint.export import (
    compressed_tensors_config,
    compressed_tensors_groups,
    to_compressed_tensors,
    to_gptq,
)
from lowbit.checkpoint.formats import find

from .words import floats, only

KINDS = [f"{kind}{bits}" for bits in range(2, 9) for kind in ("int", "uint")]


def weight(kind, n=64, k=128, group_size=32, perm=None, dtype=torch.float16):
    qt = lowbit.quantize(floats(n, k, torch.float32), kind, group_size=group_size, method="rtn", scale_dtype=dtype)
    return QuantTensor(
        qt.codes,
        qt.scales,
        qt.zeros,
        dtype=kind,
        shape=(n, k),
        group_size=group_size,
        zero_kind=qt.zero_kind,
        perm=perm,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_written_is_read_back_the_same(kind, group_size, dtype):
    qt = weight(kind, group_size=group_size, dtype=dtype)
    tensors, settings = to_compressed_tensors(qt)
    assert only(find(compressed_tensors_config(settings, ["lm_head"])), tensors) == qt
    for planar in (None, True):
        tensors, config = to_gptq(qt, planar)
        assert config["checkpoint_format"] == ("gptq_p" if planar or kind[-1] in "567" else "gptq_v2")
        assert only(find(config), tensors) == qt


def test_odd_shapes_go_to_compressed_tensors():
    for kind in ("int3", "uint5", "uint4"):
        qt = weight(kind, n=7, k=45, group_size=-1)
        tensors, settings = to_compressed_tensors(qt)
        assert only(find(compressed_tensors_config(settings, [])), tensors) == qt


@pytest.mark.parametrize("kind", ["int4", "uint3"])
def test_an_order_of_columns_becomes_g_idx(kind):
    perm = torch.randperm(128, generator=torch.Generator().manual_seed(0)).int()
    qt = weight(kind, perm=perm)
    tensors, config = to_gptq(qt)
    assert config["desc_act"] and torch.equal(
        reference.dequantize(only(find(config), tensors)), reference.dequantize(qt)
    )
    with pytest.raises(FormatError, match="pack-quantized holds columns in their order, got a weight with perm"):
        to_compressed_tensors(qt)


def small(kind, group_size, scale_type, n=48, k=128):
    """A float weight with codes and scales of every kind; with scales float8_e4m3fn, all rows have one factor."""
    values = floats(n, k, torch.float32)
    qt = lowbit.quantize(values, kind, group_size=group_size, method="rtn", scale_dtype=scale_type)
    rows = None if qt.row_scales is None else (1 / torch.tensor([[688.0]])).expand(n, 1).contiguous()
    return QuantTensor(qt.codes, qt.scales, dtype=kind, shape=(n, k), group_size=group_size, row_scales=rows)


SMALL = {
    "mxfp4-pack-quantized": ("float4_e2m1", 32, torch.float8_e8m0fnu),
    "mxfp6-pack-quantized": ("float6_e2m3", 32, torch.float8_e8m0fnu),
    "mxfp8-quantized": ("float8_e4m3", 32, torch.float8_e8m0fnu),
    "nvfp4-pack-quantized": ("float4_e2m1", 16, torch.float8_e4m3fn),
    "float-quantized": ("float8_e4m3", -1, torch.bfloat16),
    "float-quantized, groups": ("float8_e4m3", 128, torch.float32),
}


@pytest.mark.parametrize("layout", SMALL)
def test_floats_are_read_back_the_same(layout):
    qt = small(*SMALL[layout])
    tensors, settings = to_compressed_tensors(qt)
    config = compressed_tensors_config(settings, ["lm_head"])
    assert config["format"] == layout.split(",")[0]
    assert only(find(config), tensors) == qt


@pytest.mark.parametrize("layout", SMALL)
def test_the_library_reads_floats(layout):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    qt = small(*SMALL[layout])
    tensors, settings = to_compressed_tensors(qt)
    config = QuantizationConfig.model_validate(compressed_tensors_config(settings, ["lm_head"]))
    try:
        compressor = BaseCompressor.get_value_from_registry(layout.split(",")[0])
    except KeyError:
        pytest.skip("this version of the library does not know the layout")
    read = compressor.decompress(dict(tensors), config.config_groups["group_0"])["weight"]
    # The library rounds to the type that it computes in, bfloat16 or that of the scales.
    torch.testing.assert_close(read.float(), qt.dequantize(torch.float32), rtol=2**-7, atol=0)


def test_layers_of_several_layouts_are_named_with_theirs():
    weights = [small(*SMALL["mxfp4-pack-quantized"]), weight("int4")]
    made = [to_compressed_tensors(qt) for qt in weights]
    config = compressed_tensors_groups([([f"m.{i}"], settings) for i, (_, settings) in enumerate(made)], [])
    assert config["format"] == "mixed-precision"
    read = find(config)
    for i, (tensors, _) in enumerate(made):
        layer = next(iter(read.layers({f"m.{i}.{name}": None for name in tensors}, {})))
        assert (
            read.decode(layer, {role: tensors[key.removeprefix(f"m.{i}.")] for role, key in layer.tensors.items()})
            == (weights[i])
        )


def test_floats_that_do_not_fit_are_refused():
    with pytest.raises(
        FormatError, match="holds floats as .*, got float5_e2m2 with groups of 32, scales float8_e8m0fnu"
    ):
        to_compressed_tensors(small("float5_e2m2", 32, torch.float8_e8m0fnu))
    with pytest.raises(FormatError, match="got float4_e2m1 with groups of 32, scales float8_e4m3fn"):
        to_compressed_tensors(small("float4_e2m1", 32, torch.float8_e4m3fn))
    qt = small(*SMALL["nvfp4-pack-quantized"])
    qt.row_scales[3] *= 2
    with pytest.raises(FormatError, match="one factor for all rows, got a weight whose rows have different ones"):
        to_compressed_tensors(qt)
    with pytest.raises(
        FormatError, match="mxfp4-pack-quantized has no short groups: K must be a multiple of 32, got 72"
    ):
        to_compressed_tensors(small("float4_e2m1", 32, torch.float8_e8m0fnu, k=72))


def test_gptq_words_by_hand():
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[3, 9], codes[3, 10], codes[3, 11] = 5, 6, 7  # bits 27..35 of column 3
    qt = QuantTensor.from_codes(codes, torch.ones(32, 1).half(), torch.ones(32, 1).half(), dtype="uint3", group_size=-1)
    tensors, _ = to_gptq(qt)
    assert tensors["qweight"].shape == (3, 32) and tensors["qzeros"].shape == (1, 3)
    low = (5 << 27 | 6 << 30 | 7 << 33) & 0xFFFFFFFF
    assert tensors["qweight"][0, 3] == low - (1 << 32) and tensors["qweight"][1, 3] == (6 << 30 | 7 << 33) >> 32
    assert tensors["qzeros"][0, 0] & 0x3F == 9 and tensors["g_idx"].tolist() == [0] * 32


REFUSED = {
    "floats": (lambda: weight("float4_e2m1"), "holds .* got float4_e2m1 with "),
    "one bit": (lambda: weight("int1"), "got int1"),
    "scales of powers of two": (
        lambda: narrow("int4", torch.float8_e8m0fnu), "holds scales of float16, bfloat16, float32, got float8_e8m0fnu"
    ),
    "scales of 8 bits": (lambda: narrow("int8", torch.float8_e4m3fn), "bfloat16, float32, got float8_e4m3fn"),
    "minimum": (lambda: lowbit.quantize(floats(64, 128), "uint4", group_size=32, zero_kind="min"), "zero_kind 'min'"),
    "zero of a half": (lambda: change_zero(0.5), r"holds whole zeros of 0\.\.15, 1 of 256 are others"),
    "zero of 16": (lambda: change_zero(16), "1 of 256 are others"),
    "negative zero point": (lambda: change_zero(-1), "1 of 256 are others"),
}  # fmt: skip


def narrow(kind, scale_type):
    scales = torch.full((64, 4), 0x38, dtype=torch.uint8).view(scale_type)
    rows = torch.ones(64, 1) if scale_type == torch.float8_e4m3fn else None
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    return QuantTensor.from_codes(codes, scales, dtype=kind, group_size=32, row_scales=rows)


def change_zero(value):
    qt = weight("uint4")
    qt.zeros[0, 0] = value
    return qt


@pytest.mark.parametrize("make, words", REFUSED.values(), ids=REFUSED)
def test_what_a_format_cannot_hold_is_refused(make, words):
    for export in (to_compressed_tensors, to_gptq):
        with pytest.raises(FormatError, match=words):
            export(make())
        with pytest.raises(DtypeError, match="expected a QuantTensor"):
            export(torch.ones(3))


@pytest.mark.parametrize("format", export_files.FORMATS)
def test_a_checkpoint_with_scales_of_8_bits_is_refused_before_anything_is_written(format, tmp_path):
    (tmp_path / "src").mkdir()
    native.save(tmp_path / "src" / "model.safetensors", {"m.up": narrow("int4", torch.float8_e8m0fnu)})
    (tmp_path / "src" / "config.json").write_text('{"quantization_config": {"quant_method": "lowbit"}}')
    with pytest.raises(FormatError, match="m.up: .* holds scales of float16, bfloat16, float32, got float8_e8m0fnu"):
        export_files.export_checkpoint(tmp_path / "src", tmp_path / "out", format)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(FormatError, match="must be multiples of 32, got 60 and 128"):
        to_gptq(weight("int4", n=60))
    with pytest.raises(FormatError, match="gptq_p fills whole words: N and K must be multiples of 32, got 48 and 128"):
        to_gptq(weight("int6", n=48))
    with pytest.raises(FormatError, match="K must be a multiple of 32, got 100"):
        to_compressed_tensors(weight("int4", k=100))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [32, -1])
def test_the_library_reads_what_is_written(kind, group_size):
    package = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    if kind[-1] in "3567" and tuple(map(int, package.__version__.split(".")[:2])) < (0, 18):
        pytest.skip("before 0.18 these widths are laid out otherwise")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    qt = weight(kind, group_size=group_size)
    tensors, settings = to_compressed_tensors(qt)
    config = QuantizationConfig.model_validate(compressed_tensors_config(settings, ["lm_head"]))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    read = compressor.decompress(dict(tensors), config.config_groups["group_0"])["weight"]
    # Why fp16 here: the library computes in the type of the scales, in two steps.
    step = (qt.unpack().float() - (float(1 << (qt.dtype.bits - 1)) if qt.zeros is None else spread(qt))).half()
    assert torch.equal(read, step * qt.scales.repeat_interleave(128 // qt.scales.shape[1], 1))
    torch.testing.assert_close(read, qt.dequantize(torch.float16))


def spread(qt):
    return qt.zeros.float().repeat_interleave(128 // qt.zeros.shape[1], 1)
