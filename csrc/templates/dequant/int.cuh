// Integer codes to the A operand of a product, 128 k of a row tile at a time.
//
// The bits of a code alone in a register are a number: code * 2^q * 2^-24 in fp16, where q is the bit its field lies
// at, and code * 2^q * 2^-133 in bf16. A fused multiply-add turns that into (code - offset) / kUnit, exact, with a
// factor that undoes q (ValuesOf). fp16 may also be multiplied as it is (Decoder): one `and` a register, and what the
// offset is worth is taken from the sum of x later. q then differs between the row halves only: shifts bring all
// fragments to one place. Sums of products with numbers near 2^-133 would not be exact.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../halves.cuh"
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

template <int Bits>
struct Codes {
  using Source = Words<Bits>;

  static __host__ __device__ constexpr int code_bit(int h) {
    return Bits == 1 || Bits == 2 || Bits == 4 ? Bits * h : 0;
  }

  // A word whose bytes hold whole codes of (f, h), and the bit where they begin.
  static __host__ __device__ constexpr int place(int f, int h) {
    return Bits == 3 ? f % 2 * 4 : Bits == 1 || Bits == 2 || Bits == 4 ? Source::bit(Bits, 2 * f + h) : 0;
  }
  static __device__ __forceinline__ uint32_t placed(const Source& from, int f, int h) {
    const int u = 2 * f + h;
    if constexpr (Bits == 3) {
      // Two fragments at once: 2-bit fields of f even at bit 0, of f odd at bit 4, and the 1-bit field above each.
      const int even = u - f % 2 * 2;
      const uint32_t low = shifted(from.of(2, u), -2 * h);
      const uint32_t high = shifted(from.of(1, u), 2 - Source::bit(1, even));
      return ptx::select(low, high, bytes(0x33));
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

  // The same with the codes of a row half at one place: code_bit(h), `lift` bits higher if asked for, with 1 bit.
  static __device__ __forceinline__ uint32_t merged(const Source& from, int f, int h, int lift = 0) {
    return shifted(placed(from, f, h), code_bit(h) + lift - place(f, h));
  }

  // Registers h and 2 + h of a fragment, of bytes with codes at bit q: each 16-bit half has its code alone, at bit q.
  static __device__ __forceinline__ void alone(uint32_t word, int q, int h, uint32_t (&a)[4]) {
    const uint32_t mask = halves(((1u << Bits) - 1) << q);
    a[h] = word & mask;
    a[2 + h] = Bits == 8 ? __byte_perm(word, 0, 0x4341) : word >> 8 & mask;  // one instruction for shift and mask
  }
  // The four registers of fragment f: bits of the code at code_bit(h) of each 16-bit half, all others 0.
  static __device__ __forceinline__ void fragment(const Source& from, int f, uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) alone(merged(from, f, h), code_bit(h), h, a);
  }
};

}  // namespace planes

template <int Bits>
struct Decoder<Int<Bits>, __half> {
  using Codes = planes::Codes<Bits>;
  using Words = typename Codes::Source;
  static constexpr bool kSubtractOffset = true;  // products hold codes, the caller takes offset * sum(x) away
  static constexpr float kUnit = 16777216.0f;    // what sums of products are to be multiplied by

  // Products of a row half come out 2^exponent times too large.
  static __host__ __device__ constexpr int exponent(int h) { return Codes::code_bit(h); }

  __device__ explicit Decoder(float /*offset*/) {}
  __device__ __forceinline__ void fragment(const Words& from, int f, uint32_t (&a)[4]) const {
    Codes::fragment(from, f, a);
  }
};

// Codes without their offset.
template <int Bits, class Act>
struct ValuesOf : ValueDecoder {
  using Codes = planes::Codes<Bits>;
  using Words = typename Codes::Source;
  static constexpr bool kHalf = std::is_same<Act, __half>::value;
  // Of fp16 the smallest numbers that there are (scaled.cuh says why); half of that is the offset of 1 bit.
  static constexpr float kUnit = !kHalf ? 64.0f : Bits == 1 ? 0x1p23f : 0x1p24f;

  uint32_t addend;

  __device__ explicit ValuesOf(float offset) : addend(addend_of(offset)) {}
  // What takes an offset away: a whole number, 0.5 for codes of 1 bit that have no zeros.
  static __device__ __forceinline__ uint32_t addend_of(float offset) { return both_halves<Act>(offset * (-1 / kUnit)); }

  // The same of two rows, a pair.
  static __device__ __forceinline__ uint32_t addends_of(float first, float second) {
    return pack_pair<Act>(first * (-1 / kUnit), second * (-1 / kUnit));
  }

  // 2^-q, with 1 bit twice that; 2^(127 - q).
  static __host__ __device__ constexpr uint32_t factor(int q) {
    return planes::halves(kHalf ? (15u + (Bits == 1) - q) << 10 : (254u - q) << 7);
  }

  __device__ __forceinline__ void fragment(const Words& from, int f, uint32_t (&a)[4]) const {
    fragment(from, f, {addend, addend}, a);
  }
  // With an offset of its own for each row half.
  static __device__ __forceinline__ void fragment(const Words& from, int f, const uint32_t (&addends)[2],
                                                  uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q = Codes::place(f, h);
      Codes::alone(Codes::placed(from, f, h), q, h, a);
      a[h] = ptx::multiply_add<Act>(a[h], factor(q), addends[h]);
      a[2 + h] = ptx::multiply_add<Act>(a[2 + h], factor(q), addends[h]);
    }
  }
};

template <int Bits>
struct Decoder<Int<Bits>, __nv_bfloat16> : ValuesOf<Bits, __nv_bfloat16> {
  using ValuesOf<Bits, __nv_bfloat16>::ValuesOf;
};

// Exact: integers in fp16 without their offset too, so that no sums of x are needed.
template <class Weight, class Act, bool Exact>
struct DecoderFor {
  using Type = Decoder<Weight, Act>;
};
template <int Bits>
struct DecoderFor<Int<Bits>, __half, true> {
  using Type = ValuesOf<Bits, __half>;
};

}  // namespace lowbit
