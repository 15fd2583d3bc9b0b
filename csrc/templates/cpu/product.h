// The M > 1 product: a panel of unpacked weights times a slab of tokens, into fp32 sums.
//
// Independent of the weight type (the panel holds bytes or floats), so it is compiled once an ISA. The caller
// (gemm.h) unpacks a panel that fits in L2 and hands over all tokens of the slab:
//
//            k of the panel ->                      rows of the panel
//   tokens  [ x: planes or floats ]      sums  [token][panel rows]  +=  x @ panel.T, scaled group by group
//
// Byte panels: [row block][quad][16 rows][4 k]. Float panels: [row vector][k][lanes], already scaled.
#pragma once
#include "activations.h"
#include "panel.h"
#if defined(LOWBIT_ISA_TILES)
#include "tiles.h"
#endif

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

constexpr int kPair = 2;  // row vectors a tile works on at once: every load of x serves two products

#if defined(LOWBIT_ISA_BYTE_DOT) && !defined(LOWBIT_ISA_TILES)
// --- bytes: exact integers inside a block, one fp32 multiply-add a block ------------------------------------------
// T tokens x P planes are at most 12 rows of x; with two row blocks that is 24 accumulators, the rest of the 32
// registers is for weights and constants.
template <int P, int T>
void planes_tile(const PlanesPanel& a, int64_t token, int64_t block, int64_t row_block) {
  constexpr int kXRows = T * P;
  static_assert(kXRows <= 12, "accumulators would spill");
  using B = Simd::B;
  using I = Simd::I;
  using F = Simd::F;
  const Planes& x = *a.x;
  const int64_t k = block * x.block;
  const int64_t quads = std::min(x.block, x.k_padded - k) / kQuad;

  I acc[kXRows][kPair];
  unrolled<0, kXRows>([&](auto i) LOWBIT_FORCE_INLINE {
    const I start = Simd::broadcast(x.start + (block * x.tokens + token) * P + i);
    unrolled<0, kPair>([&](auto r) LOWBIT_FORCE_INLINE { acc[i][r] = start; });
  });

  // multiply
  // Why: rows of x lie one pitch apart, so a pointer for every third row and the address forms base, base + pitch and
  // base + 2 pitch reach all of them; twelve pointers would not fit in the registers.
  constexpr int kBases = (kXRows + 2) / 3;
  const int64_t pitch = x.pitch;
  const int8_t* base[kBases];
  unrolled<0, kBases>([&](auto i) LOWBIT_FORCE_INLINE { base[i] = x.digits + (token * P + 3 * i) * pitch + k; });
  const uint8_t* w = a.at(block, row_block, 1);
  const int64_t next_row_block = a.at(block, row_block + 1, 1) - w;
  for (int64_t q = 0; q < quads; ++q, w += kVector) {
    const B w0 = Simd::load_bytes(w);
    const B w1 = Simd::load_bytes(w + next_row_block);
    unrolled<0, kXRows>([&](auto i) LOWBIT_FORCE_INLINE {
      const int8_t* digits = base[i / 3] + i % 3 * pitch;
      acc[i][0] = Simd::dot(acc[i][0], w0, digits);
      acc[i][1] = Simd::dot(acc[i][1], w1, digits);
    });
    unrolled<0, kBases>([&](auto i) LOWBIT_FORCE_INLINE { base[i] += kQuad; });
  }

  // scale
  unrolled<0, kPair>([&](auto r) LOWBIT_FORCE_INLINE {
    const GroupVectors g = load_group(*a.w, a.row_block + row_block + r, a.group_of(block), 0);
    unrolled<0, T>([&](auto t) LOWBIT_FORCE_INLINE {
      F v = Simd::to_float(acc[t * P][r]);
      unrolled<1, P>(
          [&](auto p) LOWBIT_FORCE_INLINE { v = Simd::fma(v, Simd::set1(256.0f), Simd::to_float(acc[t * P + p][r])); });
      const int64_t at = block * x.tokens + token + t;
      float* sum = a.sums + ((token + t) * a.row_blocks + row_block + r) * kRows;
      F total = Simd::fma(g.scale, Simd::mul(v, Simd::set1(x.scale[at])), Simd::load(sum));
      if (g.has_zero) total = Simd::fma(g.zero, Simd::set1(x.sum[at]), total);
      Simd::store(sum, total);
    });
  });
}

// All blocks of the panel for T tokens from `token` on; a step of tokens stays in L1 while the row blocks pass.
template <int P, int T>
void planes_tokens(const PlanesPanel& a, int64_t token) {
  for (int64_t b = a.block_begin(); b < a.block_end(); ++b)
    for (int64_t r = 0; r < a.row_blocks; r += kPair) planes_tile<P, T>(a, token, b, r);
}

template <int P>
void planes_product(const PlanesPanel& a) {
  constexpr int kTile = 12 / P;
  int64_t token = 0;
  for (; token + kTile <= a.x->tokens; token += kTile) planes_tokens<P, kTile>(a, token);
  for (; token + 2 <= a.x->tokens; token += 2) planes_tokens<P, 2>(a, token);
  if (token < a.x->tokens) planes_tokens<P, 1>(a, token);
}
#endif

// --- floats: fused multiply-adds on a panel that is already scaled ------------------------------------------------
template <int T>
void floats_tile(const FloatsPanel& a, int64_t token, int64_t row) {
  using F = Simd::F;
  const FloatRows& x = *a.x;
  F acc[T][kPair];
  float* sums = a.sums + (token * a.row_vectors + row) * Simd::kLanes;
  const int64_t pitch = a.row_vectors * Simd::kLanes;
  unrolled<0, T>([&](auto t) LOWBIT_FORCE_INLINE {
    unrolled<0, kPair>([&](auto r)
                           LOWBIT_FORCE_INLINE { acc[t][r] = Simd::load(sums + t * pitch + r * Simd::kLanes); });
  });

  const float* w = a.values + row * a.k_count * Simd::kLanes;
  const int64_t next_row = a.k_count * Simd::kLanes;
  const float* values = x.values + token * x.pitch + a.k_begin;
  for (int64_t k = 0; k < a.k_count; ++k, w += Simd::kLanes) {
    const F w0 = Simd::load(w);
    const F w1 = Simd::load(w + next_row);
    unrolled<0, T>([&](auto t) LOWBIT_FORCE_INLINE {
      const F v = Simd::set1(values[t * x.pitch + k]);
      acc[t][0] = Simd::fma(w0, v, acc[t][0]);
      acc[t][1] = Simd::fma(w1, v, acc[t][1]);
    });
  }

  unrolled<0, T>([&](auto t) LOWBIT_FORCE_INLINE {
    unrolled<0, kPair>([&](auto r)
                           LOWBIT_FORCE_INLINE { Simd::store(sums + t * pitch + r * Simd::kLanes, acc[t][r]); });
  });
}

template <int T>
void floats_tokens(const FloatsPanel& a, int64_t token) {
  for (int64_t r = 0; r < a.row_vectors; r += kPair) floats_tile<T>(a, token, r);
}

}  // namespace

void floats_product(const FloatsPanel& a) {
  int64_t token = 0;
  for (; token + Simd::kTokens <= a.x->tokens; token += Simd::kTokens) floats_tokens<Simd::kTokens>(a, token);
  for (; token + 2 <= a.x->tokens; token += 2) floats_tokens<2>(a, token);
  if (token < a.x->tokens) floats_tokens<1>(a, token);
}

#if defined(LOWBIT_ISA_TILES)
void planes_product_1(const PlanesPanel& a) { tiles_product<1, int8_t>(a); }
void planes_product_2(const PlanesPanel& a) { tiles_product<2, int8_t>(a); }
void planes_product_3(const PlanesPanel& a) { tiles_product<3, int8_t>(a); }
void pairs_product(const PlanesPanel& a) { tiles_product<1, uint16_t>(a); }
#elif defined(LOWBIT_ISA_BYTE_DOT)
void planes_product_1(const PlanesPanel& a) { planes_product<1>(a); }
void planes_product_2(const PlanesPanel& a) { planes_product<2>(a); }
void planes_product_3(const PlanesPanel& a) { planes_product<3>(a); }
#endif

}  // namespace lowbit::cpu::LOWBIT_ISA_NS
