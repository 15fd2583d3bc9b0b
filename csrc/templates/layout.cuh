// Where the bits of a packed weight lie: the index formulas of lowbit/pack/layout.py, which has the pictures.
//
// Plain C++17 without torch, so that the host (pack.cpp), CUDA kernels and the tests read the same lines. A code is cut
// into planes of 8, 4, 2 or 1 bits, widest first, low bits of the code in the widest; a plane holds its fields in tiles
// of 16 rows x some k. The caller gives n and k of the weight and passes positions below their padded values.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define LOWBIT_HOST_DEVICE __host__ __device__
#else
#define LOWBIT_HOST_DEVICE
#endif

namespace lowbit {

// N and K of a weight are below this, and M of a launch on CUDA. Why not 2^31: padded to a tile of any kernel they
// still are an int.
constexpr int64_t kSizeLimit = (int64_t{1} << 31) - 511;

// Indices into LAYOUTS of lowbit/pack/layout.py.
enum class Layout : int32_t { kCpu, kNvidia };

namespace layout {

constexpr int kTileRows = 16;
constexpr int kLanes = 32;

LOWBIT_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// The lowest bit of the code that the plane of `width` bits holds: 7-bit codes give 0, 4, 6 for widths 4, 2, 1.
LOWBIT_HOST_DEVICE constexpr int plane_low(int bits, int width) { return bits & ~(2 * width - 1); }

// nvidia: K is padded to this at every width, and it is whole tiles of every plane: the step in which kernels walk K.
constexpr int kStepK = 128;

LOWBIT_HOST_DEVICE constexpr int tile_k(Layout layout, int width) {
  return layout == Layout::kCpu ? 32 : width == 1 ? kStepK : 256 / width;
}

// nvidia: bytes of one lane in a tile, one load: 16, but 8 of a plane of 1 bit.
// Why: with 16 a tile of 1-bit fields would span 256 k, twice the step.
LOWBIT_HOST_DEVICE constexpr int lane_bytes(int width) { return tile_k(Layout::kNvidia, width) * width / 16; }
LOWBIT_HOST_DEVICE constexpr int tile_bytes(int width) { return kLanes * lane_bytes(width); }

// A field of one plane: `bit` and up of byte `byte`, counted from the start of a tile or of the packed codes.
struct Spot {
  int64_t byte;
  int bit;
};

// cpu: quad (4 k) q of the tile lies in vector q / (8/width), byte 4*row + k%4 of its 64.
LOWBIT_HOST_DEVICE constexpr Spot cpu_tile_spot(int row, int k, int width) {
  const int per_byte = 8 / width, quad = k / 4;
  return {quad / per_byte * 64 + row * 4 + k % 4, width * (quad % per_byte)};
}

// nvidia: the lane that owns (row, k) in the A operand of mma.m16n8k16.
LOWBIT_HOST_DEVICE constexpr int lane_of(int row, int k) { return row % 8 * 4 + k % 8 / 2; }

// nvidia: the bit of a byte where the field of a step starts.
// Why the order 2, 3, 6, 7, 0, 1, 4, 5 of 1-bit fields: the third bit of a 3-bit code then lies right above its 2-bit
// field after one shift, which serves two fragments.
LOWBIT_HOST_DEVICE constexpr int step_bit(int width, int step) {
  return width > 1 ? width * step : ((step >> 1) & 1) * 4 + (1 - (step >> 2)) * 2 + (step & 1);
}

// nvidia: fragments and row halves count u = 2f + h; u lies in word u / (8/width) of the lane at step u % (8/width).
LOWBIT_HOST_DEVICE constexpr Spot nvidia_tile_spot(int row, int k, int width) {
  const int per_byte = 8 / width, unit = k / 16 * 2 + row / 8;
  return {lane_of(row, k) * lane_bytes(width) + unit / per_byte * 4 + k % 2 * 2 + k % 16 / 8,
          step_bit(width, unit % per_byte)};
}

// The packed codes of an [n, k] weight: padded sizes, bytes, and where each plane's tiles start.
struct Packed {
  Layout layout;
  int bits;
  int64_t rows, cols;  // padded

  LOWBIT_HOST_DEVICE constexpr Packed(Layout which, int64_t n, int64_t k, int code_bits)
      : layout(which),
        bits(code_bits),
        rows(round_up(n, which == Layout::kCpu ? 16 : 64)),
        cols(round_up(k, which == Layout::kCpu ? 32 : kStepK)) {}

  LOWBIT_HOST_DEVICE constexpr int64_t nbytes() const { return rows / 8 * cols * bits; }

  // Byte where the tile (row / 16 == row_block, k / tile_k == column) of a plane starts.
  LOWBIT_HOST_DEVICE constexpr int64_t tile_start(int64_t row_block, int64_t column, int width) const {
    const int64_t tile = row_block * (cols / tile_k(layout, width)) + column;
    const int low = plane_low(bits, width);
    // A plane of the cpu layout starts inside each chunk, one of the nvidia layout after the planes before it.
    return layout == Layout::kCpu ? tile * 64 * bits + 64 * low : rows / 8 * cols * low + tile * tile_bytes(width);
  }

  LOWBIT_HOST_DEVICE constexpr Spot spot(int64_t n, int64_t k, int width) const {
    const int span = tile_k(layout, width);
    const int row = static_cast<int>(n % kTileRows), column = static_cast<int>(k % span);
    const Spot in_tile =
        layout == Layout::kCpu ? cpu_tile_spot(row, column, width) : nvidia_tile_spot(row, column, width);
    return {tile_start(n / kTileRows, k / span, width) + in_tile.byte, in_tile.bit};
  }
};

// Scales and zeros are [rows / 16][groups][16]: the place of the 16 that holds a row. nvidia: rows g and g + 8, which
// one lane owns, are neighbours.
LOWBIT_HOST_DEVICE constexpr int group_place(Layout layout, int row) {
  return layout == Layout::kCpu ? row : row % 8 * 2 + row / 8;
}

// Eight-bit activations are stored in this order inside each 16 k, so that four adjacent bytes meet the four bytes
// `(word >> step_bit) & byte_mask(width)` of one row: place i of the 16 holds k = stored_k(i).
LOWBIT_HOST_DEVICE constexpr int stored_k(int place) { return place % 2 * 8 + place / 2; }

// Left by `amount` bits, right when it is negative. Bits that cross a byte are masked away afterwards.
LOWBIT_HOST_DEVICE constexpr uint32_t shifted(uint32_t word, int amount) {
  return amount >= 0 ? word << amount : word >> -amount;
}

// Every `width`-bit field at step 0 of the four bytes of a word; of its two 16-bit halves.
LOWBIT_HOST_DEVICE constexpr uint32_t byte_mask(int width) { return 0x01010101u * ((1u << width) - 1u); }
LOWBIT_HOST_DEVICE constexpr uint32_t half_mask(int width) { return 0x00010001u * ((1u << width) - 1u); }

}  // namespace layout
}  // namespace lowbit
