// The words of a packed weight that one lane reads for 128 k of a row tile, and the bytes of fields made from them.
//
// Layout: lowbit/pack/layout.py, nvidia. A plane of `p` bits gives a lane 2p words for 128 k. Fragment f and row half h
// count u = 2f + h; the field of u lies in word u / (8/p) at step u % (8/p), at the same place of all four bytes of the
// word, which are (j=0, c=0), (j=0, c=1), (j=1, c=0), (j=1, c=1) from the low end.
#pragma once
#include <cstdint>

#include "../layout.cuh"
#include "../ptx/pairs.cuh"

namespace lowbit::planes {

using layout::shifted;

__host__ __device__ constexpr uint32_t bytes(uint32_t mask) { return mask * 0x01010101u; }
__host__ __device__ constexpr uint32_t halves(uint32_t mask) { return mask * 0x00010001u; }

// How many planes codes of `bits` bits have, and which of them, widest first, has fields of `width` bits.
__host__ __device__ constexpr int plane_count(int bits) {
  return (bits & 1) + (bits >> 1 & 1) + (bits >> 2 & 1) + (bits >> 3 & 1);
}
__host__ __device__ constexpr int plane_index(int bits, int width) {
  return plane_count(layout::plane_low(bits, width));
}

// Words of all planes for 128 k, widest plane first.
template <int Bits>
struct Words {
  static constexpr int kCount = 2 * Bits;
  uint32_t word[kCount];

  // The word of plane `width` that holds u, and the bit of its byte where the field starts.
  __device__ __forceinline__ uint32_t of(int width, int u) const {
    return word[2 * layout::plane_low(Bits, width) + u / (8 / width)];
  }
  static __host__ __device__ constexpr int bit(int width, int u) { return layout::step_bit(width, u % (8 / width)); }
};

}  // namespace lowbit::planes
