// Low-bit floats to the A operand of a product, 128 k of a row tile at a time.
//
// A code's sign goes to the top of a 16-bit half, its exponent and mantissa to where those of the activation type
// meet. The number there is the value times a power of two: 2^(bias - 15) in fp16, where subnormals stay exact; in bf16
// it is 2^(bias - 127), too small for sums in fp32, so one multiplication brings the value itself.
#pragma once
#include "int.cuh"

namespace lowbit {
namespace planes {

// Words whose bytes hold, of (f, h), the sign at bit 7 and the magnitude below it; bits below the code are anything.
// Where a plane of 1 bit holds the sign alone it is never put together with the others.
struct Signed {
  uint32_t sign, magnitude;
};

template <int Bits>
__device__ __forceinline__ Signed left_aligned(const Words<Bits>& from, int f, int h) {
  using Source = Words<Bits>;
  const int u = 2 * f + h;
  constexpr bool kApart = Bits % 2 == 1;
  Signed words{kApart ? shifted(from.of(1, u), 7 - Source::bit(1, u)) : 0, 0};
  int top = kApart ? 7 : 8;  // lowest bit of the byte that is filled yet
  uint32_t filled = 0;
#pragma unroll
  for (int width = 2; width <= 8; width *= 2) {
    if (!(Bits & width)) continue;
    top -= width;
    const uint32_t field = shifted(from.of(width, u), top - Source::bit(width, u));
    words.magnitude = filled ? ptx::select(words.magnitude, field, bytes(filled)) : field;
    filled |= ((1u << width) - 1) << top;
  }
  if (!kApart) words.sign = words.magnitude;
  return words;
}

// The registers of fragment f, for a type whose lowest exponent bit is bit `ExponentBit` of 16. kept: of row halves,
// all bits of a code or none.
template <int Exponent, int Mantissa, int ExponentBit>
__device__ __forceinline__ void float_fragment(const Words<1 + Exponent + Mantissa>& from, int f,
                                               const uint32_t (&kept)[2], uint32_t (&a)[4]) {
  constexpr uint32_t kMagnitude = ((1u << (Exponent + Mantissa)) - 1) << (ExponentBit - Mantissa);
  constexpr int kTop = ExponentBit + Exponent - 1;  // where the highest bit of the magnitude goes
  constexpr bool kTogether = kTop == 14 && (Exponent + Mantissa) % 2 == 1;  // sign and magnitude, as they are in a code
  // Whether a number is in the upper byte of its half: those of four codes are made at once then, and put apart.
  constexpr bool kInUpperByte = ExponentBit - Mantissa >= 8 && !kTogether;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto [sign, magnitude] = left_aligned(from, f, h);
    if constexpr (kInUpperByte) {
      // Why in asm: the compiler would put both halves together from masked words of their own.
      const uint32_t upper = ptx::masked_or(sign, bytes(0x80) & kept[h],
                                            shifted(magnitude, kTop - 14) & bytes(kMagnitude >> 8 & 0xFF) & kept[h]);
      a[h] = __byte_perm(upper, 0, 0x2404);
      a[2 + h] = upper & halves(0xFF00u);
    } else if constexpr (kTogether) {
      a[h] = (sign << 8) & halves(0x8000u | kMagnitude) & kept[h];
      a[2 + h] = sign & halves(0x8000u | kMagnitude) & kept[h];
    } else {
      const uint32_t minus = halves(0x8000u) & kept[h], other = halves(kMagnitude) & kept[h];
      a[h] = ptx::masked_or(sign << 8, minus, shifted(magnitude, kTop - 6) & other);
      a[2 + h] = ptx::masked_or(sign, minus, shifted(magnitude, kTop - 14) & other);
    }
  }
}

}  // namespace planes

template <int Exponent, int Mantissa>
struct Decoder<Float<Exponent, Mantissa>, __half> : ValueDecoder {
  using Type = Float<Exponent, Mantissa>;
  using Words = planes::Words<Type::kBits>;
  // 2^(bias - 15), which is subnormal for a bias of 0.
  static constexpr uint32_t kOne = planes::halves(Type::kBias ? Type::kBias << 10 : 0x0200);
  static constexpr float kUnit = static_cast<float>(1 << (15 - Type::kBias));
  // What bits have to be multiplied by to be values: kUnit.
  static constexpr uint32_t kFactor = planes::halves((30u - Type::kBias) << 10);

  __device__ explicit Decoder(float /*offset*/) {}
  static __device__ __forceinline__ void bits(const Words& from, int f, const uint32_t (&kept)[2], uint32_t (&a)[4]) {
    planes::float_fragment<Exponent, Mantissa, 10>(from, f, kept, a);
  }
  __device__ __forceinline__ void fragment(const Words& from, int f, uint32_t (&a)[4]) const {
    bits(from, f, {~0u, ~0u}, a);
  }
};

template <int Exponent, int Mantissa>
struct Decoder<Float<Exponent, Mantissa>, __nv_bfloat16> : ValueDecoder {
  using Type = Float<Exponent, Mantissa>;
  using Words = planes::Words<Type::kBits>;
  static constexpr uint32_t kOne = 0x3F803F80u;
  static constexpr float kUnit = 1.0f;
  // What bits have to be multiplied by to be values: 2^(127 - bias).
  static constexpr uint32_t kFactor = planes::halves((254u - Type::kBias) << 7);

  __device__ explicit Decoder(float /*offset*/) {}
  static __device__ __forceinline__ void bits(const Words& from, int f, const uint32_t (&kept)[2], uint32_t (&a)[4]) {
    planes::float_fragment<Exponent, Mantissa, 7>(from, f, kept, a);
  }
  __device__ __forceinline__ void fragment(const Words& from, int f, uint32_t (&a)[4]) const {
    bits(from, f, {~0u, ~0u}, a);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = ptx::multiply_add<__nv_bfloat16>(a[r], kFactor, ptx::kMinusZeros);
  }
};

}  // namespace lowbit
