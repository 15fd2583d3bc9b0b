// Integer codes to the A operand of a product of bytes, 128 k of a row tile at a time.
//
// A product of codes is the sum of the products of their planes, so nothing is put together: each plane is an operand
// of its own, masked out of its words in place. The byte is then field * 2^q, where q is the bit the field lies at;
// rows g and g + 8 have different q, which their scales take back. A byte has fields of more than one fragment where
// they are of 1 or 2 bits, and sums of different heights in it are kept apart. Sums of planes are, too. Codes of 3 bits
// are put together all the same: that costs no more than two planes, and half of the products.
//
// An operand has fragments f and f + Apart. 1: fields of the second are shifted down to where those of the first lie. 2
// and 4: they lie equally high in the bytes of two words, and none are shifted (lifted).
#pragma once
#include <cstdint>

#include "int.cuh"
#include "planes.cuh"

namespace lowbit::bytes {

// The operands of a step, by fragments, and where the digits of these go, so that those of a product are neighbours.
template <int Apart>
struct Order {
  static __host__ __device__ constexpr int first(int i) { return i / Apart * 2 * Apart + i % Apart; }
  static __host__ __device__ constexpr int place(int f) {
    return (f / (2 * Apart) * Apart + f % Apart) * 2 + f / Apart % 2;
  }
};

// The sums that codes of `Bits` bits need, those of the widest plane first, and of a plane those of the highest fields.
template <int Bits, int Apart>
struct Parts {
  static constexpr bool kMerged = Bits == 3;          // its codes are where fields of 2 bits would be
  static constexpr int kWidths = kMerged ? 2 : Bits;  // of planes, a bit each
  static constexpr bool kLifted = Apart > 1;
  static_assert(Bits == 8 ? !kLifted
                : kMerged ? Apart == 2
                          : Bits % 2 == 0 || Apart != 2,
                "fields at places of their own");
  static constexpr int kWidest = Bits >= 8 ? 8 : Bits >= 4 ? 4 : Bits >= 2 ? 2 : 1;

  // Sums of a plane. Why two of bytes: a product waits for the one before of the same sums.
  static __host__ __device__ constexpr int sums(int width) {
    return width == 8 ? 2 : width == 4 ? 1 : width == 2 ? 1 + kLifted : 2 + 2 * kLifted;
  }
  static __host__ __device__ constexpr int first(int width) {
    int before = 0;
    for (int wider = 8; wider > width; wider /= 2)
      if (kWidths & wider) before += sums(wider);
    return before;
  }
  static constexpr int kCount = first(0);

  // The sum of operand i of a plane. Lifted, fields of 1 bit of fragments 0 to 3 begin at bits 2, 6, 0, 4.
  static __host__ __device__ constexpr int sum(int width, int i) {
    if (width == 4 || (width == 2 && !kLifted)) return 0;
    if (width == 8 || (width == 1 && !kLifted)) return i % 2;
    return width == 2 ? 1 - i % 2 : i / 2 + 2 * (1 - i % 2);
  }
  // The bit q that its fields of row half h lie at.
  static __host__ __device__ constexpr int bit(int width, int sum, int h) {
    if (width >= 4) return width == 4 ? 4 * h : 0;
    return width == 2 ? (kLifted ? 4 - 4 * sum : 0) + (kMerged ? 0 : 2 * h) : (kLifted ? 6 : 2) - 2 * sum + h;
  }
  // What a sum of a plane counts for in the one before, and the first of a plane in the first of the widest.
  static __host__ __device__ constexpr int next(int width) { return width == 2 ? 16 : width == 1 ? 4 : 1; }
  static __host__ __device__ constexpr float factor(int width, int h) {
    const int shift = layout::plane_low(kWidths, width) - bit(width, 0, h) + bit(kWidest, 0, h);
    return static_cast<float>(1 << shift);
  }
};

// Operand i of a plane whose words begin at `from`: registers (f, h) at 2 * f + h, f: which of its two fragments.
template <int Width, int Apart>
__device__ __forceinline__ void fragments(const uint32_t* from, int i, uint32_t (&a)[4]) {
  using Form = Parts<Width, Apart>;
  if constexpr (Width == 8) {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = from[4 * i + r];
  } else {
    constexpr int kEach = 4 / Width;  // fragments of a word
    const int f = Order<Apart>::first(i);
    const uint32_t first = from[f / kEach];
    const uint32_t second = f / kEach == (f + Apart) / kEach ? first >> 4 : from[(f + Apart) / kEach];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t mask = planes::bytes((1u << Width) - 1) << Form::bit(Width, Form::sum(Width, i), h);
      a[h] = first & mask, a[2 + h] = second & mask;
    }
  }
}

// The same of codes of 3 bits.
__device__ __forceinline__ void fragments(const planes::Words<3>& from, int i, uint32_t (&a)[4]) {
  using Form = Parts<3, 2>;
  const uint32_t mask = planes::bytes(7) << Form::bit(2, Form::sum(2, i), 0);
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = planes::Codes<3>::merged(from, i / 2 * 4 + r / 2 * 2, r % 2) & mask;
}

// value, and what the sums of planes of up to `Width` bits add to it for row half h. Why no loop over widths: the
// compiler then has the loop of Parts::first once for each sum, and most of its time goes there.
template <class Parts, int Width = 8>
__device__ __forceinline__ float sum_of_planes(const int (&sums)[Parts::kCount][4], int h, float value = 0.0f) {
  if constexpr (Width == 0) {
    return value;
  } else {
    if constexpr ((Parts::kWidths & Width) != 0) {
      constexpr int kFirst = Parts::first(Width);
      int digits[2] = {};
      int counts = 1;
#pragma unroll
      for (int sum = 0; sum < Parts::sums(Width); ++sum, counts *= Parts::next(Width))
#pragma unroll
        for (int i = 0; i < 2; ++i) digits[i] += counts * sums[kFirst + sum][2 * h + i];
      const auto of_plane = static_cast<float>(digits[0] + 256 * digits[1]);
      value = Width == Parts::kWidest ? of_plane : fmaf(of_plane, Parts::factor(Width, h), value);
    }
    return sum_of_planes<Parts, Width / 2>(sums, h, value);
  }
}

}  // namespace lowbit::bytes
