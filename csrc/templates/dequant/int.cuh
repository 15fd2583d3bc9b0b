// Integer codes to the A operand of a product, 128 k of a row tile at a time.
//
// fp16: the code itself, as a subnormal number: code * 2^q * 2^-24, where q is the bit its field lies at. One `and` a
// register, exact, and no offset: what the offset is worth is taken from the sum of x later. q differs between the row
// halves only: shifts bring all fragments to one place. bf16: the same bits are code * 2^q * 2^-133, which a fused
// multiply-add turns into (code - offset) * 2^-6, exact; sums of products with numbers near 2^-133 would not be.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../types.cuh"
#include "planes.cuh"

namespace lowbit {

template <class Weight, class Act>
struct Decoder;

// What decoders of values, rather than codes, have in common: no offset left to take away.
struct ValueDecoder {
  static constexpr bool kSubtractOffset = false;
  static __host__ __device__ constexpr int exponent(int) { return 0; }
};

namespace planes {

// One word whose bytes hold whole codes of (f, h) with the lowest bit at code_bit(h); `lift` bits higher if asked for,
// with 1 bit.
template <int Bits>
struct Codes {
  using Source = Words<Bits>;

  static __host__ __device__ constexpr int code_bit(int h) {
    return Bits == 1 || Bits == 2 || Bits == 4 ? Bits * h : 0;
  }

  static __device__ __forceinline__ uint32_t merged(const Source& from, int f, int h, int lift = 0) {
    const int u = 2 * f + h;
    if constexpr (Bits == 2) {
      return from.of(2, u) >> f % 2 * 4;
    } else if constexpr (Bits == 1) {
      // Four fragments, at bits 2 and 3, 6 and 7, 0 and 1, 4 and 5.
      return shifted(from.of(1, u), (f % 4 < 2 ? -2 : 0) - f % 2 * 4 + lift);
    } else if constexpr (Bits == 3) {
      // Two fragments at once: 2-bit fields of f even at bit 0, of f odd at bit 4, and the 1-bit field above each; then
      // the one that is wanted comes to bit 0.
      const int even = u - f % 2 * 2;
      const uint32_t low = shifted(from.of(2, u), -2 * h);
      const uint32_t high = shifted(from.of(1, u), 2 - Source::bit(1, even));
      return ptx::select(low, high, bytes(0x33)) >> f % 2 * 4;
    } else if constexpr (Bits == 5) {
      return ptx::select(shifted(from.of(4, u), -4 * h), shifted(from.of(1, u), 4 - Source::bit(1, u)), bytes(0x0F));
    } else if constexpr (Bits == 6) {
      return ptx::select(shifted(from.of(4, u), -4 * h), shifted(from.of(2, u), 4 - Source::bit(2, u)), bytes(0x0F));
    } else if constexpr (Bits == 7) {
      const uint32_t low =
          ptx::select(shifted(from.of(4, u), -4 * h), shifted(from.of(2, u), 4 - Source::bit(2, u)), bytes(0x0F));
      return ptx::select(low, shifted(from.of(1, u), 6 - Source::bit(1, u)), bytes(0x3F));
    } else {
      return from.of(Bits, u);
    }
  }

  // The four registers of fragment f: bits of the code at code_bit(h) of each 16-bit half, all others 0.
  static __device__ __forceinline__ void fragment(const Source& from, int f, uint32_t (&a)[4]) {
    constexpr uint32_t kMask = (1u << Bits) - 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t word = merged(from, f, h);
      if constexpr (Bits == 8) {
        a[h] = word & 0x00FF00FFu;
        a[2 + h] = __byte_perm(word, 0, 0x4341);  // one instruction for shift and mask
      } else {
        a[h] = word & halves(kMask << code_bit(h));
        a[2 + h] = (word >> 8) & halves(kMask << code_bit(h));
      }
    }
  }
};

}  // namespace planes

template <int Bits>
struct Decoder<Int<Bits>, __half> {
  using Codes = planes::Codes<Bits>;
  using Words = typename Codes::Source;
  static constexpr bool kSubtractOffset = true;  // products hold codes, the caller takes offset * sum(x) away
  static constexpr uint32_t kOne = 0x00010001u;  // what a value of 1 looks like
  static constexpr float kUnit = 16777216.0f;    // and its inverse

  // Products of a row half come out 2^exponent times too large.
  static __host__ __device__ constexpr int exponent(int h) { return Codes::code_bit(h); }

  __device__ explicit Decoder(float /*offset*/) {}
  __device__ __forceinline__ void fragment(const Words& from, int f, uint32_t (&a)[4]) const {
    Codes::fragment(from, f, a);
  }
};

template <int Bits>
struct Decoder<Int<Bits>, __nv_bfloat16> : ValueDecoder {
  using Codes = planes::Codes<Bits>;
  using Words = typename Codes::Source;
  static constexpr uint32_t kOne = 0x3C803C80u;  // 2^-6
  static constexpr float kUnit = 64.0f;

  __nv_bfloat162 minus_offset;

  __device__ explicit Decoder(float offset) : minus_offset(__float2bfloat162_rn(-offset / kUnit)) {}

  __device__ __forceinline__ void fragment(const Words& from, int f, uint32_t (&a)[4]) const {
    Codes::fragment(from, f, a);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t factor = planes::halves((254u - Codes::code_bit(r & 1)) << 7);  // 2^(127 - q)
      a[r] = ptx::multiply_add<__nv_bfloat16>(a[r], factor, reinterpret_cast<const uint32_t&>(minus_offset));
    }
  }
};

}  // namespace lowbit
