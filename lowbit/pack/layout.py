"""Where every bit of a packed weight lies: the index formula of both layouts, and pack and unpack made from it.

A code of ``b`` bits is cut into **planes** of 8, 4, 2 or 1 bits, widest first, low bits of the code in the widest:
7 bits are a plane of bits 0-3, one of bits 4-5 and one of bit 6. Each plane holds its ``p``-bit fields in **tiles** of
16 rows and some k; a tile of a plane is always a whole number of bytes, so no field crosses a byte.

Layout ``cpu``: N padded to 16, K to 32. A tile is 16 rows x 32 k; all planes of it lie together (64*b bytes)::

    codes[R][C][64*b]       R = n/16 (row block), C = k/32 (chunk)

      chunk of a 7-bit weight:  | 4 vectors of plane 4 | 2 of plane 2 | 1 of plane 1 |   each vector 64 bytes

      vector:   byte 4r + j  holds row r = n%16, k%4 = j           so a 32-bit lane is 4 consecutive k of one row
                 row 0       row 1             row 15
               | j=0 1 2 3 | j=0 1 2 3 | ... | j=0 1 2 3 |

      byte:     quad q = (k%32)/4 lies in vector q*p/8, at bit p*(q % (8/p)):
                p=8: |q      |   p=4: |q+1 |q  |   p=2: |q+3|q+2|q+1|q|   p=1: |q+7 ... q|     (bit 0 on the right)

Layout ``nvidia``: N padded to 64, K to 128. Planes lie one after the other, each a table of tiles of 16 rows x
``span`` k; a tile is 32 lanes x 16 bytes, of a plane of 1 bit 32 lanes x 8 bytes::

    plane[N/16][K/span][lane][bytes of a lane]      lane = 4*(n%8) + (k%8)/2: the owner of the fields in mma.m16n8k16

      p                      8    4    2    1
      span                  32   64  128  128       128 k are whole tiles of every plane, 2p words of a lane
      words of a lane        4    4    4    2       one load

      fragment: 16 x 16, the A operand.  h = (n%16)/8 row half, c = (k%16)/8 k half, j = k%2

                      k 0..7 (c=0)     k 8..15 (c=1)
        row 0..7    | register 0     | register 2     |  h = 0      lane 4g + t owns rows g and g + 8,
        row 8..15   | register 1     | register 3     |  h = 1      k = 2t, 2t+1 (j = 0, 1), 2t+8, 2t+9

      Fragments f = 0 .. span/16-1 of the tile and their row halves count u = 2f + h; u lies in word u / (8/p) at step
      i = u % (8/p):

        word:   | j=1 c=1 | j=1 c=0 | j=0 c=1 | j=0 c=0 |      bit 16j + 8c + s   (bit 0 on the right)

        byte:     step i starts at bit s = step_bit(p, i):
                  p=8: |i=0    |   p=4: |i=1 |i=0 |   p=2: |i=3|i=2|i=1|i=0|   p=1: |i=3 2 7 6 1 0 5 4|

      so ``(word >> (8c + s)) & (0x00010001 * (2**p - 1))`` is one register (two 16-bit halves) of the fragment, and
      ``(word >> s) & (0x01010101 * (2**p - 1))`` is four bytes of one row, k = 2t, 2t+8, 2t+1, 2t+9.

Scales and zeros: ``[N/16][G][16]`` (N padded as above), so that one vector load serves 16 rows. Pad fields are 0. In
layout ``cpu`` place r of the 16 holds row r. In layout ``nvidia`` place 2*(r%8) + r//8 does, so that rows g and g + 8,
which one lane owns, are neighbours: one 32-bit word of two 16-bit scales; scales of 8 bits are 16-bit floats there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import bit_stream, narrow_scales
from ..dtypes import weight_type
from ..errors import SchemeError, ShapeError, nearest
from ..tensor import as_bytes

#: Every layout, in the order of its id in compiled code.
LAYOUTS = ("cpu", "nvidia")
TILE_ROWS = 16
#: Layout ``nvidia``: k are padded to this at every width. Why: kernels walk K in steps of it, whatever the planes.
STEP_K = 128


class Spot(NamedTuple):
    """Where ``width`` bits of a code, from bit ``low`` of the code up, lie: at ``bit`` and up of byte ``byte``."""

    width: int
    low: int
    byte: Any
    bit: Any


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """``(width, lowest bit of the code)`` of each plane of a ``bits``-bit code: 7 -> ((4, 0), (2, 4), (1, 6))."""
    widths = weight_type(f"uint{bits}").planes
    return tuple((p, sum(widths[:i])) for i, p in enumerate(widths))


def check_layout(layout: str) -> str:
    """The layout's name. Raises SchemeError for an unknown one."""
    if layout not in LAYOUTS:
        raise SchemeError(f"no packed layout is called {layout!r}; did you mean {nearest(layout, LAYOUTS)}?")
    return layout


def tile_k(layout: str, width: int) -> int:
    """How many k a tile of a ``width``-bit plane spans."""
    return 32 if layout == "cpu" else min(STEP_K, 256 // width)


def lane_bytes(width: int) -> int:
    """Layout ``nvidia``: the bytes of one lane in a tile of a plane.

    Why 8 of a 1-bit plane: with 16 its tile would span 256 k, and with it the padding of all weights of odd width.
    """
    return tile_k("nvidia", width) * width // 16


def padded_shape(layout: str, n: int, k: int, bits: int) -> tuple[int, int]:
    """``(N, K)`` as stored: padded with code 0."""
    rows, step = (16, 32) if layout == "cpu" else (64, STEP_K)
    return -(-n // rows) * rows, -(-k // step) * step


def codes_shape(layout: str, n: int, k: int, bits: int) -> tuple[int, ...]:
    """The shape of the uint8 tensor of packed codes."""
    rows, cols = padded_shape(layout, n, k, bits)
    return (rows // 16, cols // 32, 64 * bits) if layout == "cpu" else (rows * cols * bits // 8,)


def step_bit(width: int, step: Any) -> Any:
    """Layout ``nvidia``: the bit of a byte where the field of a step < 8/width starts. Integers, arrays or tensors.

    Why the order 2, 3, 6, 7, 0, 1, 4, 5 in planes of 1 bit: the third bit of a 3-bit code then lies right above its
    2-bit field after one shift, which serves two fragments.
    """
    if width > 1:
        return width * step
    return step // 2 % 2 * 4 + (1 - step // 4) * 2 + step % 2


def tile_spot(layout: str, row: Any, k: Any, width: int) -> tuple[Any, Any]:
    """``(byte, bit)`` inside its tile of the field of (row < 16, k < tile_k). Works on integers, arrays and tensors."""
    per_byte = 8 // width
    if layout == "cpu":
        quad, j = k // 4, k % 4
        return quad // per_byte * 64 + row * 4 + j, width * (quad % per_byte)
    lane = row % 8 * 4 + k % 8 // 2
    unit = k // 16 * 2 + row // 8
    c, j = k % 16 // 8, k % 2
    return lane * lane_bytes(width) + unit // per_byte * 4 + 2 * j + c, step_bit(width, unit % per_byte)


def spots(layout: str, n: Any, k: Any, bits: int, shape: tuple[int, int]) -> list[Spot]:
    """The index formula: for weight (n, k) of a ``shape`` = (N, K) weight, one :class:`Spot` a plane.

    ``n`` and ``k`` are integers, numpy arrays or torch tensors that broadcast; ``byte`` counts from the start of
    the packed codes. Pad positions (n, k below :func:`padded_shape`) are legal.
    """
    rows, cols = padded_shape(check_layout(layout), *shape, bits)
    found = []
    for p, low in planes(bits):
        span = tile_k(layout, p)
        tile = n // 16 * (cols // span) + k // span
        # A plane of the cpu layout starts inside each chunk, one of the nvidia layout after the planes before it.
        if layout == "cpu":
            start = tile * 64 * bits + 64 * low
        else:
            start = rows * cols * low // 8 + tile * 32 * lane_bytes(p)
        byte, bit = tile_spot(layout, n % 16, k % span, p)
        found.append(Spot(p, low, start + byte, bit))
    return found


def _plane_tiles(codes: torch.Tensor, layout: str, width: int, low: int, bits: int, padded: tuple[int, int]):
    """A view ``[N/16, tiles along K, bytes of a tile]`` of one plane inside the packed codes."""
    rows, cols = padded
    if layout == "cpu":
        return codes[:, :, 64 * low : 64 * (low + width)]
    start, size = rows * cols * low // 8, rows * cols * width // 8
    return codes[start : start + size].view(rows // 16, cols // tile_k(layout, width), 32 * lane_bytes(width))


def _tile_grid(layout: str, width: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """``(byte, bit)`` int64 ``[16 * tile_k]``: :func:`tile_spot` of every field of a tile, row by row."""
    row = torch.arange(16, device=device)[:, None]
    k = torch.arange(tile_k(layout, width), device=device)[None, :]
    byte, bit = tile_spot(layout, row, k, width)
    return byte.reshape(-1), bit.expand(16, -1).reshape(-1)


def _row_steps(n: int, cols: int):
    """Slices of rows, a multiple of 64 each, small enough that the unpacked codes of one take about 16 MB."""
    step = max(64, (1 << 24) // max(cols, 1) // 64 * 64)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def pack_codes(stream: torch.Tensor, n: int, k: int, bits: int, layout: str) -> torch.Tensor:
    """Packed codes (uint8, :func:`codes_shape`) of a bit stream uint8 ``[n, ceil(k*bits/8)]``, in torch operations.

    Raises ShapeError when the stream has another shape, SchemeError for an unknown layout.
    """
    check_layout(layout)
    if tuple(stream.shape) != (n, -(-k * bits // 8)):
        raise ShapeError(f"expected a bit stream of shape {(n, -(-k * bits // 8))}, got {tuple(stream.shape)}")
    padded = padded_shape(layout, n, k, bits)
    cols = padded[1]
    # Pad rows are never written below.
    packed = torch.zeros(codes_shape(layout, n, k, bits), dtype=torch.uint8, device=stream.device)
    for part in _row_steps(n, cols):
        codes = bit_stream.unpack(stream[part], bits, k)
        blocks = -(-codes.shape[0] // 16)
        codes = torch.nn.functional.pad(codes, (0, cols - k, 0, blocks * 16 - codes.shape[0]))
        first = part.start // 16
        for p, low in planes(bits):
            span = tile_k(layout, p)
            byte, bit = _tile_grid(layout, p, stream.device)
            # The formula backwards: which field of the tile lies at each (byte, step) in memory order.
            source = torch.argsort(byte * 8 + bit).view(-1, 8 // p)
            fields = (codes >> low) & ((1 << p) - 1)
            fields = fields.view(blocks, 16, cols // span, span).transpose(1, 2).reshape(blocks, cols // span, -1)
            tiles = _plane_tiles(packed, layout, p, low, bits, padded)[first : first + blocks]
            for i in range(8 // p):
                tiles |= fields[:, :, source[:, i]] << (p * i)
    return packed


def unpack_codes(packed: torch.Tensor, n: int, k: int, bits: int, layout: str) -> torch.Tensor:
    """The bit stream uint8 ``[n, ceil(k*bits/8)]`` back from packed codes: the inverse of :func:`pack_codes`.

    Raises ShapeError when ``packed`` is not of :func:`codes_shape`, SchemeError for an unknown layout.
    """
    expected = codes_shape(check_layout(layout), n, k, bits)
    if tuple(packed.shape) != expected:
        raise ShapeError(f"expected packed codes of shape {expected}, got {tuple(packed.shape)}")
    padded = padded_shape(layout, n, k, bits)
    cols = padded[1]
    stream = torch.empty((n, -(-k * bits // 8)), dtype=torch.uint8, device=packed.device)
    for part in _row_steps(n, cols):
        first, blocks = part.start // 16, -(-(part.stop - part.start) // 16)
        codes = torch.zeros((blocks * 16, cols), dtype=torch.uint8, device=packed.device)
        for p, low in planes(bits):
            span = tile_k(layout, p)
            byte, bit = _tile_grid(layout, p, packed.device)
            tiles = _plane_tiles(packed, layout, p, low, bits, padded)[first : first + blocks]
            fields = (tiles[:, :, byte] >> bit.to(torch.uint8)) & ((1 << p) - 1)
            fields = fields.view(blocks, cols // span, 16, span).transpose(1, 2).reshape(blocks * 16, cols)
            codes |= fields << low
        stream[part] = bit_stream.pack(codes[: part.stop - part.start, :k], bits)
    return stream


def group_place(layout: str, row: Any) -> Any:
    """Which of the 16 places of a row block holds the scale of (row < 16). Works on integers, arrays and tensors."""
    return row if layout == "cpu" else row % 8 * 2 + row // 8


def pack_groups(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Scales or zeros ``[N, G]`` -> ``[N/16 rounded up, G, 16]`` (``nvidia``: N padded to 64), pad rows of zero bits.

    In their own type, but that layout nvidia has scales of 8 bits as wider floats (scheme.WIDER_SCALES).
    """
    n, groups = values.shape
    rows = padded_shape(check_layout(layout), n, 1, 1)[0]
    if values.element_size() == 1 and layout == "nvidia":
        values = narrow_scales.widen(values)
    bits = as_bytes(values)
    packed = bits.new_empty((rows // 16, groups, 16))
    padded = torch.nn.functional.pad(bits, (0, 0, 0, rows - n))
    _by_place(packed, layout).copy_(padded.view(rows // 16, 2, 8, groups))
    return packed.view(values.dtype)


def unpack_groups(packed: torch.Tensor, n: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`pack_groups`: ``[n, G]`` of the type that they had, its own memory."""
    groups = packed.shape[1]
    bits = as_bytes(packed)
    values = bits.new_empty((n, groups))
    values.copy_(_by_place(bits, check_layout(layout)).reshape(-1, groups)[:n])
    return values.view(dtype) if packed.dtype == dtype else narrow_scales.narrow(values, dtype)


def _by_place(packed: torch.Tensor, layout: str) -> torch.Tensor:
    """A view ``[N/16, 2, 8, G]`` of packed scales: (block, h, g) is row 16*block + 8*h + g."""
    blocks, groups, _ = packed.shape
    if layout == "cpu":
        return packed.view(blocks, groups, 2, 8).permute(0, 2, 3, 1)
    return packed.view(blocks, groups, 8, 2).permute(0, 3, 2, 1)
