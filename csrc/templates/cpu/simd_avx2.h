// AVX2 primitives (with FMA and F16C): Haswell, Zen and newer. Products run in fp32.
//
// Contract: as simd_avx512.h, with 8 lanes: half a row block.
#pragma once
#include "unrolled.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

struct Simd {
  static constexpr int kLanes = 8;
  static constexpr bool kByteDot =
      false;                         // Why: without VNNI an exact byte product costs more than a conversion and an FMA
  static constexpr int kTokens = 6;  // 12 accumulators, two weights and a broadcast: 15 of 16 registers
  static constexpr int kFloatStreams = 2;  // row vectors of the float product at M = 1: 8 sums in 16 registers
  using F = __m256;
  using B = __m256i;

  // --- bytes ---------------------------------------------------------------------------------------------------
  LOWBIT_INLINE B load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  LOWBIT_INLINE B bit_or(B a, B b) { return _mm256_or_si256(a, b); }
  // Bits At .. At + P - 1 of every byte, moved to bit To, all others 0. Shifts cross byte borders; the mask cuts that
  // off.
  template <int P, int At, int To>
  LOWBIT_INLINE B field(B v) {
    if constexpr (At > To) v = _mm256_srli_epi16(v, At - To);
    if constexpr (At < To) v = _mm256_slli_epi16(v, To - At);
    return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(((1 << P) - 1) << To)));
  }
  template <int Bits>
  LOWBIT_INLINE void prefetch_ahead(const uint8_t*) {}  // the hardware's is enough at this rate

  // --- bytes to floats: out[j] = byte j of every lane -------------------------------------------------------------
  LOWBIT_INLINE B byte_of(B v, int j) {
    return j == 3 ? _mm256_srli_epi32(v, 24) : _mm256_and_si256(_mm256_srli_epi32(v, 8 * j), _mm256_set1_epi32(0xff));
  }
  LOWBIT_INLINE void widen(B v, F out[4]) {
    unrolled<0, 4>([&](auto j) LOWBIT_FORCE_INLINE { out[j] = _mm256_cvtepi32_ps(byte_of(v, j)); });
  }
  template <class Table>
  LOWBIT_INLINE void decode(B codes, F out[4]) {
    unrolled<0, 4>([&](auto j)
                       LOWBIT_FORCE_INLINE { out[j] = _mm256_i32gather_ps(Table::values, byte_of(codes, j), 4); });
  }

  // A codebook: in one or two registers, or where it lies. Why up to 16 entries: four registers leave too few for sums.
  template <int Bits>
  struct Entries {
    F part[Bits == 4 ? 2 : 1];
    const float* values;
  };
  template <int Bits>
  LOWBIT_INLINE Entries<Bits> load_entries(const float* values) {
    Entries<Bits> book{};
    book.values = values;
    if constexpr (Bits <= 4) book.part[0] = load_as_float(values, FloatType::kFloat32, Bits < 3 ? 1 << Bits : kLanes);
    if constexpr (Bits == 4) book.part[1] = load(values + kLanes);
    return book;
  }
  template <int Bits>
  LOWBIT_INLINE void look_up(const Entries<Bits>& book, B codes, F out[4]) {
    unrolled<0, 4>([&](auto j) LOWBIT_FORCE_INLINE {
      if constexpr (Bits > 4) {
        out[j] = _mm256_i32gather_ps(book.values, byte_of(codes, j), 4);
      } else {  // no mask: a permutation looks at three bits of a lane, a blend at the uppermost one
        const B at = _mm256_srli_epi32(codes, 8 * j);
        out[j] = _mm256_permutevar8x32_ps(book.part[0], at);
        if constexpr (Bits == 4) {
          const F upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28 - 8 * j));
          out[j] = _mm256_blendv_ps(out[j], _mm256_permutevar8x32_ps(book.part[1], at), upper);
        }
      }
    });
  }

  // --- floats --------------------------------------------------------------------------------------------------
  LOWBIT_INLINE F zero() { return _mm256_setzero_ps(); }
  LOWBIT_INLINE F set1(float v) { return _mm256_set1_ps(v); }
  LOWBIT_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
  LOWBIT_INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  LOWBIT_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  LOWBIT_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  LOWBIT_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  LOWBIT_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  LOWBIT_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  LOWBIT_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
  LOWBIT_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
  LOWBIT_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  LOWBIT_INLINE F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  LOWBIT_INLINE float reduce_add(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  LOWBIT_INLINE float reduce_max(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  LOWBIT_INLINE bool all_finite(F a) {
    return _mm256_movemask_ps(_mm256_cmp_ps(_mm256_sub_ps(a, a), zero(), _CMP_EQ_OQ)) == 0xff;
  }

  LOWBIT_INLINE F load_as_float(const void* p, FloatType type, int count) {
    if (count < kLanes) {
      alignas(32) char whole[32] = {};
      std::memcpy(whole, p, static_cast<size_t>(count) * (type == FloatType::kFloat32 ? 4 : 2));
      return load_all(whole, type);
    }
    return load_all(p, type);
  }
  LOWBIT_INLINE F load_all(const void* p, FloatType type) {
    if (type == FloatType::kFloat32) return _mm256_loadu_ps(static_cast<const float*>(p));
    const __m128i half = _mm_loadu_si128(static_cast<const __m128i*>(p));
    if (type == FloatType::kFloat16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  // 8 floats of 8 bits without NaN: powers of two, 2^(e - 127), and float8_e4m3fn, whose bits are those of an fp32
  // number 2^-120 too small.
  LOWBIT_INLINE F load_e8m0(const void* p) {
    const B e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    // Why max: 2^-127 is subnormal.
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x400000)));
  }
  LOWBIT_INLINE F load_e4m3(const void* p) {
    const B v = _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    const B bits = _mm256_and_si256(_mm256_slli_epi32(v, 20), _mm256_set1_epi32(static_cast<int>(0x87f00000u)));
    return mul(_mm256_castsi256_ps(bits), set1(0x1p120f));
  }
  LOWBIT_INLINE void store_from_float(void* p, FloatType type, F v, int count) {
    alignas(32) char whole[32];
    if (type == FloatType::kFloat32) {
      _mm256_store_ps(reinterpret_cast<float*>(whole), v);
    } else {
      _mm_store_si128(reinterpret_cast<__m128i*>(whole), to_half(type, v));
    }
    std::memcpy(p, whole, static_cast<size_t>(count) * (type == FloatType::kFloat32 ? 4 : 2));
  }
  LOWBIT_INLINE __m128i to_half(FloatType type, F v) {
    if (type == FloatType::kFloat16) return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // round to nearest even on the upper half; a NaN stays a NaN
    const B bits = _mm256_castps_si256(v);
    const B odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    B up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const B nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan);
    up = _mm256_srli_epi32(up, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
