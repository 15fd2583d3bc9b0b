"""Risk: bits in the wrong place, a value off by a group, damaged contents that nobody notices."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit import reference
from lowbit.bit_stream import row_chunks
from lowbit.dtypes import WEIGHT_TYPES, weight_type
from lowbit.errors import DeviceError, DtypeError, FormatError, SchemeError, ShapeError
from lowbit.tensor import QuantTensor


def random_qt(rng, dtype="int4", n=5, k=37, group_size=16, scale=torch.float16, zero_kind=None, **fields):
    wtype = weight_type(dtype)
    legal = torch.tensor([c for c in range(1 << wtype.bits) if c not in wtype.invalid_codes], dtype=torch.uint8)
    codes = legal[torch.randint(len(legal), (n, k), generator=rng)]
    groups = 1 if group_size == -1 else -(-k // group_size)
    scales = torch.rand(n, groups, generator=rng).add(0.5).to(scale)
    zero_kind = zero_kind or ("zero" if wtype.kind == "uint" else "none")
    zeros = None if zero_kind == "none" else torch.randn(n, groups, generator=rng).to(scale)
    return QuantTensor.from_codes(
        codes, scales, zeros, dtype=dtype, group_size=group_size, zero_kind=zero_kind, **fields
    )


def test_bit_stream_of_the_documented_example():
    stream = QuantTensor.pack_codes(torch.tensor([[1, 2, 3, 5]], dtype=torch.uint8), 3)
    assert stream.tolist() == [[0xD1, 0x0A]]


@settings(deadline=None, max_examples=60)
@given(bits=st.integers(1, 8), n=st.integers(1, 4), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_bit_stream_is_exact_for_every_width_and_k(bits, n, k, seed):
    codes = torch.randint(1 << bits, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    stream = QuantTensor.pack_codes(codes, bits)
    assert stream.shape == (n, (k * bits + 7) // 8)
    assert torch.equal(reference.read_codes(stream, bits, k), codes)
    assert torch.equal(QuantTensor.unpack_codes(stream, bits, k), codes)
    whole = sum(int(c) << (bits * j) for j, c in enumerate(codes[0]))
    assert int.from_bytes(bytes(stream[0].tolist()), "little") == whole  # the bits behind the last code are 0 too


def test_bit_stream_across_row_chunks(rng):
    n, k = 70, 4099
    assert len(list(row_chunks(n, k, torch.device("cpu")))) > 2
    codes = torch.randint(8, (n, k), generator=rng, dtype=torch.uint8)
    stream = QuantTensor.pack_codes(codes, 3)
    assert torch.equal(QuantTensor.unpack_codes(stream, 3, k), codes)
    assert torch.equal(QuantTensor.pack_codes(codes[61:], 3), stream[61:])


def test_pack_reads_strided_codes_and_refuses_large_ones():
    codes = torch.arange(12, dtype=torch.uint8).view(4, 3).T
    assert torch.equal(QuantTensor.unpack_codes(QuantTensor.pack_codes(codes, 4), 4, 4), codes)
    with pytest.raises(SchemeError, match="at most 7, got 11"):
        QuantTensor.pack_codes(codes, 3)
    with pytest.raises(DtypeError, match="uint8 tensor, got int64"):
        QuantTensor.pack_codes(codes.long(), 4)


@pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)
@pytest.mark.parametrize("zero_kind", ["none", "zero", "min"])
@pytest.mark.parametrize("scale, group_size", [(torch.float16, 16), (torch.bfloat16, 32), (torch.float32, -1)])
def test_dequantize_against_the_reference(wtype, zero_kind, scale, group_size, rng):
    qt = random_qt(rng, wtype.name, group_size=group_size, scale=scale, zero_kind=zero_kind).validate()
    exact = reference.dequantize(qt)
    assert torch.equal(qt.dequantize(torch.float64), exact)
    torch.testing.assert_close(qt.dequantize(torch.float32).double(), exact, rtol=1e-6, atol=1e-6 * exact.abs().max())
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(qt.dequantize(dtype), qt.dequantize(torch.float32).to(dtype))
    assert qt.dequantize().dtype == scale


@pytest.mark.parametrize("k, group_size", [(16, 16), (17, 16), (15, 16), (256, 256), (300, 128), (1, 32), (300, -1)])
def test_group_edges(k, group_size, rng):
    qt = random_qt(rng, "uint5", k=k, group_size=group_size, zero_kind="min")
    assert torch.equal(qt.dequantize(torch.float64), reference.dequantize(qt))


def test_perm_sends_columns_back_to_the_order_of_x(rng):
    perm = torch.randperm(37, generator=rng).int()
    plain = random_qt(rng, "int3")
    qt = QuantTensor(plain.codes, plain.scales, dtype="int3", shape=(5, 37), group_size=16, perm=perm)
    x = torch.randn(3, 37, generator=rng, dtype=torch.float64)
    expected = x[:, perm.long()] @ plain.dequantize(torch.float64).T
    torch.testing.assert_close(x @ qt.dequantize(torch.float64).T, expected)
    assert torch.equal(qt.dequantize(torch.float64), reference.dequantize(qt))


def test_codebook_replaces_the_values(rng):
    book = torch.randn(16, generator=rng)
    codes = torch.randint(16, (2, 20), generator=rng, dtype=torch.uint8)
    qt = QuantTensor.from_codes(codes, torch.full((2, 2), 2.0), dtype="uint4", group_size=16, codebook=book)
    assert qt.zero_kind == "none"
    assert torch.equal(qt.dequantize(), 2 * book[codes.long()])
    assert torch.equal(qt.dequantize(torch.float64), reference.dequantize(qt))


def test_equality_is_of_bytes_types_and_fields(rng):
    qt = random_qt(rng, "float4_e2m1")
    assert qt == qt.clone() == copy.deepcopy(qt) == pickle.loads(pickle.dumps(qt))
    assert qt != "int4" and qt.clone().codes.data_ptr() != qt.codes.data_ptr()
    codes = qt.unpack()
    codes[0, 0] = 0
    zero = QuantTensor.from_codes(codes, qt.scales, dtype=qt.dtype, group_size=16)
    codes[0, 0] = 8  # -0: the same value, another weight
    minus_zero = QuantTensor.from_codes(codes, qt.scales, dtype=qt.dtype, group_size=16)
    assert zero != minus_zero and torch.equal(zero.dequantize(), minus_zero.dequantize())
    narrow = QuantTensor(qt.codes[:1, :2], qt.scales[:1, :1], dtype=qt.dtype, shape=(1, 4), group_size=16)
    assert narrow == narrow.clone()  # a last dimension of 1 may have any stride
    scales = torch.tensor([[0.0], [torch.nan]]).half()
    one, other = (
        QuantTensor.from_codes(torch.ones(2, 3, dtype=torch.uint8), s, dtype="int4") for s in (scales, -scales)
    )
    assert one == one.clone() and one != other
    other = qt.clone()
    other.scales = other.scales.bfloat16()
    assert qt != other
    same_bytes = {"dtype": "int4", "shape": qt.shape, "group_size": 16}
    assert QuantTensor(qt.codes, qt.scales, **same_bytes) != qt
    with pytest.raises(TypeError):
        hash(qt)


def test_facts_and_repr(rng):
    qt = random_qt(rng, "uint3")
    assert (qt.nbytes, qt.shape, qt.device.type) == (5 * 14 + 2 * 5 * 3 * 2, (5, 37), "cpu")
    for word in ("uint3", "(5, 37)", "group_size=16", "zero", "float16"):
        assert word in repr(qt)
    assert qt.to("cpu").codes.data_ptr() == qt.codes.data_ptr()


def test_works_on_the_meta_device(rng):
    qt = random_qt(rng).to("meta")
    assert qt.shape == (5, 37) and qt.dequantize().shape == (5, 37)


@pytest.mark.parametrize("device", ["foo", None, 1.5, -3, "cuda:99"])
def test_a_device_that_is_not_there_is_named(device, rng, tmp_path):
    qt = random_qt(rng)
    qt.save(tmp_path / "weight")
    for move in (qt.to, lambda where: QuantTensor.load(tmp_path / "weight", device=where)):
        with pytest.raises(DeviceError, match="expected a device .*, got") as caught:
            move(device)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that finds no CUDA")
def test_cuda_without_cuda_is_a_device_error(rng):
    with pytest.raises(DeviceError, match="got 'cuda'"):
        random_qt(rng).cuda()


def test_what_is_no_file_is_refused(rng, tmp_path):
    for path in (None, 5, True, b"weight"):
        for use in (QuantTensor.load, random_qt(rng).save):
            with pytest.raises(DtypeError, match="path must be a str or an os.PathLike, got"):
                use(path)
    with pytest.raises(FormatError, match="got a folder"):
        QuantTensor.load(tmp_path)


_GOOD = {"codes": torch.zeros(4, 16, dtype=torch.uint8), "scales": torch.ones(4, 2, dtype=torch.float16)}
_BAD = {
    "codes of another type": ({"codes": _GOOD["codes"].int()}, DtypeError, "codes must be uint8, got int32"),
    "codes too short": ({"codes": _GOOD["codes"][:, :15]}, ShapeError, r"shape \(4, 16\), got \(4, 15\)"),
    "codes no tensor": ({"codes": [[0]]}, DtypeError, "codes must be a torch.Tensor, got list"),
    "scales float64": ({"scales": _GOOD["scales"].double()}, DtypeError, "scales must be one of .*, got float64"),
    "scales of too many groups": ({"scales": torch.ones(4, 3).half()}, ShapeError, r"\(4, 2\), got \(4, 3\)"),
    "scales elsewhere": ({"scales": _GOOD["scales"].to("meta")}, DeviceError, "device of codes, cpu, got meta"),
    "zeros unasked": ({"zeros": _GOOD["scales"]}, SchemeError, "goes with no zeros"),
    "zeros missing": ({"dtype": "uint4"}, SchemeError, "goes with zeros"),
    "zeros of another type": ({"dtype": "uint4", "zeros": torch.ones(4, 2)}, DtypeError, "zeros must be float16"),
    "zeros of another shape": ({"dtype": "uint4", "zeros": torch.ones(2, 4).half()}, ShapeError, "zeros must have"),
    "perm of int64": ({"perm": torch.arange(32)}, DtypeError, "perm must be int32, got int64"),
    "perm too short": ({"perm": torch.arange(31, dtype=torch.int32)}, ShapeError, r"perm must have shape \(32,\)"),
    "codebook of int": ({"codebook": torch.ones(16)}, SchemeError, "codebook goes with a uint type"),
    "codebook too short": ({"dtype": "uint4", "codebook": torch.ones(8)}, ShapeError, "codebook must have"),
    "group size": ({"group_size": 24}, SchemeError, "group_size must be one of"),
    "negative shape": ({"shape": (-4, 32)}, ShapeError, "whole numbers from 1"),
    "empty shape": ({"shape": (0, 32)}, ShapeError, "whole numbers from 1"),
    "three dimensions": ({"shape": (1, 4, 32)}, ShapeError, "two whole numbers"),
    "a number for the shape": ({"shape": 40}, ShapeError, r"shape must be a tuple \(N, K\), got int"),
    "no shape": ({"shape": None}, ShapeError, "got NoneType"),
    "a set for the shape": ({"shape": {4, 32}}, ShapeError, "got set"),
    "unknown type": ({"dtype": "int9"}, SchemeError, "did you mean"),
    "no group size": ({"group_size": None}, SchemeError, "group_size must be a whole number, got None"),
}


@pytest.mark.parametrize("change, error, words", _BAD.values(), ids=_BAD)
def test_what_does_not_go_together_is_refused(change, error, words):
    arguments = {**_GOOD, "dtype": "int4", "shape": (4, 32), "group_size": 16}
    QuantTensor(**arguments).validate()
    with pytest.raises(error, match=words):
        QuantTensor(**{**arguments, **change})


def test_validate_names_what_is_damaged(rng):
    def damaged(dtype, field, index, value, **fields):
        qt = random_qt(rng, dtype, **fields)
        getattr(qt, field)[index] = value
        return qt

    perm = torch.arange(37, dtype=torch.int32)
    samples = {
        r"up\.qweight: bits behind": damaged("int3", "codes", (1, -1), 0x80),
        r"up\.scales: .* 1 of 15 ": damaged("int3", "scales", (1, 1), float("nan")),
        r"up\.zeros: ": damaged("uint3", "zeros", (0, 0), float("inf")),
        r"up\.qweight: 1 codes mean NaN or infinity in float8_e4m3": damaged("float8_e4m3", "codes", (2, 3), 0x7F),
        r"up\.qweight: .*float8_e5m2": damaged("float8_e5m2", "codes", (2, 3), 0xFC),
        r"up\.perm: ": damaged("int3", "perm", 3, 4, perm=perm.clone()),
        r"up\.perm: .*0\.\.36": damaged("int3", "perm", 3, -1, perm=perm.clone()),
        r"up\.codebook: ": damaged("uint2", "codebook", 0, float("nan"), codebook=torch.ones(4)),
    }
    for words, qt in samples.items():
        with pytest.raises(FormatError, match=words):
            qt.validate("up")


def test_dequantize_wants_a_float_type(rng):
    with pytest.raises(DtypeError, match="got torch.int8"):
        random_qt(rng).dequantize(torch.int8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_give_the_same_bytes(rng):
    for wtype in WEIGHT_TYPES:
        qt = random_qt(rng, wtype.name, n=33, k=1027)
        there = qt.cuda().validate()
        assert there.device.type == "cuda" and there == qt and there.cpu() == qt
        assert torch.equal(there.unpack().cpu(), qt.unpack())
        assert torch.equal(QuantTensor.pack_codes(there.unpack(), wtype.bits).cpu(), qt.codes)
        torch.testing.assert_close(there.dequantize(torch.float32).cpu(), qt.dequantize(torch.float32))
