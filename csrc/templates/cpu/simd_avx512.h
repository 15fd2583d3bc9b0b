// AVX-512 primitives (F, BW, VL, DQ, VNNI, VBMI, GFNI): Ice Lake, Zen 4, Sapphire Rapids and newer.
//
// Contract: included inside a target region, after prelude.h, with LOWBIT_ISA_NS set. A lane is one row of the weight.
// Byte vectors hold kLanes x 4 bytes, lane-major: the four bytes of a lane are four consecutive k of its row.
#pragma once
#include "unrolled.h"
#define LOWBIT_ISA_BYTE_DOT 1

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

struct Simd {
  static constexpr int kLanes = 16;
  static constexpr bool kByteDot = true;  // products run on bytes: x as digit planes, see activations.h
  static constexpr int kTokens = 12;      // tokens of a float tile: 24 accumulators
  static constexpr int kFloatStreams =
      4;  // row vectors of the float product at M = 1: 16 sums and 4 values of x in 32 registers
  using F = __m512;
  using I = __m512i;
  using B = __m512i;

  // --- bytes ---------------------------------------------------------------------------------------------------
  LOWBIT_INLINE B load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  LOWBIT_INLINE void store_bytes(uint8_t* p, B v) { _mm512_storeu_si512(p, v); }
  LOWBIT_INLINE B bit_or(B a, B b) { return _mm512_or_si512(a, b); }
  // Bits At .. At + P - 1 of every byte, moved to bit To, all others 0.
  template <int P, int At, int To>
  LOWBIT_INLINE B field(B v) {
    if constexpr (At == To) return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(((1 << P) - 1) << To)));
    // Why: a product with a matrix of bits does in one instruction what a shift and a mask do in two.
    uint64_t matrix = 0;  // row of output bit i in byte 7 - i
    for (int i = 0; i < P; ++i) matrix |= uint64_t{1} << (At + i) << (8 * (7 - To - i));
    return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(static_cast<int64_t>(matrix)), 0);
  }
  template <class Table>
  LOWBIT_INLINE B lookup(B codes) {  // tables of up to 64 bytes: every byte form of a float has at most 6 bits
    return _mm512_permutexvar_epi8(codes, _mm512_load_si512(Table::bytes));
  }
  LOWBIT_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  // Asks for one chunk of a stream of packed codes, kAhead bytes before it is used.
  template <int Bits>
  LOWBIT_INLINE void prefetch_ahead(const uint8_t* p) {
    constexpr int kAhead = 1024;
    for (int i = 0; i < Bits; ++i) _mm_prefetch(reinterpret_cast<const char*>(p) + kAhead + 64 * i, _MM_HINT_T0);
  }

  // --- bytes to floats: out[j] = byte j of every lane -------------------------------------------------------------
  LOWBIT_INLINE void widen(B v, F out[4]) {
    const I low = _mm512_set1_epi32(0xff);
    out[0] = _mm512_cvtepi32_ps(_mm512_and_si512(v, low));
    out[1] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 8), low));
    out[2] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 16), low));
    out[3] = _mm512_cvtepi32_ps(_mm512_srli_epi32(v, 24));
  }
  // The values of float codes as bfloat16, which holds all of them exactly: even = k0 | k2 << 16, odd = k1 | k3 << 16.
  template <class Table>
  LOWBIT_INLINE void decode_pairs(B codes, I& even, I& odd) {
    constexpr int kBits = Table::bits;
    if constexpr (kBits <= 5) {  // vpermw looks at five bits of each word: no mask needed
      const I t = _mm512_load_si512(Table::words);
      even = _mm512_permutexvar_epi16(codes, t);
      odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), t);
      return;
    }
    // Why: two byte look-ups of 64 or 128 entries beat vpermi2w (three instructions each on Intel).
    I high, low;
    if constexpr (kBits <= 7) {
      high = _mm512_permutexvar_epi8(codes, _mm512_load_si512(Table::high));
      low = _mm512_permutexvar_epi8(codes, _mm512_load_si512(Table::low));
    } else {
      high = _mm512_permutex2var_epi8(_mm512_load_si512(Table::high), codes, _mm512_load_si512(Table::high + 64));
      low = _mm512_permutex2var_epi8(_mm512_load_si512(Table::low), codes, _mm512_load_si512(Table::low + 64));
    }
    if constexpr (kBits >= 7) {  // the tables hold magnitudes; the sign bit goes to the top of the high byte
      const I sign = kBits == 7 ? _mm512_slli_epi16(codes, 1) : codes;
      high = _mm512_ternarylogic_epi32(high, sign, _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);
    }
    const I low_byte = _mm512_set1_epi16(0x00ff);
    even = _mm512_ternarylogic_epi32(low_byte, low, _mm512_slli_epi16(high, 8), 0xCA);
    odd = _mm512_ternarylogic_epi32(low_byte, _mm512_srli_epi16(low, 8), high, 0xCA);
  }
  template <class Table>
  LOWBIT_INLINE void decode(B codes, F out[4]) {
    const I upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    I even, odd;
    decode_pairs<Table>(codes, even, odd);
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(even, 16));
    out[1] = _mm512_castsi512_ps(_mm512_slli_epi32(odd, 16));
    out[2] = _mm512_castsi512_ps(_mm512_and_si512(even, upper));
    out[3] = _mm512_castsi512_ps(_mm512_and_si512(odd, upper));
  }

  // A codebook: in one or two registers, or where it lies.
  template <int Bits>
  struct Entries {
    F part[Bits == 5 ? 2 : 1];
    const float* values;
  };
  template <int Bits>
  LOWBIT_INLINE Entries<Bits> load_entries(const float* values) {
    Entries<Bits> book{};
    book.values = values;
    if constexpr (Bits <= 5) book.part[0] = load_as_float(values, FloatType::kFloat32, Bits < 4 ? 1 << Bits : kLanes);
    if constexpr (Bits == 5) book.part[1] = load(values + kLanes);
    return book;
  }
  template <int Bits>
  LOWBIT_INLINE void look_up(const Entries<Bits>& book, B codes, F out[4]) {
    unrolled<0, 4>([&](auto j) LOWBIT_FORCE_INLINE {
      const I at = _mm512_srli_epi32(codes, 8 * j);
      if constexpr (Bits <= 4) {  // no mask: a permutation looks at four bits of a lane, one of two registers at five
        out[j] = _mm512_permutexvar_ps(at, book.part[0]);
      } else if constexpr (Bits == 5) {
        out[j] = _mm512_permutex2var_ps(book.part[0], at, book.part[1]);
      } else {
        out[j] = _mm512_i32gather_ps(_mm512_and_si512(at, _mm512_set1_epi32(0xff)), book.values, 4);
      }
    });
  }

  // --- floats --------------------------------------------------------------------------------------------------
  LOWBIT_INLINE F zero() { return _mm512_setzero_ps(); }
  LOWBIT_INLINE F set1(float v) { return _mm512_set1_ps(v); }
  LOWBIT_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  LOWBIT_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  LOWBIT_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  LOWBIT_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  LOWBIT_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  LOWBIT_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  LOWBIT_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  LOWBIT_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  LOWBIT_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
  LOWBIT_INLINE F abs(F a) { return _mm512_abs_ps(a); }
  LOWBIT_INLINE F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  LOWBIT_INLINE float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
  LOWBIT_INLINE float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  // True when no lane is NaN or infinite: x - x is 0 for every finite x.
  LOWBIT_INLINE bool all_finite(F a) { return _mm512_cmp_ps_mask(_mm512_sub_ps(a, a), zero(), _CMP_EQ_OQ) == 0xffff; }

  // Loads count <= 16 values of a 16- or 32-bit float type as fp32; the other lanes are 0.
  LOWBIT_INLINE F load_as_float(const void* p, FloatType type, int count) {
    const __mmask16 m = static_cast<__mmask16>((1u << count) - 1);
    if (type == FloatType::kFloat32) return _mm512_maskz_loadu_ps(m, p);
    const __m256i half = _mm256_maskz_loadu_epi16(m, p);
    if (type == FloatType::kFloat16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  // 16 floats of 8 bits without NaN: powers of two, 2^(e - 127), and float8_e4m3fn, whose bits are those of an fp32
  // number 2^-120 too small.
  LOWBIT_INLINE F load_e8m0(const void* p) {
    const I e = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    // Why max: 2^-127 is subnormal.
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x400000)));
  }
  LOWBIT_INLINE F load_e4m3(const void* p) {
    const I v = _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    const I bits = _mm512_and_si512(_mm512_slli_epi32(v, 20), _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
    return mul(_mm512_castsi512_ps(bits), set1(0x1p120f));
  }
  LOWBIT_INLINE void store_from_float(void* p, FloatType type, F v, int count) {
    const __mmask16 m = static_cast<__mmask16>((1u << count) - 1);
    if (type == FloatType::kFloat32) return _mm512_mask_storeu_ps(p, m, v);
    __m256i half;
    if (type == FloatType::kFloat16) {
      half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {  // round to nearest even on the upper half; a NaN stays a NaN
      const I bits = _mm512_castps_si512(v);
      const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      I up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
      half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
    }
    _mm256_mask_storeu_epi16(p, m, half);
  }

  // --- integers ------------------------------------------------------------------------------------------------
  LOWBIT_INLINE I broadcast(const int32_t* p) { return _mm512_set1_epi32(*p); }
  LOWBIT_INLINE F to_float(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
  LOWBIT_INLINE B sub_bytes(B v, int m) { return _mm512_sub_epi8(v, _mm512_set1_epi8(static_cast<char>(m))); }
  LOWBIT_INLINE F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  LOWBIT_INLINE I broadcast(const int8_t* p) {
    int32_t quad;
    std::memcpy(&quad, p, sizeof(quad));
    return _mm512_set1_epi32(quad);
  }
  // acc[lane] + sum over j of byte j of w (unsigned) times byte j of x (signed), exact.
  LOWBIT_INLINE I dot(I acc, B w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
  // The same with four bytes of x in memory, for tiles that leave no register for them.
  // Why asm: gcc 12 hoists the broadcast of x into a register of its own and then spills accumulators.
  LOWBIT_INLINE I dot(I acc, B w, const int8_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(x)));
    return acc;
  }
  // Splits round(v) into P base-256 digits in -128..127, lowest digit last; stores 16 bytes a plane, adds digits up.
  template <int P>
  LOWBIT_INLINE void store_digits(F v, int8_t* p, int64_t plane_stride, I sums[P]) {
    I whole = _mm512_cvtps_epi32(v);
    for (int d = P - 1; d > 0; --d) {
      const I digit = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p + d * plane_stride), _mm512_cvtepi32_epi8(digit));
      sums[d] = _mm512_add_epi32(sums[d], digit);
      whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, digit), 8);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
    sums[0] = _mm512_add_epi32(sums[0], whole);
  }
  // Stores the upper halves of 16 values as bfloat16, in the order 0, 2, 1, 3 of every four; returns what is left of v.
  LOWBIT_INLINE F split_pairs(F v, uint16_t* p) {
    const I bits = _mm512_castps_si512(v);
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
    constexpr int kSwap = _MM_SHUFFLE(3, 1, 2, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, kSwap), kSwap));
    const I upper = _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    return _mm512_sub_ps(v, _mm512_castsi512_ps(upper));
  }
  LOWBIT_INLINE int32_t reduce_add_int(I v) { return _mm512_reduce_add_epi32(v); }
  LOWBIT_INLINE I zero_int() { return _mm512_setzero_si512(); }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
