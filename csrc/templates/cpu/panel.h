// What gemm.h hands to product.h: a panel of unpacked weights, and the group vectors that scale it.
#pragma once
#include "activations.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {

// Sums are fp32 [token][row_blocks or row_vectors][lanes], zeroed by the caller before the first panel of a row.
// Row counts are even: the product works on pairs.
struct PlanesPanel {
  const Planes* x;
  const Weight* w;
  // [block of k][row block][quad][16 rows][4 k]; as bfloat16: [block][row block][quad][even, odd][16 rows][2 k].
  // Why blocks first: it is the order in which a product reads the panel, again and again, from L2.
  uint8_t* bytes;
  float* sums;
  float add_back;                 // what the panel's bytes lack to the values; 0 but for signed panels of uint8
  int64_t row_block, row_blocks;  // the first row block of the panel in the weight, and how many it has
  int64_t k_begin, k_count;       // k_begin is a multiple of 256, so panels never cut a block
  int64_t block_begin() const { return k_begin / x->block; }
  int64_t block_end() const { return std::min(x->blocks, (k_begin + k_count + x->block - 1) / x->block); }
  // Where a block of a row block starts; `width` is the bytes of a value.
  uint8_t* at(int64_t block, int64_t row_block, int64_t width) const {
    const int64_t k = block * x->block - k_begin;
    const int64_t length = std::min(x->block, k_count - k);
    return bytes + (k * row_blocks + row_block * length) * kRows * width;
  }
  int64_t group_of(int64_t block) const { return w->group_size > 0 ? block : 0; }
};

struct FloatsPanel {
  const FloatRows* x;
  const float* values;  // [row vector][k][lanes], scale and zero applied
  float* sums;
  int64_t row_vectors;
  int64_t k_begin, k_count;
};

void planes_product_1(const PlanesPanel& panel);
void planes_product_2(const PlanesPanel& panel);
void planes_product_3(const PlanesPanel& panel);
void pairs_product(const PlanesPanel& panel);
void floats_product(const FloatsPanel& panel);

namespace {

inline int64_t group_count(const Weight& w) { return w.group_size > 0 ? ceil_div(w.k, w.group_size) : 1; }

// Scale and additive zero of one group for the rows of a vector: W = scale * value + zero.
struct GroupVectors {
  Simd::F scale, zero;
  bool has_zero;
};

// Scales (or zeros) of a vector of rows, from number `at` on.
LOWBIT_INLINE Simd::F load_scales(const void* scales, int64_t at, ScaleType type) {
  const char* from = static_cast<const char*>(scales);
  switch (type) {
    case ScaleType::kFloat32:
      return Simd::load_as_float(from + 4 * at, FloatType::kFloat32, Simd::kLanes);
    case ScaleType::kFloat16:
      return Simd::load_as_float(from + 2 * at, FloatType::kFloat16, Simd::kLanes);
    case ScaleType::kBFloat16:
      return Simd::load_as_float(from + 2 * at, FloatType::kBFloat16, Simd::kLanes);
    case ScaleType::kFloat8E8m0fnu:
      return Simd::load_e8m0(from + at);
    default:
      return Simd::load_e4m3(from + at);
  }
}

// row_block names 16 rows; lane is the first row of the vector inside it. Row blocks past the end read the last one:
// their results are never stored.
LOWBIT_INLINE GroupVectors load_group(const Weight& w, int64_t row_block, int64_t group, int64_t lane) {
  const int64_t last = ceil_div(w.n, kRows) - 1;
  const int64_t at = (std::min(row_block, last) * group_count(w) + group) * kRows + lane;
  GroupVectors g;
  g.scale = load_scales(w.scales, at, w.scale_type);
  if (w.row_scales != nullptr) {
    const int64_t row = std::min(row_block, last) * kRows + lane;
    const int count = static_cast<int>(std::clamp<int64_t>(w.n - row, 0, Simd::kLanes));
    g.scale = Simd::mul(g.scale, Simd::load_as_float(w.row_scales + row, FloatType::kFloat32, count));
  }
  g.zero = Simd::zero();
  g.has_zero = w.zero_kind != ZeroKind::kNone;
  if (g.has_zero) {
    const Simd::F z = load_scales(w.zeros, at, w.scale_type);
    // zero: scale * (v - z); min: scale * v + z
    g.zero = w.zero_kind == ZeroKind::kMin ? z : Simd::mul(Simd::sub(Simd::zero(), g.scale), z);
  }
  return g;
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
