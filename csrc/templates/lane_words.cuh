// The words of a packed weight that one lane of a warp owns, and the codes in them, four at a time.
//
// Layout nvidia (lowbit/pack/layout.py). Lane 4g + t owns, of every fragment of 16 rows x 16 k, rows g and g + 8 (h =
// 0, 1) and k = 2t + j + 8c. Fragments and row halves count u = 2f + h; four(u) are the codes of one u, a byte each:
//
//     byte 0: j=0 c=0     byte 1: j=0 c=1     byte 2: j=1 c=0     byte 3: j=1 c=1
//
// Compiles for the host too, so that the tests can run a kernel's steps without a GPU.
#pragma once
#include <cstdint>
#include <type_traits>

#include "layout.cuh"

// Why not __CUDACC__: the host compiler behind nvcc does not know the pragma.
#ifdef __CUDA_ARCH__
#define LOWBIT_UNROLL _Pragma("unroll")
#else
#define LOWBIT_UNROLL
#endif

namespace lowbit::layout {

// Calls body(width) for each plane of a code, widest first; decltype(width)::value is the width.
template <int Bits, int Width = 8, class Body>
LOWBIT_HOST_DEVICE inline void for_planes(const Body& body) {
  if constexpr (Bits & Width) body(std::integral_constant<int, Width>{});
  if constexpr (Width > 1) for_planes<Bits, Width / 2>(body);
}

// All planes, widest first, over K consecutive k: whole tiles of every plane.
template <int Bits, int K>
struct LaneWords {
  static_assert(K % kStepK == 0, "whole tiles of every plane only");
  static constexpr int kFragments = K / 16, kUnits = K / 8, kWords = Bits * K / 64;

  uint32_t word[kWords];

  // Where the words of a plane start.
  static LOWBIT_HOST_DEVICE constexpr int first_word(int width) { return plane_low(Bits, width) * K / 64; }

  LOWBIT_HOST_DEVICE uint32_t four(int u) const {
    uint32_t codes = 0;
    for_planes<Bits>([&](auto width) {
      constexpr int kWidth = decltype(width)::value, kLow = plane_low(Bits, kWidth), kPerByte = 8 / kWidth;
      const uint32_t from = word[first_word(kWidth) + u / kPerByte];
      codes |= shifted(from, kLow - step_bit(kWidth, u % kPerByte)) & (byte_mask(kWidth) << kLow);
    });
    return codes;
  }

  // The words must be 0 where nothing was put yet.
  LOWBIT_HOST_DEVICE void put_four(int u, uint32_t codes) {
    for_planes<Bits>([&](auto width) {
      constexpr int kWidth = decltype(width)::value, kLow = plane_low(Bits, kWidth), kPerByte = 8 / kWidth;
      const int bit = step_bit(kWidth, u % kPerByte);
      word[first_word(kWidth) + u / kPerByte] |= shifted(codes, bit - kLow) & (byte_mask(kWidth) << bit);
    });
  }

  // Calls body(byte offset of this lane's bytes, index of their first word here, how many words, their first k) for
  // every tile from (row block, k) on. There are 2 or 4 words, decltype(count)::value.
  template <class Body>
  static LOWBIT_HOST_DEVICE void for_tiles(const Packed& packed, int64_t row_block, int64_t k, int lane,
                                           const Body& body) {
    for_planes<Bits>([&](auto width) {
      constexpr int kWidth = decltype(width)::value, kTileK = tile_k(Layout::kNvidia, kWidth);
      using Count = std::integral_constant<int, lane_bytes(kWidth) / 4>;
      const int64_t start = packed.tile_start(row_block, k / kTileK, kWidth) + lane_bytes(kWidth) * lane;
      LOWBIT_UNROLL
      for (int i = 0; i < K / kTileK; ++i)
        body(start + tile_bytes(kWidth) * i, first_word(kWidth) + Count::value * i, Count{}, k + i * kTileK);
    });
  }
};

}  // namespace lowbit::layout
