// Plain C++ primitives, for any CPU and as the easiest to debug: one lane, one row at a time, in fp32.
//
// Contract: as simd_avx512.h, outside any target region.
#pragma once
#include "unrolled.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

struct Simd {
  static constexpr int kLanes = 1;
  static constexpr bool kByteDot = false;
  static constexpr int kTokens = 4;
  static constexpr int kFloatStreams = 2;  // row vectors of the float product at M = 1
  using F = float;
  using B = uint32_t;  // four bytes: four consecutive k of the row

  // --- bytes ---------------------------------------------------------------------------------------------------
  LOWBIT_INLINE B load_bytes(const uint8_t* p) {
    B v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  LOWBIT_INLINE B bit_or(B a, B b) { return a | b; }
  // Bits At .. At + P - 1 of every byte, moved to bit To, all others 0.
  template <int P, int At, int To>
  LOWBIT_INLINE B field(B v) {
    if constexpr (At > To) v >>= At - To;
    if constexpr (At < To) v <<= To - At;
    return v & (0x01010101u * static_cast<B>(((1 << P) - 1) << To));
  }
  template <int Bits>
  LOWBIT_INLINE void prefetch_ahead(const uint8_t*) {}

  // --- bytes to floats -------------------------------------------------------------------------------------------
  LOWBIT_INLINE void widen(B v, F out[4]) {
    for (int j = 0; j < 4; ++j) out[j] = static_cast<float>((v >> (8 * j)) & 0xff);
  }
  template <class Table>
  LOWBIT_INLINE void decode(B codes, F out[4]) {
    for (int j = 0; j < 4; ++j) out[j] = Table::values[(codes >> (8 * j)) & 0xff];
  }

  // A codebook, and its values by code.
  template <int Bits>
  struct Entries {
    const float* values;
  };
  template <int Bits>
  LOWBIT_INLINE Entries<Bits> load_entries(const float* values) {
    return {values};
  }
  template <int Bits>
  LOWBIT_INLINE void look_up(const Entries<Bits>& book, B codes, F out[4]) {
    for (int j = 0; j < 4; ++j) out[j] = book.values[(codes >> (8 * j)) & 0xff];
  }

  // --- floats --------------------------------------------------------------------------------------------------
  LOWBIT_INLINE F zero() { return 0.0f; }
  LOWBIT_INLINE F set1(float v) { return v; }
  LOWBIT_INLINE F load(const float* p) { return *p; }
  LOWBIT_INLINE void store(float* p, F v) { *p = v; }
  LOWBIT_INLINE F add(F a, F b) { return a + b; }
  LOWBIT_INLINE F sub(F a, F b) { return a - b; }
  LOWBIT_INLINE F mul(F a, F b) { return a * b; }
  LOWBIT_INLINE F div(F a, F b) { return a / b; }
  LOWBIT_INLINE F fma(F a, F b, F c) { return a * b + c; }
  LOWBIT_INLINE F max(F a, F b) { return a > b ? a : b; }
  LOWBIT_INLINE F min(F a, F b) { return a < b ? a : b; }
  LOWBIT_INLINE F abs(F a) { return std::fabs(a); }
  LOWBIT_INLINE F round(F a) { return std::nearbyint(a); }
  LOWBIT_INLINE float reduce_add(F a) { return a; }
  LOWBIT_INLINE float reduce_max(F a) { return a; }
  LOWBIT_INLINE bool all_finite(F a) { return a - a == 0.0f; }

  LOWBIT_INLINE F load_as_float(const void* p, FloatType type, int count) {
    if (count <= 0) return 0.0f;
    if (type == FloatType::kFloat32) {
      float v;
      std::memcpy(&v, p, sizeof(v));
      return v;
    }
    uint16_t h;
    std::memcpy(&h, p, sizeof(h));
    return type == FloatType::kFloat16 ? from_fp16(h) : __builtin_bit_cast(float, static_cast<uint32_t>(h) << 16);
  }
  // A float of 8 bits without NaN: a power of two, 2^(e - 127), and float8_e4m3fn, whose bits are those of an fp32
  // number 2^-120 too small.
  LOWBIT_INLINE F load_e8m0(const void* p) {
    const uint32_t e = *static_cast<const uint8_t*>(p);
    return __builtin_bit_cast(float, e ? e << 23 : 0x400000u);  // 2^-127 is subnormal
  }
  LOWBIT_INLINE F load_e4m3(const void* p) {
    const uint32_t v = *static_cast<const uint8_t*>(p);
    return __builtin_bit_cast(float, (v & 0x80) << 24 | (v & 0x7f) << 20) * 0x1p120f;
  }
  LOWBIT_INLINE void store_from_float(void* p, FloatType type, F v, int count) {
    if (count <= 0) return;
    if (type == FloatType::kFloat32) {
      std::memcpy(p, &v, sizeof(v));
      return;
    }
    const uint16_t h = type == FloatType::kFloat16 ? to_fp16(v) : to_bf16(v);
    std::memcpy(p, &h, sizeof(h));
  }

  LOWBIT_INLINE float from_fp16(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return __builtin_bit_cast(float, sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // Why: as bits of an fp32 number 2^-112 too small, which also makes fp16's subnormals right.
    const float scaled = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, scaled));
  }
  LOWBIT_INLINE uint16_t to_fp16(float v) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, v);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
    if (magnitude < 0x38800000) {  // below the smallest normal: adding 0.5 lets the FPU round to a multiple of 2^-24
      const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
      return sign | static_cast<uint16_t>(__builtin_bit_cast(uint32_t, shifted) - 0x3f000000);
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
  }
  LOWBIT_INLINE uint16_t to_bf16(float v) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, v);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
