// Floats of 3 (e1m1) and 4 bits (e2m1) to the A operand of a product of bytes: they are whole numbers, of halves up to
// 12 with 4 bits, up to 3 with 3, looked up as 12 or 3 more, so that none is negative.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../args.h"
#include "../ptx/async.cuh"
#include "../ptx/pairs.cuh"
#include "../types.cuh"
#include "int.cuh"
#include "planes.cuh"

namespace lowbit::bytes {

// The sums of looked-up bytes (Parts, bytes.cuh): those of both row halves lie at bit 0.
struct LookedUpParts {
  static constexpr int kWidths = 8, kWidest = 8, kCount = 1;
  static __host__ __device__ constexpr int sums(int) { return 1; }
  static __host__ __device__ constexpr int first(int) { return 0; }
  static __host__ __device__ constexpr int sum(int, int) { return 0; }
  static __host__ __device__ constexpr int bit(int, int, int) { return 0; }
  static __host__ __device__ constexpr int next(int) { return 1; }
  static __host__ __device__ constexpr float factor(int, int) { return 1.0f; }
};

// 4 bits: 12 + 0, 1, 2, 3, 4, 6, 8, 12 of the codes without a sign, 12 - these of the others. Why by way of shared
// memory: numbers that it knows the compiler keeps in uniform registers, which no look-up reads.
struct E2m1Table {
  static constexpr Affine kBytes = {0.5f, 6.0f};
  static constexpr int kMostUnits = 8;  // formats that people use have groups of 16 and 32

  uint32_t plus[2], minus[2];
  // 1. Why: a multiplication by it is an addition that the ALU, which looks up, has not to do. Shifts by 16 are the
  // ALU's all the same: as upper halves of products they cost 3% of all (docs/notes/decode-versions.md, version 63).
  uint32_t one;

  static __device__ __forceinline__ void store(uint32_t to) {
    ptx::store_shared(to, uint4{0x0F0E0D0Cu, 0x18141210u, 0x090A0B0Cu, 0x00040608u});
    ptx::store_shared(to + 16, 1u);
  }
  __device__ __forceinline__ void load(uint32_t from) {
    ptx::load_shared(from, plus[0], plus[1], minus[0], minus[1]);
    one = ptx::load_shared(from + 16);
  }

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
      const uint32_t first = of(codes, flipped), second = of(codes >> 16, flipped >> 16);
      a[2 * f] = ptx::pick_bytes(first, second, 0x6420), a[2 * f + 1] = ptx::pick_bytes(first, second, 0x7531);
    }
  }
};

// 3 bits: 3 + 0, 1, 2, 3, then 3 - these.
struct E1m1Table {
  static constexpr Affine kBytes = {1.0f, 3.0f};
  static constexpr int kMostUnits = 1;

  uint32_t values[2];

  static __device__ __forceinline__ void store(uint32_t to) {
    ptx::store_shared(to, uint4{0x06050403u, 0x00010203u, 0, 0});
  }
  __device__ __forceinline__ void load(uint32_t from) { ptx::load_shared(from, values[0], values[1]); }

  // Fragments 4i and 4i + 2, and 4i + 1 and 4i + 3: registers (f, h) at 2 * (f / 2 % 2) + h.
  __device__ __forceinline__ void fragments(const planes::Words<3>& from, int i, uint32_t (&even)[4],
                                            uint32_t (&odd)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      // Codes of an even and of the next fragment alternate.
      const uint32_t codes = planes::Codes<3>::merged(from, 4 * i + r / 2 * 2, r % 2) & planes::bytes(0x77);
      const uint32_t first = ptx::pick_bytes(values[0], values[1], codes),
                     second = ptx::pick_bytes(values[0], values[1], codes >> 16);
      even[r] = ptx::pick_bytes(first, second, 0x6420), odd[r] = ptx::pick_bytes(first, second, 0x7531);
    }
  }
};

struct NoTable {  // of types whose bytes are not looked up
  static constexpr Affine kBytes = {1.0f, 0.0f};
  static constexpr int kMostUnits = 1;

  static __device__ __forceinline__ void store(uint32_t) {}
  __device__ __forceinline__ void load(uint32_t) {}
};

template <class Weight>
struct TableFor {
  using Type = NoTable;
};
template <>
struct TableFor<Float<2, 1>> {
  using Type = E2m1Table;
};
template <>
struct TableFor<Float<1, 1>> {
  using Type = E1m1Table;
};

// What the bytes of a type of floats are looked up in. kBytes: what they say, value = step * byte - offset; kMostUnits:
// in how many parts of 128 k groups may be (decode/shape.cuh).
template <class Weight>
using Table = typename TableFor<Weight>::Type;

template <class Weight>
constexpr bool kLookedUp = !std::is_same<Table<Weight>, NoTable>::value;

}  // namespace lowbit::bytes
