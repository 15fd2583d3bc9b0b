"""Risk: the packed words, shifted and masked as kernels do it, are not the operand that the instruction expects.

Each instruction is simulated from the register ownership that the PTX ISA documents: registers of all lanes are put
together to matrices, multiplied, and compared with the product of the unpacked codes. All numbers are exact.
"""

import numpy as np
import pytest
import torch

from lowbit.pack import layout as layouts
from lowbit.tensor import QuantTensor

LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4  # "groupID" and "threadID_in_group" of the PTX ISA
WIDTHS = range(1, 9)
# 8-bit activations are stored like this inside each 16 k.
STORED_K = np.array([0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15])
# Of a plane of p bits: k of a tile, words of a lane in it, and the bit of a byte where each step starts.
SPAN = {1: 128, 2: 128, 4: 64, 8: 32}
WORDS = {1: 2, 2: 4, 4: 4, 8: 4}
BIT = {1: [2, 3, 6, 7, 0, 1, 4, 5], 2: [0, 2, 4, 6], 4: [0, 4], 8: [0]}


class Packed:
    """A packed weight as a kernel sees it: 32-bit words [row block][tile][lane][4, or 2 of 1 bit] of each plane."""

    def __init__(self, bits, n, k, seed):
        rng = np.random.default_rng(seed)
        self.codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
        stream = QuantTensor.pack_codes(torch.from_numpy(self.codes), bits)
        packed = layouts.pack_codes(stream, n, k, bits, "nvidia").numpy()
        self.rows, self.cols = layouts.padded_shape("nvidia", n, k, bits)
        self.padded = np.zeros((self.rows, self.cols), dtype=np.int64)
        self.padded[:n, :k] = self.codes
        self.planes, start = [], 0
        for p, low in layouts.planes(bits):
            size = self.rows * self.cols * p // 8
            tiles = (self.rows // 16, self.cols // SPAN[p], 32, WORDS[p])
            words = packed[start : start + size].view("<u4").reshape(tiles)
            self.planes.append((p, low, words))
            start += size
        assert start == packed.size

    def step(self, words, p, block, fragment, h):
        """The word of each lane that holds row half h of a fragment of 16 k, shifted to its step."""
        per_tile = SPAN[p] // 16
        unit = 2 * (fragment % per_tile) + h
        return words[block, fragment // per_tile, :, unit // (8 // p)] >> np.uint32(BIT[p][unit % (8 // p)])

    def halves(self, block, fragment):
        """A of the 16-bit instructions: codes [lane][register][half], by `(w >> 8c) & mask` for each plane."""
        out = np.zeros((32, 4, 2), dtype=np.int64)
        for p, low, words in self.planes:
            for h in (0, 1):
                word = self.step(words, p, block, fragment, h)
                for c in (0, 1):
                    pair = (word >> np.uint32(8 * c)) & np.uint32(0x00010001 * (2**p - 1))
                    out[:, h + 2 * c, 0] += (pair & 0xFFFF).astype(np.int64) << low
                    out[:, h + 2 * c, 1] += (pair >> 16).astype(np.int64) << low
        return out

    def bytes(self, block, pair):
        """A of the 8-bit instructions: codes [lane][register][byte] of fragments 2*pair and 2*pair + 1."""
        out = np.zeros((32, 4, 4), dtype=np.int64)
        for p, low, words in self.planes:
            for f in (0, 1):
                for h in (0, 1):
                    word = self.step(words, p, block, 2 * pair + f, h) & np.uint32(0x01010101 * (2**p - 1))
                    out[:, h + 2 * f] += word.astype("<u4").view(np.uint8).reshape(32, 4).astype(np.int64) << low
        return out


def a_16x16(registers):
    """mma.m16n8k16, 16-bit A: register r, half j of a lane is row group + 8(r&1), column 2*thread + 8(r>>1) + j."""
    a = np.full((16, 16), -1)
    for r in range(4):
        for j in range(2):
            a[GROUP + 8 * (r & 1), 2 * THREAD + 8 * (r >> 1) + j] = registers[:, r, j]
    assert (a >= 0).all()
    return a


def b_16x8(x):
    """mma.m16n8k16, 16-bit B [16 k, 8 tokens]: register r, half j is row 2*thread + 8r + j, column group.

    What a lane loads from x [8, 16] in its natural order: two adjacent k for each register.
    """
    b = np.zeros((16, 8), dtype=np.int64)
    for r in range(2):
        loaded = np.stack([x[GROUP, 2 * THREAD + 8 * r], x[GROUP, 2 * THREAD + 8 * r + 1]], axis=1)
        for j in range(2):
            b[2 * THREAD + 8 * r + j, GROUP] = loaded[:, j]
    return b


def a_16x32(registers):
    """mma.m16n8k32, 8-bit A: register r, byte i of a lane is row group + 8(r&1), column 4*thread + 16(r>>1) + i."""
    a = np.full((16, 32), -1)
    for r in range(4):
        for i in range(4):
            a[GROUP + 8 * (r & 1), 4 * THREAD + 16 * (r >> 1) + i] = registers[:, r, i]
    assert (a >= 0).all()
    return a


def b_32x8(x):
    """mma.m16n8k32, 8-bit B [32 k, 8 tokens]: register r, byte i is row 4*thread + 16r + i, column group."""
    b = np.zeros((32, 8), dtype=np.int64)
    for r in range(2):
        for i in range(4):
            b[4 * THREAD + 16 * r + i, GROUP] = x[GROUP, 4 * THREAD + 16 * r + i]
    return b


def tokens(m, weight, seed):
    x = np.random.default_rng(seed).integers(-127, 128, (m, weight.codes.shape[1]))
    return np.pad(x, ((0, 0), (0, weight.cols - x.shape[1])))  # x reads as 0 beyond K


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("n, k", [(64, 512), (50, 300)])
def test_mma_m16n8k16_multiplies_the_packed_words(bits, n, k):
    weight = Packed(bits, n, k, seed=bits)
    x = tokens(8, weight, seed=n)
    y = np.zeros((weight.rows, 8), dtype=np.int64)
    for block in range(weight.rows // 16):
        for fragment in range(weight.cols // 16):
            a, b = a_16x16(weight.halves(block, fragment)), b_16x8(x[:, 16 * fragment : 16 * fragment + 16])
            y[16 * block : 16 * block + 16] += a @ b
    np.testing.assert_array_equal(y[:n].T, x[:, :k] @ weight.codes.astype(np.int64).T)
    assert not y[n:].any(), "pad rows hold code 0"


@pytest.mark.parametrize("bits", WIDTHS)
def test_wgmma_m64nNk16_takes_the_same_registers(bits):
    """wgmma with A in registers: warp w of the warpgroup holds rows 16w .. 16w+15, each like A of mma.m16n8k16."""
    n, k, m = 130, 520, 24
    weight = Packed(bits, n, k, seed=20 + bits)
    x = tokens(m, weight, seed=bits)
    y = np.zeros((weight.rows, m), dtype=np.int64)
    for group in range(weight.rows // 64):
        for fragment in range(weight.cols // 16):
            a = np.full((64, 16), -1)
            for warp in range(4):
                registers = weight.halves(4 * group + warp, fragment)
                for r in range(4):
                    for j in range(2):
                        column = 2 * THREAD + 8 * (r >> 1) + j
                        a[16 * warp + GROUP + 8 * (r & 1), column] = registers[:, r, j]
            assert (a >= 0).all()
            y[64 * group : 64 * group + 64] += a @ x[:, 16 * fragment : 16 * fragment + 16].T
    np.testing.assert_array_equal(y[:n].T, x[:, :k] @ weight.codes.astype(np.int64).T)


@pytest.mark.parametrize("bits", WIDTHS)
def test_mma_m16n8k32_takes_the_same_bytes_of_reordered_activations(bits):
    n, k = 64, 512
    weight = Packed(bits, n, k, seed=40 + bits)
    x = tokens(8, weight, seed=bits)
    stored = x.reshape(8, -1, 16)[:, :, STORED_K].reshape(8, -1)
    y = np.zeros((weight.rows, 8), dtype=np.int64)
    for block in range(weight.rows // 16):
        for pair in range(weight.cols // 32):
            a, b = a_16x32(weight.bytes(block, pair)), b_32x8(stored[:, 32 * pair : 32 * pair + 32])
            y[16 * block : 16 * block + 16] += a @ b
    np.testing.assert_array_equal(y[:n].T, x[:, :k] @ weight.codes.astype(np.int64).T)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_a_masked_word_is_four_bytes_of_one_row(p):
    """One plane alone: every word of every lane, at every step, against the codes that the register must hold."""
    weight = Packed(p, 64, 512, seed=60 + p)
    ((_, _, words),) = weight.planes
    for block in range(words.shape[0]):
        for tile in range(words.shape[1]):
            for lane in range(32):
                for word in range(WORDS[p]):
                    for step in range(8 // p):
                        value = (int(words[block, tile, lane, word]) >> BIT[p][step]) & (0x01010101 * (2**p - 1))
                        fragment, h = divmod(word * (8 // p) + step, 2)
                        row = 16 * block + lane // 4 + 8 * h
                        k = tile * SPAN[p] + 16 * fragment + STORED_K[4 * (lane % 4) : 4 * (lane % 4) + 4]
                        assert list(value.to_bytes(4, "little")) == weight.padded[row, k].tolist()


def test_wgmma_m64nNk32_takes_the_same_bytes():
    n, k, m = 64, 512, 16
    for bits in (3, 8):
        weight = Packed(bits, n, k, seed=80 + bits)
        x = tokens(m, weight, seed=bits)
        stored = x.reshape(m, -1, 16)[:, :, STORED_K].reshape(m, -1)
        y = np.zeros((64, m), dtype=np.int64)
        for pair in range(weight.cols // 32):
            a = np.concatenate([a_16x32(weight.bytes(warp, pair)) for warp in range(4)])
            y += a @ stored[:, 32 * pair : 32 * pair + 32].T
        np.testing.assert_array_equal(y.T, x @ weight.codes.astype(np.int64).T)


def test_third_bits_of_two_fragments_come_with_one_shift():
    """The reason for the order in planes of 1 bit: 3-bit codes of fragments f and f + 1, f even, in one word."""
    weight = Packed(3, 64, 512, seed=90)
    (_, _, twos), (_, _, ones) = weight.planes
    for block in range(4):
        for f in range(0, 32, 2):
            tile, at = divmod(f, 8)
            for h in (0, 1):
                low = twos[block, tile, :, at // 2] >> np.uint32(2 * h)
                high = ones[block, tile, :, at // 4]
                high = high >> np.uint32(h) if at % 4 == 0 else high << np.uint32(2 - h)
                both = (low & np.uint32(0x33333333)) | (high & np.uint32(0x44444444))
                for i in (0, 1):
                    found = (both >> np.uint32(4 * i)) & np.uint32(0x07070707)
                    expected = weight.bytes(block, f // 2)[:, h + 2 * i].astype(np.uint8)
                    np.testing.assert_array_equal(found.astype("<u4").view(np.uint8).reshape(32, 4), expected)
