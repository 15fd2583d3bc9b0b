// Floats of 4 bits (e2m1) to the A operand of a product of bytes: they are whole numbers of halves up to 12, looked up
// as 12 more, so that none is negative.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../args.h"
#include "../ptx/async.cuh"
#include "../ptx/pairs.cuh"
#include "../types.cuh"
#include "planes.cuh"

namespace lowbit::bytes {

// Whether a type of floats has bytes, and what these say: value = step * byte - offset.
template <class Weight>
constexpr bool kLookedUp = std::is_same<Weight, Float<2, 1>>::value;
constexpr Affine kE2m1Bytes = {0.5f, 6.0f};

// The sums of looked-up bytes: those of both row halves lie at bit 0.
struct LookedUpParts {
  static constexpr int kCount = 1;
  static __host__ __device__ constexpr int bit(int, int) { return 0; }
  static __host__ __device__ constexpr float factor(int, int) { return 1.0f; }
};

// What is looked up: 12 + 0, 1, 2, 3, 4, 6, 8, 12 of the codes without a sign, 12 - these of the others. Why by way of
// shared memory: numbers that it knows the compiler keeps in uniform registers, which no look-up reads.
struct E2m1Table {
  uint32_t plus[2], minus[2];
  // 1 and 2^16. Why: multiplications by these are additions and shifts that the ALU, which looks up, has not to do; of
  // 243 of its instructions for two tiles 179 are left.
  uint32_t one, half_up;

  static __device__ __forceinline__ void store(uint32_t to) {
    ptx::store_shared(to, uint4{0x0F0E0D0Cu, 0x18141210u, 0x090A0B0Cu, 0x00040608u});
    ptx::store_shared(to + 16, uint4{1, 1u << 16, 0, 0});
  }
  __device__ __forceinline__ void load(uint32_t from) {
    ptx::load_shared(from, plus[0], plus[1], minus[0], minus[1]);
    ptx::load_shared(from + 16, one, half_up);
  }

  __device__ __forceinline__ uint32_t upper_half(uint32_t word) const { return __umulhi(word, half_up); }

  // The bytes of four codes of a word from bit 0 on; flipped: these codes with the other sign.
  __device__ __forceinline__ uint32_t of(uint32_t codes, uint32_t flipped) const {
    // A code of the other table picks 0.
    return ptx::pick_bytes(plus[0], plus[1], codes) * one + ptx::pick_bytes(minus[0], minus[1], flipped);
  }

  // Fragments 2i and 2i + 1 of a plane whose words begin at `from`: registers (f, h) at 2 * (f % 2) + h.
  __device__ __forceinline__ void fragments(const uint32_t* from, int i, uint32_t (&a)[4]) const {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const uint32_t codes = from[2 * i + f], flipped = codes ^ planes::bytes(0x88);
      // Codes of rows g and g + 8 alternate.
      const uint32_t first = of(codes, flipped), second = of(upper_half(codes), upper_half(flipped));
      a[2 * f] = ptx::pick_bytes(first, second, 0x6420), a[2 * f + 1] = ptx::pick_bytes(first, second, 0x7531);
    }
  }
};

struct NoTable {  // of integers
  static __device__ __forceinline__ void store(uint32_t) {}
  __device__ __forceinline__ void load(uint32_t) {}
};

}  // namespace lowbit::bytes
