"""Risk: a GPU packs other bytes than the host, misses some, or writes beside its buffers."""

import pytest
import torch

import lowbit
from lowbit.bit_stream import stream_bytes
from lowbit.commands.selftest import random_weight
from lowbit.dtypes import WEIGHT_TYPES, weight_type
from lowbit.errors import DeviceError
from lowbit.pack import layout as layouts
from lowbit.tensor import QuantTensor

from .kernels import needs_kernels

pytestmark = needs_kernels

U8, NVIDIA = torch.uint8, layouts.LAYOUTS.index("nvidia")
#: Rows and columns around the borders of tiles (16 rows; 32 to 128 k) and of blocks (1024 k).
SHAPES = [(1, 1), (1, 16), (17, 33), (33, 129), (16, 1024), (15, 1023), (65, 1025), (64, 2048), (3, 8200), (130, 2311)]


def stream_of(n, k, bits, seed=0):
    codes = torch.randint(0, 1 << bits, (n, k), dtype=U8, generator=torch.Generator().manual_seed(seed))
    return QuantTensor.pack_codes(codes, bits)


def placed(tensor, offset):
    """The tensor on the GPU at an offset from an aligned address, and the memory around it, filled with 0xA5."""
    memory = torch.full((tensor.numel() + offset + 64,), 0xA5, dtype=U8, device="cuda")
    place = memory[offset : offset + tensor.numel()].view(tensor.shape)
    return place, memory


def untouched(memory, offset, size):
    return bool((memory[:offset] == 0xA5).all() and (memory[offset + size :] == 0xA5).all())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n, k", SHAPES)
def test_kernels_give_the_bytes_of_the_host_from_any_address(bits, n, k):
    stream = stream_of(n, k, bits, seed=n + k)
    expected = layouts.pack_codes(stream, n, k, bits, "nvidia")
    for offset in (0, 1, 2, 3, 7):
        source, _ = placed(stream, offset)
        source.copy_(stream)
        packed, around = placed(expected, 16)
        torch.ops.lowbit.pack_codes(source, n, k, bits, NVIDIA, packed)
        assert torch.equal(packed.cpu(), expected) and untouched(around, 16, packed.numel()), offset
        back, around = placed(stream, offset)
        torch.ops.lowbit.unpack_codes(packed, n, k, bits, NVIDIA, back)
        assert torch.equal(back.cpu(), stream) and untouched(around, offset, back.numel()), offset


@pytest.mark.parametrize("bits", [1, 3, 5, 7])
def test_bits_behind_the_last_code_are_ignored(bits):
    n, k = 5, 1029
    stream = stream_of(n, k, bits)
    expected = layouts.pack_codes(stream, n, k, bits, "nvidia")
    stream[:, -1] |= 0xFF << (k * bits % 8) & 0xFF
    packed = torch.empty_like(expected, device="cuda")
    torch.ops.lowbit.pack_codes(stream.cuda(), n, k, bits, NVIDIA, packed)
    assert torch.equal(packed.cpu(), expected)


@pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)
def test_weight_packs_like_on_the_host_and_comes_back(wtype):
    kinds = ("zero", "min") if wtype.kind == "uint" else ("none", "zero", "min")
    for i, kind in enumerate(kinds):
        for group_size in (16, 128, -1):
            scale_type = (torch.float16, torch.bfloat16, torch.float32)[i]
            chance = torch.Generator().manual_seed(i)
            qt = random_weight(wtype, (83, 519), group_size, kind, scale_type, chance)
            host, pw = lowbit.pack_weight(qt, layout="nvidia"), lowbit.pack_weight(qt, "cuda")
            assert pw.native and pw.layout == "nvidia" and pw.device.type == "cuda"
            for name in ("codes", "scales", "zeros"):
                a, b = getattr(host, name), getattr(pw, name)
                assert (a is None and b is None) or torch.equal(a.view(U8), b.cpu().view(U8)), name
            assert pw.unpack() == qt and pw.to("cpu").unpack() == qt and pw.to("cpu").to("cuda").unpack() == qt


def test_a_captured_graph_is_no_place_to_pack():
    qt = random_weight(weight_type("int4"), (64, 256), 128, "none", torch.float16, torch.Generator())
    pw, qt = lowbit.pack_weight(qt, "cuda"), qt.cuda()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(DeviceError, match="captured"):
            lowbit.pack_weight(qt, "cuda")
        with pytest.raises(DeviceError, match="captured"):
            pw.unpack()


def test_ops_refuse_what_the_kernels_cannot_take():
    stream = stream_of(16, 64, 4).cuda()
    packed = torch.zeros(layouts.codes_shape("nvidia", 16, 64, 4), dtype=U8, device="cuda")
    moved = torch.zeros(packed.numel() + 1, dtype=U8, device="cuda")[1:]
    for arguments, message in (
        ((stream, 16, 64, 4, 0, torch.zeros(1, 2, 256, dtype=U8, device="cuda")), "layout nvidia alone"),
        ((stream, 16, 64, 4, NVIDIA, moved), "multiple of 16 bytes"),
        ((stream, 16, 65, 4, NVIDIA, packed), "bit stream must have shape"),
        ((stream, 16, 64, 4, NVIDIA, packed.cpu()), "must be on cuda"),
        ((packed[:512].view(16, 32), 16, 64, 4, NVIDIA, packed), "must not share memory"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.lowbit.pack_codes(*arguments)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_that_is_not_current():
    qt = random_weight(weight_type("uint3"), (100, 300), 64, "zero", torch.float16, torch.Generator())
    with torch.cuda.device(0):
        pw = lowbit.pack_weight(qt, "cuda:1")
        assert pw.device.index == 1 and pw.unpack() == qt
        assert lowbit.pack_weight(qt, "cuda:0").to("cuda:1").unpack() == qt
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_large_layer_comes_back(bits):
    """28672 x 8192, the largest layer of a 70B model."""
    n, k = 28672, 8192
    stream = torch.randint(0, 256, (n, stream_bytes(k, bits)), dtype=U8, device="cuda")
    packed = torch.empty(layouts.codes_shape("nvidia", n, k, bits), dtype=U8, device="cuda")
    back = torch.zeros_like(stream)
    torch.ops.lowbit.pack_codes(stream, n, k, bits, NVIDIA, packed)
    torch.ops.lowbit.unpack_codes(packed, n, k, bits, NVIDIA, back)
    assert torch.equal(back, stream)
