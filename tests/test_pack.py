"""Risk: a weight comes back changed from its packed form, or lies elsewhere than the index formula says."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.dtypes import weight_type
from lowbit.errors import DeviceError, DtypeError, FormatError, SchemeError, ShapeError
from lowbit.pack import PackedWeight, pack_weight
from lowbit.pack import layout as layouts
from lowbit.scheme import EVEN_SCALES, OP_ZERO_KINDS, WHOLE_ZEROS, ZERO_KINDS
from lowbit.tensor import QuantTensor

WIDTHS = range(1, 9)
SHAPES = [(n, k) for n in (1, 17) for k in (1, 16, 33, 8200)] + [(64, 128), (64, 256), (65, 257)]


def stream_of(n, k, bits, seed=0):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (n, k), dtype=np.uint8)
    return codes, QuantTensor.pack_codes(torch.from_numpy(codes), bits)


def by_formula(codes, bits, layout):
    """Packed bytes, field by field from the index formula, into a buffer of zeros."""
    n, k = np.indices(codes.shape)
    shape = layouts.codes_shape(layout, *codes.shape, bits)
    out = np.zeros(int(np.prod(shape)), dtype=np.uint8)
    for spot in layouts.spots(layout, n, k, bits, codes.shape):
        fields = (codes >> spot.low) & ((1 << spot.width) - 1)
        np.bitwise_or.at(out, spot.byte, (fields << spot.bit).astype(np.uint8))
    return torch.from_numpy(out).view(shape)


def example(bits=4, n=40, k=200, group_size=64, zero_kind="zero", scale_type=torch.float16, perm=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    groups = 1 if group_size == -1 else -(-k // group_size)
    scales = torch.randn(n, groups, generator=generator).to(scale_type)
    zeros = None if zero_kind == "none" else torch.randn(n, groups, generator=generator).to(scale_type)
    order = torch.randperm(k, generator=generator).int() if perm else None
    options = {"dtype": f"uint{bits}", "group_size": group_size, "zero_kind": zero_kind, "perm": order}
    return QuantTensor.from_codes(codes, scales, zeros, **options)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_torch_packer_follows_the_formula(layout, bits):
    for n, k in SHAPES:
        codes, stream = stream_of(n, k, bits)
        result = layouts.pack_codes(stream, n, k, bits, layout)
        assert torch.equal(result, by_formula(codes, bits, layout))
        assert torch.equal(layouts.unpack_codes(result, n, k, bits, layout), stream)


def test_torch_packer_joins_its_row_steps(monkeypatch):
    monkeypatch.setattr(layouts, "_row_steps", lambda n, cols: [slice(i, min(i + 64, n)) for i in range(0, n, 64)])
    for layout in layouts.LAYOUTS:
        codes, stream = stream_of(150, 70, 3)
        result = layouts.pack_codes(stream, 150, 70, 3, layout)
        assert torch.equal(result, by_formula(codes, 3, layout))
        assert torch.equal(layouts.unpack_codes(result, 150, 70, 3, layout), stream)


@given(
    bits=st.integers(1, 8),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group_size=st.sampled_from([16, 32, 64, 128, 256, -1]),
    zero_kind=st.sampled_from(["none", "zero", "min"]),
    scale_type=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    perm=st.booleans(),
    layout=st.sampled_from(layouts.LAYOUTS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_unpack_gives_back_the_weight(bits, n, k, group_size, zero_kind, scale_type, perm, layout, seed):
    qt = example(bits, n, k, group_size, zero_kind, scale_type, perm, seed)
    before = qt.clone()
    back = pack_weight(qt, layout=layout).unpack()
    assert back == qt and qt == before


@pytest.mark.parametrize("layout, step", [("cpu", 16), ("nvidia", 64)])
def test_scales_of_16_rows_lie_together(layout, step):
    qt = example(n=70, k=200, group_size=64)
    pw = pack_weight(qt, layout=layout)
    rows = -(-70 // step) * step
    for packed_groups, canonical in ((pw.scales, qt.scales), (pw.zeros, qt.zeros)):
        assert packed_groups.shape == (rows // 16, 4, 16) and packed_groups.is_contiguous()
        for n in range(rows):
            for g in range(4):
                place = n % 16 if layout == "cpu" else 2 * (n % 8) + n % 16 // 8
                assert packed_groups[n // 16, g, place] == (canonical[n, g] if n < 70 else 0)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("n", [16, 64, 70])
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_packed_scales_have_their_own_memory_and_come_back(layout, n, groups):
    values = torch.randn(n, groups)
    before = values.clone()
    packed = layouts.pack_groups(values, layout)
    back = layouts.unpack_groups(packed, n, layout, values.dtype)
    assert torch.equal(back, values) and back.is_contiguous()
    packed.zero_()
    assert torch.equal(values, before) and torch.equal(back, values)


def test_packed_weight_says_what_it_is():
    qt = example(bits=3, n=40, k=200, perm=True)
    pw = pack_weight(qt)
    assert isinstance(pw, PackedWeight)
    assert (pw.shape, pw.scheme, pw.layout, pw.device) == ((40, 200), qt.scheme, "cpu", torch.device("cpu"))
    assert pw.native and not pack_weight(qt, layout="nvidia").native
    assert (str(pw.dtype), pw.group_size, pw.zero_kind) == ("uint3", 64, "zero")
    assert torch.equal(pw.perm, qt.perm)
    for word in ("uint3", "(40, 200)", "group_size=64", "'zero'", "float16", "perm", "'cpu'"):
        assert word in repr(pw)
    assert pw.to("cpu") is pw
    for dtype in (None, torch.float32, torch.float64):
        assert torch.equal(pw.dequantize(dtype), qt.dequantize(dtype))
    for twin in (copy.deepcopy(pw), pickle.loads(pickle.dumps(pw))):
        assert twin.unpack() == qt and twin.layout == pw.layout


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_packed_size_is_the_canonical_size(layout, bits):
    """The memory rule, on a shape of real layers: padding and scales included, within 1.05 of the canonical bytes."""
    qt = example(bits, n=1000, k=2048, zero_kind="none", group_size=128)
    pw = pack_weight(qt, layout=layout)
    assert pw.nbytes == sum(t.nbytes for t in (pw.codes, pw.scales))
    assert pw.nbytes <= 1.05 * qt.nbytes
    held = [v.untyped_storage().nbytes() for v in vars(pw).values() if isinstance(v, torch.Tensor)]
    assert sum(held) <= 1.05 * qt.nbytes


def test_unpacked_weight_has_its_own_memory():
    qt = example(n=16, k=64, group_size=-1)
    pw = pack_weight(qt)
    back = pw.unpack()
    for tensor in (back.codes, back.scales, back.zeros):
        tensor.zero_()
    assert pw.unpack() == qt


def test_compile_reads_the_attributes():
    pw = pack_weight(example(perm=True))

    @torch.compile(fullgraph=True, backend="eager")
    def use(x):
        if pw.perm is not None and pw.layout == "cpu" and pw.scheme.weight.bits == 4 and pw.zero_kind == "zero":
            x = x[..., pw.perm]
        return x * pw.scales.float().sum() + pw.shape[0] + pw.codes.numel() + pw.group_size

    x = torch.randn(3, 200)
    expected = x[..., pw.perm] * pw.scales.float().sum() + 40 + pw.codes.numel() + 64
    torch.testing.assert_close(use(x), expected)


@pytest.mark.parametrize("what", [torch.ones(4, 4), None, "int4"])
def test_only_a_quant_tensor_can_be_packed(what):
    with pytest.raises(DtypeError, match="expected a QuantTensor"):
        pack_weight(what)
    with pytest.raises(DtypeError, match="got PackedWeight"):
        pack_weight(pack_weight(example()))


@pytest.mark.parametrize("device", ["meta", "nowhere", "cuda:99", 1.5, None])
def test_a_device_without_kernels_is_named(device):
    with pytest.raises(DeviceError, match="expected a"):
        pack_weight(example(), device)
    with pytest.raises(DeviceError, match="expected a"):
        pack_weight(example()).to(device)


def test_a_weight_without_values_is_refused():
    with pytest.raises(DeviceError, match="got one on meta"):
        pack_weight(example(perm=True).to("meta"))


@pytest.mark.parametrize("index, value", [(slice(None), 0), (slice(None), 10**6), (3, -1), (3, 200)], ids=str)
def test_an_order_of_columns_that_is_none_is_not_packed(index, value):
    """Kernels would read beside x, or the wrong columns of it."""
    qt = example(perm=True)
    qt.perm[index] = value
    with pytest.raises(FormatError, match=r"weight.perm: expected a permutation of 0\.\.199"):
        pack_weight(qt)


def test_a_codebook_is_kept():
    qt = example(zero_kind="none")
    book = QuantTensor(qt.codes, qt.scales, dtype="uint4", shape=qt.shape, group_size=64, codebook=torch.arange(16.0))
    pw = pack_weight(book)
    assert pw.unpack() == book and pack_weight(book, layout="nvidia").unpack() == book and "codebook" in repr(pw)
    assert pw.nbytes == pack_weight(qt).nbytes + 64 and pickle.loads(pickle.dumps(pw)).unpack() == book


def test_unknown_layout_is_refused():
    qt = example()
    with pytest.raises(SchemeError, match="'amd'"):
        pack_weight(qt, layout="amd")


def test_torch_packer_checks_shapes():
    with pytest.raises(ShapeError, match="expected a bit stream of shape"):
        layouts.pack_codes(torch.zeros(4, 9, dtype=torch.uint8), 4, 16, 4, "cpu")
    with pytest.raises(ShapeError, match="expected packed codes of shape"):
        layouts.unpack_codes(torch.zeros(4, 9, dtype=torch.uint8), 4, 16, 4, "nvidia")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_on_a_gpu_gives_the_bytes_of_the_host(bits):
    qt = example(bits, n=150, k=700, perm=True)
    host, device = pack_weight(qt, layout="nvidia"), pack_weight(qt, "cuda")
    assert device.device.type == "cuda" and device.layout == "nvidia"
    assert torch.equal(device.codes.cpu(), host.codes) and torch.equal(device.scales.cpu(), host.scales)
    assert device.unpack() == qt
    back = device.to("cpu")
    assert back.layout == "cpu" and torch.equal(back.codes, pack_weight(qt).codes) and back.unpack() == qt


@pytest.mark.parametrize(
    ("zeros", "kind"),
    [
        ([0, 3, 15], "whole"),
        ([0, 16, 1], "whole"),  # GPTQ's oldest format: a code and one
        ([0, 3.5, 1], "zero"),
        ([0, -1, 1], "zero"),
        ([0, 17, 1], "zero"),
        ([0, float("nan"), 1], "zero"),
    ],
    ids=str,
)
def test_kernels_are_told_of_zeros_that_are_whole_and_only_of_them(zeros, kind):
    """They make such a zero part of a number with few digits: any other would be rounded."""
    codes = torch.zeros(3, 32, dtype=torch.uint8)
    scales, held = torch.ones(3, 1, dtype=torch.float16), torch.tensor(zeros, dtype=torch.float16)[:, None]
    qt = QuantTensor.from_codes(codes, scales, held, dtype="uint4", group_size=32)
    number = pack_weight(qt, layout="nvidia").numbers[-1]
    assert OP_ZERO_KINDS[number] == "zero" and (number == WHOLE_ZEROS) == (kind == "whole")
    assert pack_weight(qt).numbers[-1] == ZERO_KINDS.index("zero"), "kernels for CPUs know no difference"


@pytest.mark.parametrize(
    ("dtype", "scales", "unit"),
    [
        ("int4", [0.01, 0.02], 5),
        ("int4", [0.0625, 0.1248], 5),  # a factor of 65431: the largest number of fp16 is 65504
        ("int4", [0.0625, 0.125], 6),
        ("int4", [-0.01, 0.02], 5),
        ("int4", [0.4, 0.9], 8),
        ("int4", [3.0, 31.0], 13),
        ("int4", [3.0, 33.0], None),
        ("int4", [0.0, 0.0], 5),  # a row of zeros has no digits to lose
        ("int4", [0.0, 0.0013], 5),  # one group of two has enough
        ("int4", [0.0, 0.0004], None),
        ("int4", [0.01, float("nan")], None),
        ("int4", [0.01, float("inf")], None),
        ("int8", [0.01, 0.06], 4),
        ("int1", [0.01, 0.06], 5),
        ("int1", [0.1, 0.13], 7),  # a code is worth two scales
    ],
    ids=str,
)
def test_kernels_are_told_of_scales_that_are_even_and_only_of_them(dtype, scales, unit):
    """They make fp16 numbers of values in such a unit: others would be infinite, or lose digits."""
    codes = torch.zeros(3, 256, dtype=torch.uint8)
    held = torch.tensor([scales] * 3, dtype=torch.float32)
    for scale_type in (torch.float16, torch.bfloat16, torch.float32):
        qt = QuantTensor.from_codes(codes, held.to(scale_type), None, dtype=dtype, group_size=128)
        number = pack_weight(qt, layout="nvidia").numbers[-1]
        assert OP_ZERO_KINDS[number] == "none" and pack_weight(qt).numbers[-1] == 0
        wanted = unit if scale_type == torch.float16 else None
        assert number == (0 if wanted is None else EVEN_SCALES + wanted)


@pytest.mark.parametrize("group", [128, -1])
@pytest.mark.parametrize("bits", range(1, 9))
def test_values_of_even_scales_have_digits_enough_in_fp16(bits, group):
    """As kernels make them, at the ends of what is even: 5e-4 of a product, 1.2e-3 of a row, of which
    8e-4 is what rounding costs without a unit."""
    wtype, chance = weight_type(f"int{bits}"), np.random.default_rng(bits)
    values, (n, k) = np.array(wtype.values), (48, 2048)
    step, counted, groups = values[1] - values[0], {True: 0, False: 0}, 1 if group == -1 else k // group
    for large, small in itertools.product(
        (2.0**-12, 0.003, 0.012, 0.03, 0.3), (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 1e-4)
    ):
        rows = np.where(np.arange(n) % 3 == 0, large, large * small)[:, None]
        scales = (rows * chance.uniform(0.7, 1.0, (n, groups)) / abs(values).max()).astype(np.float16)
        wanted = chance.standard_normal((n, k)) * abs(values).max() / 3
        codes = abs(wanted[..., None] - values).argmin(-1).astype(np.uint8)
        qt = QuantTensor.from_codes(torch.tensor(codes), torch.tensor(scales), None, dtype=wtype, group_size=group)
        kind = pack_weight(qt, layout="nvidia").numbers[-1]
        counted[kind >= EVEN_SCALES] += 1
        if kind < EVEN_SCALES:
            continue
        unit, s = 2.0 ** (kind - EVEN_SCALES), scales.astype(np.float64).repeat(k // groups, 1)
        found = np.float16(s * step / unit * 2.0**9).astype(np.float64)
        factor, addend = np.float16(found * 2.0**15), np.float16(found * 2.0**-9 * values[0] / step)
        made = np.float16(codes * 2.0**-24 * factor.astype(np.float64) + addend.astype(np.float64)) * unit
        assert np.isfinite(factor).all() and np.isfinite(made).all()
        exact, drawn = s * values[codes], chance.standard_normal((k, 32))
        for x in (drawn, abs(drawn) + 1, 2 * drawn / (1 + np.exp(-2 * drawn))):
            off, size = (made - exact) @ x, exact @ x
            assert np.linalg.norm(off) < 5e-4 * np.linalg.norm(size)
            # Of rows by what they are on average: those of x of one sign may cancel.
            length = np.linalg.norm(exact, axis=1) * np.linalg.norm(x) / k**0.5
            assert (np.linalg.norm(off, axis=1) <= 1.2e-3 * length).all()
    assert min(counted.values()) >= 4, counted
