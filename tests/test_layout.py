"""Risk: two weights share a bit, a bit lies outside the buffer, or a kernel and the packer disagree where a bit is.

The reference walks memory in order and names what should lie at each bit, as docs/layouts.md says it: the direction
opposite to the formula under test.
"""

import numpy as np
import pytest
import torch

from lowbit.dtypes import WEIGHT_TYPES
from lowbit.errors import LowbitError
from lowbit.pack import layout as layouts
from native.build import load

SHAPES = [(1, 1), (17, 33), (16, 32), (64, 128), (65, 129), (64, 256), (65, 257), (3, 520)]
WIDTHS = range(1, 9)


@pytest.fixture(scope="module")
def native():
    return load("layout_math")


def grid(layout, shape, bits):
    """Row and column numbers of every stored place, padding included."""
    rows, cols = layouts.padded_shape(layout, *shape, bits)
    return np.arange(rows)[:, None], np.arange(cols)[None, :]


def walk_cpu(rows, cols, bits):
    """(n, k, bit of the code) of every bit of the cpu layout, in memory order."""
    for block in range(rows // 16):
        for chunk in range(cols // 32):
            low = 0
            for p in (8, 4, 2, 1):
                if not bits & p:
                    continue
                for vector in range(p):
                    for r in range(16):
                        for j in range(4):
                            for step in range(8 // p):
                                quad = vector * (8 // p) + step
                                for i in range(p):
                                    yield 16 * block + r, 32 * chunk + 4 * quad + j, low + i
                low += p


#: Which step of its byte the field at each place is, from bit 0 up.
STEPS = {8: [0], 4: [0, 1], 2: [0, 1, 2, 3], 1: [4, 5, 0, 1, 6, 7, 2, 3]}
#: k of a tile of the nvidia layout, and how many words of it a lane owns.
TILES = {8: (32, 4), 4: (64, 4), 2: (128, 4), 1: (128, 2)}


def walk_nvidia(rows, cols, bits):
    """The same of the nvidia layout: bits of a word are j, c, (fragment, row half), bit of the field."""
    low = 0
    for p in (8, 4, 2, 1):
        if not bits & p:
            continue
        span, words = TILES[p]
        for block in range(rows // 16):
            for tile in range(cols // span):
                for lane in range(32):
                    g, t = lane // 4, lane % 4
                    for word in range(words):
                        for j in (0, 1):
                            for c in (0, 1):
                                for step in STEPS[p]:
                                    fragment, h = divmod(word * (8 // p) + step, 2)
                                    k = tile * span + 16 * fragment + 2 * t + 8 * c + j
                                    for i in range(p):
                                        yield 16 * block + g + 8 * h, k, low + i
        low += p


WALKS = {"cpu": walk_cpu, "nvidia": walk_nvidia}


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_formula_names_the_bits_that_lie_there(layout, bits):
    shape = (20, 40)
    n, k = grid(layout, shape, bits)
    owner = {}
    for spot in layouts.spots(layout, n, k, bits, shape):
        start = np.broadcast_to(8 * spot.byte + spot.bit, (n.size, k.size))
        for i in range(spot.width):
            for (row, col), at in np.ndenumerate(start + i):
                owner[int(at)] = (row, col, spot.low + i)
    walked = list(WALKS[layout](n.size, k.size, bits))
    assert len(owner) == len(walked)
    assert [owner[at] for at in range(len(walked))] == walked


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_has_one_owner(layout, bits, shape):
    n, k = grid(layout, shape, bits)
    total = 8 * int(np.prod(layouts.codes_shape(layout, *shape, bits)))
    count = np.zeros(total, dtype=np.int64)
    for spot in layouts.spots(layout, n, k, bits, shape):
        assert np.all(spot.bit + spot.width <= 8), "a field crosses a byte"
        start = (8 * spot.byte + spot.bit).ravel()
        assert start.min() >= 0 and start.max() + spot.width <= total
        for i in range(spot.width):
            np.add.at(count, start + i, 1)
    # One owner each, and none without: the pads together with the weights fill the buffer.
    assert n.size * k.size * bits == total
    assert np.all(count == 1)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_cpp_formula_equals_python(native, layout, bits):
    which = layouts.LAYOUTS.index(layout)
    for shape in SHAPES:
        n, k = grid(layout, shape, bits)
        nbytes = int(np.prod(layouts.codes_shape(layout, *shape, bits)))
        assert native.padded(which, *shape, bits) == (n.size, k.size, nbytes)
        for spot in layouts.spots(layout, n, k, bits, shape):
            assert native.plane_low(bits, spot.width) == spot.low
            expected = np.broadcast_to(8 * spot.byte + spot.bit, (n.size, k.size))
            np.testing.assert_array_equal(native.positions(which, *shape, bits, spot.width), expected)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_every_row_of_a_block_has_a_place_for_its_scale(native, layout):
    places = [layouts.group_place(layout, row) for row in range(16)]
    assert sorted(places) == list(range(16))
    assert places == [native.group_place(layouts.LAYOUTS.index(layout), row) for row in range(16)]
    if layout == "nvidia":
        assert all(places[g + 8] == places[g] + 1 and places[g] % 2 == 0 for g in range(8))


def test_cpp_order_of_8_bit_activations(native):
    assert [native.stored_k(i) for i in range(16)] == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    for p in (1, 2, 4, 8):
        assert native.byte_mask(p) == int.from_bytes(bytes([2**p - 1] * 4), "little")
        assert native.half_mask(p) == int.from_bytes(bytes([2**p - 1, 0] * 2), "little")


@pytest.mark.parametrize("wtype", WEIGHT_TYPES, ids=str)
def test_planes_cover_the_code_once(wtype):
    found = [low + i for p, low in layouts.planes(wtype.bits) for i in range(p)]
    assert found == list(range(wtype.bits))


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_steps_of_a_byte_fill_it_alike_in_both_languages(native, p):
    found = [layouts.step_bit(p, step) for step in range(8 // p)]
    assert sorted(found) == list(range(0, 8, p))
    assert found == [native.step_bit(p, step) for step in range(8 // p)]
    if p == 1:
        assert found == [2, 3, 6, 7, 0, 1, 4, 5]


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_a_step_of_128_k_is_whole_tiles_of_one_load_a_lane(native, p):
    assert layouts.STEP_K == native.step_k == 128
    assert (layouts.tile_k("nvidia", p), layouts.lane_bytes(p) // 4) == TILES[p]
    assert (native.tile_k(1, p), native.lane_bytes(p) // 4) == TILES[p]
    assert layouts.STEP_K % TILES[p][0] == 0


@pytest.mark.parametrize("bits", WIDTHS)
def test_padding_is_that_of_every_width(bits):
    assert layouts.padded_shape("nvidia", 65, 129, bits) == (128, 256)
    assert layouts.padded_shape("nvidia", 64, 128, bits) == (64, 128)
    assert layouts.padded_shape("nvidia", 1, 1, bits) == (64, 128)
    assert layouts.padded_shape("cpu", 17, 33, bits) == (32, 64)
    assert layouts.padded_shape("cpu", 16, 32, bits) == (16, 32)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_formula_takes_integers_arrays_and_tensors(layout):
    shape = (40, 300)
    n, k = grid(layout, shape, 7)
    arrays = layouts.spots(layout, n, k, 7, shape)
    tensors = layouts.spots(layout, torch.from_numpy(n), torch.from_numpy(k), 7, shape)
    numbers = layouts.spots(layout, 21, 77, 7, shape)
    for a, t, i in zip(arrays, tensors, numbers):
        np.testing.assert_array_equal(a.byte, t.byte.numpy())
        np.testing.assert_array_equal(np.broadcast_to(a.bit, a.byte.shape), t.bit.expand(t.byte.shape).numpy())
        assert (a.byte[21, 77], np.broadcast_to(a.bit, a.byte.shape)[21, 77]) == (i.byte, i.bit)


def test_unknown_layout_is_named():
    with pytest.raises(LowbitError, match="'nvdia'.*nvidia"):
        layouts.spots("nvdia", 0, 0, 4, (16, 32))
