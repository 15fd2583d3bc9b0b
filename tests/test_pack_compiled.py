"""Risk: the compiled packer gives other bytes than the torch packer, writes outside its buffers, or hangs."""

import os
import signal

import numpy as np
import pytest
import torch

from lowbit import extension
from lowbit.errors import ExtensionError
from lowbit.pack import layout as layouts
from lowbit.pack import pack_weight, packed
from lowbit.tensor import QuantTensor

U8 = torch.uint8
SHAPES = [(n, k) for n in (1, 17) for k in (1, 16, 33, 8200)] + [(64, 128), (64, 256), (65, 257), (200, 300)]


@pytest.fixture(scope="module")
def native():
    try:
        extension.load()
    except ExtensionError as error:
        pytest.skip(str(error))
    return torch.ops.lowbit


def stream_of(n, k, bits, seed=0):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (n, k), dtype=np.uint8)
    return QuantTensor.pack_codes(torch.from_numpy(codes), bits)


def weight(bits, n=40, k=200):
    return QuantTensor(stream_of(n, k, bits), torch.randn(n, 4).half(), dtype=f"int{bits}", shape=(n, k), group_size=64)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_compiled_packer_equals_torch(native, layout, bits):
    which = layouts.LAYOUTS.index(layout)
    for n, k in SHAPES:
        stream = stream_of(n, k, bits, seed=k)
        expected = layouts.pack_codes(stream, n, k, bits, layout)
        # Outputs come uninitialized: every byte must be written.
        result = torch.full_like(expected, 0xA5)
        native.pack_codes(stream, n, k, bits, which, result)
        assert torch.equal(result, expected), (n, k)
        back = torch.full_like(stream, 0xA5)
        native.unpack_codes(result, n, k, bits, which, back)
        assert torch.equal(back, stream), (n, k)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_bits_behind_the_last_code_never_reach_a_product(native, layout):
    stream = stream_of(3, 5, 3)
    expected = layouts.pack_codes(stream, 3, 5, 3, layout)
    stream[:, -1] |= 0x80
    assert torch.equal(layouts.pack_codes(stream, 3, 5, 3, layout), expected)
    result = torch.empty_like(expected)
    native.pack_codes(stream, 3, 5, 3, layouts.LAYOUTS.index(layout), result)
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n": -1}, "n and k must be"),
        ({"k": 1 << 40}, "n and k must be"),
        ({"bits": 0}, "bits must be"),
        ({"bits": 9}, "bits must be"),
        ({"layout": 2}, "layout must be"),
        ({"n": 17}, "bit stream must have shape"),
        ({"k": 41}, "bit stream must have shape"),
        ({"stream": torch.zeros(320, dtype=U8)}, "bit stream must have shape"),
        ({"stream": torch.zeros(16, 20, dtype=torch.int8)}, "bit stream must be uint8"),
        ({"stream": torch.zeros(20, 16, dtype=U8).t()}, "bit stream must be contiguous"),
        ({"packed": torch.full((1, 2, 255), 7, dtype=U8)}, "packed codes must have shape"),
        ({"packed": torch.full((512,), 7, dtype=U8)}, "packed codes must have shape"),
        ({"packed": torch.full((1, 2, 256), 7, dtype=torch.int32)}, "packed codes must be uint8"),
        ({"packed": torch.full((1, 2, 512), 7, dtype=U8)[..., ::2]}, "packed codes must be contiguous"),
    ],
)
def test_compiled_packer_checks_before_it_touches_memory(native, changes, message):
    stream, form = torch.zeros(16, 20, dtype=U8), torch.full((1, 2, 256), 7, dtype=U8)
    arguments = {"stream": stream, "n": 16, "k": 40, "bits": 4, "layout": 0, "packed": form} | changes
    stream, form, sizes = arguments["stream"], arguments["packed"], [arguments[a] for a in ("n", "k", "bits", "layout")]
    with pytest.raises(RuntimeError, match=message):
        native.pack_codes(stream, *sizes, form)
    with pytest.raises(RuntimeError, match=message):
        native.unpack_codes(form, *sizes, stream)
    assert (form == 7).all() and (stream == 0).all()


def test_compiled_packer_refuses_shared_memory(native):
    memory = torch.zeros(1024, dtype=U8)
    with pytest.raises(RuntimeError, match="must not share memory"):
        native.pack_codes(memory[100:420].view(16, 20), 16, 40, 4, 0, memory[:512].view(1, 2, 256))


def test_missing_extension_packs_the_same_bytes(native, monkeypatch):
    qt = weight(5)
    compiled = {layout: pack_weight(qt, layout=layout) for layout in layouts.LAYOUTS}
    monkeypatch.setattr(packed, "_native", lambda name, device, layout: None)
    for layout, pw in compiled.items():
        assert torch.equal(pack_weight(qt, layout=layout).codes, pw.codes)
        assert pw.unpack() == qt


def test_compiled_packer_is_used_when_it_is_there(native, monkeypatch):
    monkeypatch.setattr(layouts, "pack_codes", None)
    monkeypatch.setattr(layouts, "unpack_codes", None)
    qt = weight(4)
    assert pack_weight(qt).unpack() == qt


def test_threads_give_the_same_bytes(native):
    n, k = 1040, 520
    stream = stream_of(n, k, 6)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            out = torch.empty(layouts.codes_shape("cpu", n, k, 6), dtype=U8)
            native.pack_codes(stream, n, k, 6, 0, out)
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


def test_a_forked_child_packs(native):
    stream = stream_of(1040, 520, 4)
    out = torch.empty(layouts.codes_shape("cpu", 1040, 520, 4), dtype=U8)
    native.pack_codes(stream, 1040, 520, 4, 0, out)  # torch's threads are running now
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a hang ends as a signal
        result = torch.empty_like(out)
        native.pack_codes(stream, 1040, 520, 4, 0, result)
        os._exit(0 if result.numpy().tobytes() == out.numpy().tobytes() else 1)
    assert os.waitpid(child, 0)[1] == 0
