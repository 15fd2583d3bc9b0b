// x, prepared once a call (a slab of tokens at a time) in the form that the products read.
//
// Planes: each block of x (a group of the weight, at most kMaxBlock values of one token) becomes fixed-point numbers
// of P base-256 digits with one power of two as its scale; so products with bytes are exact integers inside a block.
//   P = 3 for fp32: 22 bits below the block's largest value; P = 2 for fp16 and bf16: 14 bits; P = 1: act="int8",
//   symmetric, one scale a token (amax / 127, round half to even), as in torch's per-token dynamic quantization.
// Floats: x as fp32, padded with zeros to whole chunks.
//
// A token that holds a NaN or an infinity gives NaN: its scale is NaN and its digits are 0.
#pragma once

namespace lowbit::cpu::LOWBIT_ISA_NS {

struct Planes {
  int64_t tokens, k_padded, pitch, block, blocks;
  int planes;
  int8_t* digits;  // [token][plane][pitch]; bfloat16 pieces on an ISA with tiles: two bytes each
  float* scale;    // [block][token]: times the integer product, 2^-shift of the byte form included
  float* sum;      // [block][token]: sum of the represented x
  int32_t* start;  // [block][token][plane]: -offset * sum of the digits, where an accumulator starts
};

struct FloatRows {
  int64_t tokens, k_padded, pitch, block, blocks;
  float* values;  // [token][pitch]
};

namespace {

constexpr int kMaxBlock = 128;

// Values of x that share a scale: a group of the weight, or a fixed run of k where groups are longer or whole rows.
inline int64_t block_size(int64_t group_size) { return group_size > 0 ? group_size : kMaxBlock; }

// Elements from one row of prepared x to the next: an odd number of cache lines.
// Why: rows a power of two apart fall into the same few cache sets; a tile reads 16 of them at once.
inline int64_t row_pitch(int64_t k_padded, int64_t bytes) {
  const int64_t lines = ceil_div(k_padded * bytes, 64);
  return (lines | 1) * 64 / bytes;
}

inline size_t planes_bytes(int64_t tokens, int64_t pitch, int64_t blocks, int planes) {
  return static_cast<size_t>(planes) * tokens * pitch + 8 * static_cast<size_t>(tokens) * blocks +
         4 * static_cast<size_t>(planes) * tokens * blocks + 64;
}
inline const char* row_of(const Input& x, int64_t token) {
  const int64_t size = x.type == FloatType::kFloat32 ? 4 : 2;
  return static_cast<const char*>(x.data) + token * x.row_stride * size;
}

LOWBIT_INLINE Simd::F load_row(const char* row, FloatType type, int64_t k, int64_t end) {
  const int64_t size = type == FloatType::kFloat32 ? 4 : 2;
  const int64_t count = std::max<int64_t>(0, std::min<int64_t>(Simd::kLanes, end - k));
  return Simd::load_as_float(row + k * size, type, static_cast<int>(count));
}

inline float power_of_two(int e) {  // e in -126..127
  return __builtin_bit_cast(float, static_cast<uint32_t>(e + 127) << 23);
}

template <ActType A>
constexpr int kPlanes = A == ActType::kFloat32 ? 3
                        : A == ActType::kInt8  ? 1
                                               : 2;

// act = int8: the scale of a token (NaN where it holds a NaN or an infinity), and x as multiples of it.
// Why: a true division, so that ties round as in x / scale.
inline float int8_scale(const char* row, FloatType type, int64_t k, int64_t k_padded) {
  Simd::F amax = Simd::zero();
  bool finite = true;
  for (int64_t i = 0; i < k_padded; i += Simd::kLanes) {
    const Simd::F v = load_row(row, type, i, k);
    finite &= Simd::all_finite(v);
    amax = Simd::max(amax, Simd::abs(v));
  }
  return finite ? Simd::reduce_max(amax) / 127.0f : std::numeric_limits<float>::quiet_NaN();
}
LOWBIT_INLINE Simd::F int8_value(Simd::F v, float scale) {
  if (!(scale > 0)) return Simd::zero();
  v = Simd::round(Simd::div(v, Simd::set1(scale)));
  return Simd::max(Simd::min(v, Simd::set1(127.0f)), Simd::set1(-127.0f));
}
// True when a token holds no NaN and no infinity.
inline bool finite_row(const char* row, FloatType type, int64_t k, int64_t k_padded) {
  bool finite = true;
  for (int64_t i = 0; i < k_padded; i += Simd::kLanes) finite &= Simd::all_finite(load_row(row, type, i, k));
  return finite;
}

// The factor that turns x into integers of P digits, as two powers of two (one alone may overflow), and its inverse.
struct FixedPoint {
  float up1, up2, down;
};
template <int P>
inline FixedPoint fixed_point(float amax) {
  if (!(amax > 0)) return {0, 0, 0};
  // Why: digits reach 127.5 / 128 of a full range, so a mantissa above 1.992 counts as the next power of two.
  int e = 0;
  std::frexp(std::min(amax, 3.0e38f) * 1.0079f, &e);  // amax < 2^e
  // |x| * 2^shift < 2^(8P - 1). Why the limit: 2^-148 is the last power of two that fp32 holds.
  const int shift = std::min(8 * P - 1 - e, 148);
  const int half = shift / 2;
  return {power_of_two(half), power_of_two(shift - half), std::ldexp(1.0f, -shift)};
}

#if defined(LOWBIT_ISA_BYTE_DOT)
// One token of the planes. `unit` is 2^-shift of the byte form.
template <int P>
void quantize_token(const Input& x, int64_t token, int64_t k, float unit, int offset, const Planes& out) {
  using F = Simd::F;
  const char* row = row_of(x, token);
  constexpr int kStep = Simd::kLanes;
  const float token_scale = P == 1 ? int8_scale(row, x.type, k, out.k_padded) : 0.0f;
  const bool finite = P == 1 ? token_scale == token_scale : finite_row(row, x.type, k, out.k_padded);
  int8_t* digits = out.digits + token * P * out.pitch;
  for (int64_t b = 0; b < out.blocks; ++b) {
    const int64_t begin = b * out.block;
    const int64_t end = std::min(begin + out.block, out.k_padded);
    FixedPoint fp{0, 0, token_scale};
    if constexpr (P > 1) {
      F amax = Simd::zero();
      for (int64_t i = begin; i < end; i += kStep) amax = Simd::max(amax, Simd::abs(load_row(row, x.type, i, k)));
      fp = fixed_point<P>(finite ? Simd::reduce_max(amax) : 0.0f);
    }
    Simd::I sums[P];
    unrolled<0, P>([&](auto p) LOWBIT_FORCE_INLINE { sums[p] = Simd::zero_int(); });
    for (int64_t i = begin; i < end; i += kStep) {
      F v = load_row(row, x.type, i, k);
      if constexpr (P > 1) {
        v = Simd::mul(Simd::mul(v, Simd::set1(fp.up1)), Simd::set1(fp.up2));
      } else {
        v = int8_value(v, token_scale);
      }
      if (!finite) v = Simd::zero();
      Simd::template store_digits<P>(v, digits + i, out.pitch, sums);
    }
    double sum = 0;
    unrolled<0, P>([&](auto p) LOWBIT_FORCE_INLINE {
      const int32_t s = Simd::reduce_add_int(sums[p]);
      out.start[(b * out.tokens + token) * P + p] = -offset * s;
      sum = sum * 256 + s;
    });
    const float nan = std::numeric_limits<float>::quiet_NaN();
    out.scale[b * out.tokens + token] = finite ? fp.down * unit : nan;
    out.sum[b * out.tokens + token] = finite ? static_cast<float>(sum * fp.down) : nan;
  }
}

#endif

// One token as floats. act = int8 replaces x by the values that its int8 form stands for.
template <ActType A>
void copy_token(const Input& x, int64_t token, int64_t k, const FloatRows& out) {
  using F = Simd::F;
  const char* row = row_of(x, token);
  constexpr int kStep = Simd::kLanes;
  float* values = out.values + token * out.pitch;
  float scale = 1;
  if constexpr (A == ActType::kInt8) scale = int8_scale(row, x.type, k, out.k_padded);
  for (int64_t i = 0; i < out.k_padded; i += kStep) {
    F v = load_row(row, x.type, i, k);
    if constexpr (A == ActType::kInt8) v = Simd::mul(int8_value(v, scale), Simd::set1(scale));
    Simd::store(values + i, v);
  }
}
using CopyToken = void(const Input& x, int64_t token, int64_t k, const FloatRows& out);

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
