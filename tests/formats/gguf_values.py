"""What the bytes of each GGUF block mean, weight by weight, as ggml's dequantize_row functions say it."""

import struct

IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def half(b: bytes, at: int) -> float:
    return struct.unpack_from("<e", b, at)[0]


def int8(value: int) -> int:
    return value - 256 if value > 127 else value


def nibble(b: bytes, at: int, i: int, run: int) -> int:
    """Weight i of runs of ``run`` bytes from ``at``: the low halves of a run come before its high ones."""
    byte = b[at + i // (2 * run) * run + i % run]
    return byte >> 4 if i % (2 * run) >= run else byte & 15


def q4_0(b, i):
    return half(b, 0) * (nibble(b, 2, i, 16) - 8)


def q4_1(b, i):
    return half(b, 0) * nibble(b, 4, i, 16) + half(b, 2)


def q5_0(b, i):
    high = struct.unpack_from("<I", b, 2)[0] >> i & 1
    return half(b, 0) * ((nibble(b, 6, i, 16) | high << 4) - 16)


def q5_1(b, i):
    high = struct.unpack_from("<I", b, 4)[0] >> i & 1
    return half(b, 0) * (nibble(b, 8, i, 16) | high << 4) + half(b, 2)


def q8_0(b, i):
    return half(b, 0) * int8(b[2 + i])


def pair(b, at, i):
    """Two bits: of every 32 bytes, bits 0-1 of all come first, then bits 2-3."""
    return b[at + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3


def q2_k(b, i):
    both = b[i // 16]
    return half(b, 80) * (both & 15) * pair(b, 16, i) - half(b, 82) * (both >> 4)


def q3_k(b, i):
    low = pair(b, 32, i)
    missing = 0 if b[i % 32] >> (i // 32) & 1 else 4  # the mask says where 4 is not taken away
    j = i // 16
    scale = (b[96 + j] & 15) if j < 8 else (b[96 + j - 8] >> 4)
    scale |= (b[104 + j % 4] >> (2 * (j // 4)) & 3) << 4
    return half(b, 108) * (scale - 32) * (low - missing)


def k_scale(b, j):
    """Scale and min number j of Q4_K and Q5_K, get_scale_min_k4 of ggml."""
    q = b[4:16]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def q4_k(b, i):
    scale, low = k_scale(b, i // 32)
    return half(b, 0) * scale * nibble(b, 16, i, 32) - half(b, 2) * low


def q5_k(b, i):
    scale, low = k_scale(b, i // 32)
    fifth = b[16 + i % 32] >> (i // 32) & 1
    return half(b, 0) * scale * (nibble(b, 48, i, 32) | fifth << 4) - half(b, 2) * low


def q6_k(b, i):
    part, place = i // 128, i % 128
    byte = b[64 * part + place % 64]
    low = byte & 15 if place < 64 else byte >> 4
    high = b[128 + 32 * part + place % 32] >> (2 * (place // 32)) & 3
    return half(b, 208) * int8(b[192 + i // 16]) * ((low | high << 4) - 32)


def iq4_nl(b, i):
    return half(b, 0) * IQ4[nibble(b, 2, i, 16)]


def iq4_xs(b, i):
    j = i // 32
    low = b[4 + j // 2] >> (4 * (j % 2)) & 15
    high = struct.unpack_from("<H", b, 2)[0] >> (2 * j) & 3
    return half(b, 0) * ((low | high << 4) - 32) * IQ4[nibble(b, 8, i, 16)]


def mxfp4(b, i):
    code = nibble(b, 1, i, 16)
    return (-1 if code & 8 else 1) * E2M1[code & 7] * 2.0 ** (b[0] - 127)


def tq2_0(b, i):
    return half(b, 64) * (pair(b, 0, i) - 1)


#: Type -> (number, weights in a block, bytes of a block, where its fp16 numbers lie, meaning).
TYPES = {
    "Q4_0": (2, 32, 18, (0,), q4_0), "Q4_1": (3, 32, 20, (0, 2), q4_1), "Q5_0": (6, 32, 22, (0,), q5_0),
    "Q5_1": (7, 32, 24, (0, 2), q5_1), "Q8_0": (8, 32, 34, (0,), q8_0), "Q2_K": (10, 256, 84, (80, 82), q2_k),
    "Q3_K": (11, 256, 110, (108,), q3_k), "Q4_K": (12, 256, 144, (0, 2), q4_k), "Q5_K": (13, 256, 176, (0, 2), q5_k),
    "Q6_K": (14, 256, 210, (208,), q6_k), "IQ4_NL": (20, 32, 18, (0,), iq4_nl), "IQ4_XS": (23, 256, 136, (0,), iq4_xs),
    "MXFP4": (39, 32, 17, (), mxfp4), "TQ2_0": (35, 256, 66, (64,), tq2_0),
}  # fmt: skip
