// Integer codes to the A operand of a product of bytes, 128 k of a row tile at a time.
//
// A product of codes is the sum of the products of their planes, so nothing is put together: each plane is an operand
// of its own, masked out of its words in place. The byte is then field * 2^q, where q is the bit the field lies at;
// rows g and g + 8 have different q, which their scales take back. Sums of a plane are kept apart from those of others.
// Codes of 3 bits are put together all the same: that costs no more than two planes, and half of the products. Codes of
// odd fragments then lie 4 bits higher than those of even ones, and stay there: they have sums of their own.
#pragma once
#include <cstdint>

#include "int.cuh"
#include "planes.cuh"

namespace lowbit::bytes {

// Whether planes are put together to whole codes.
template <int Bits>
constexpr bool kMerged = Bits == 3;

// The sums that codes of `Bits` bits need: one a plane, two for a plane of 1 bit where Spare: its fields lie at two
// pairs of places, and sums of their own are cheaper than shifts.
template <int Bits, bool Spare>
struct Parts {
  static constexpr int kPlanes = planes::plane_count(Bits);
  static constexpr int kCount = kMerged<Bits> ? 2 : kPlanes + (Spare && Bits % 2);  // merged: odd fragments, even ones

  // The width of the plane of a part; widest first.
  static __host__ __device__ constexpr int width(int part) {
    int rest = Bits;
    for (int w = 8; w >= 1; w /= 2) {
      if (!(rest & w)) continue;
      if (part == 0) return w;
      --part;
    }
    return 1;
  }
  // The bit q of row half h in a part.
  static __host__ __device__ constexpr int bit(int part, int h) {
    if (kMerged<Bits>) return part ? 0 : 4;
    return width(part) == 1 ? (part == kPlanes ? h : 2 + h) : width(part) == 8 ? 0 : width(part) * h;
  }
  // What a sum of a part counts for in a sum of the first part of the same row.
  static __host__ __device__ constexpr float factor(int part, int h) {
    const int low = kMerged<Bits> ? 0 : layout::plane_low(Bits, width(part));
    const int shift = low - bit(part, h) + bit(0, h);
    return static_cast<float>(1 << shift);
  }
};

// Fragments 4i and 4i + 2 of whole codes, or 4i + 1 and 4i + 3 where Odd: registers (f, h) at 2 * (f / 2 % 2) + h.
template <int Bits, bool Odd>
__device__ __forceinline__ void fragments(const planes::Words<Bits>& from, int i, uint32_t (&a)[4]) {
  static_assert(Bits == 3);
#pragma unroll
  for (int r = 0; r < 4; ++r)
    a[r] = planes::Codes<Bits>::merged(from, 4 * i + r / 2 * 2, r % 2) & planes::bytes(Odd ? 0x70 : 0x07);
}

// Fragments 2i and 2i + 1 of a plane whose words begin at `from`: registers (f, h) at 2 * (f % 2) + h.
template <int Width, bool Spare>
__device__ __forceinline__ void fragments(const uint32_t* from, int i, uint32_t (&a)[4]) {
  if constexpr (Width == 8) {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = from[4 * i + r];
  } else {
    // Words of the even and of the odd fragment, with the fields of row g at the same place.
    uint32_t even, odd;
    int bit = 0;
    if constexpr (Width == 4) {
      even = from[2 * i], odd = from[2 * i + 1];
    } else if constexpr (Width == 2) {
      even = from[i], odd = from[i] >> 4;
    } else {
      const uint32_t word = from[i / 2];
      const bool low = i % 2;  // fields at bits 0, 1 and 4, 5, not 2, 3 and 6, 7
      even = low && !Spare ? word << 2 : word;
      odd = low && !Spare ? word >> 2 : word >> 4;
      bit = low && Spare ? 0 : 2;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t mask = planes::bytes((1u << Width) - 1) << (bit + Width * h);
      a[h] = even & mask, a[2 + h] = odd & mask;
    }
  }
}

}  // namespace lowbit::bytes
