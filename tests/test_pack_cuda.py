"""Risk: the steps of the CUDA kernels that pack, unpack and expand a weight move a bit or change a value.

The steps run on the host, lane by lane; tests/gpu holds the kernels themselves against the same expectations.
"""

import numpy as np
import pytest
import torch

from lowbit.dtypes import WEIGHT_TYPES
from lowbit.pack import layout as layouts
from lowbit.tensor import QuantTensor
from native.build import load

SHAPES = [(1, 1), (17, 33), (64, 128), (65, 257), (64, 520)]


@pytest.fixture(scope="module")
def steps():
    return load("cuda_steps")


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n, k", SHAPES)
def test_steps_of_the_packer_give_the_layout_and_take_it_back(steps, bits, n, k):
    codes = np.random.default_rng(n).integers(0, 1 << bits, (n, k), dtype=np.uint8)
    stream = QuantTensor.pack_codes(torch.from_numpy(codes), bits)
    expected = layouts.pack_codes(stream, n, k, bits, "nvidia").numpy()
    np.testing.assert_array_equal(getattr(steps, f"pack{bits}")(stream.numpy(), n, k), expected)

    octets = getattr(steps, f"unpack{bits}")(expected, n, k)
    fields = (octets[:, :, None] >> np.arange(0, 8 * bits, bits, dtype=np.uint64)) & np.uint64((1 << bits) - 1)
    fields = fields.reshape(octets.shape[0], -1)
    np.testing.assert_array_equal(fields[:n, :k], codes)
    assert not fields[n:].any() and not fields[:, k:].any(), "pad codes are 0"
    assert not (octets >> np.uint64(8 * bits)).any() if bits < 8 else True


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_a_codebook_are_looked_up_at_every_place(steps, bits):
    table = np.random.default_rng(bits).normal(size=1 << bits).astype(np.float32)
    np.testing.assert_array_equal(getattr(steps, f"codebook{bits}")(table), np.repeat(table[:, None], 4, 1))


@pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)
def test_values_of_codes_are_exact_at_every_place(steps, wtype):
    offset = {"uint": 0.0, "int": float(1 << (wtype.bits - 1)), "float": 0.0}[wtype.kind]
    step = 1.0
    if wtype.name == "int1":
        step, offset = 2.0, 1.0
    name = f"int{wtype.bits}" if wtype.kind == "uint" else wtype.name
    found = getattr(steps, name)(step, offset)
    expected = np.array(wtype.values, dtype=np.float32)
    legal = [code for code in range(1 << wtype.bits) if code not in wtype.invalid_codes]
    for place in range(4):
        np.testing.assert_array_equal(found[legal, place].view(np.uint32), expected[legal].view(np.uint32))
