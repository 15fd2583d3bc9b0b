// The M > 1 product on matrix tiles, for byte panels and for bfloat16 panels.
//
//   A: 16 tokens x step of k        rows of x as they lie in memory
//   B: step of k x 16 rows          a row block of the panel as it lies in memory: [quad or pair][16 rows][k]
//   C: 16 tokens x 16 rows          one for each A tile and each row block
//
// Bytes: one A tile a digit plane; the panel holds signed bytes (gemm.h took the offset off). Pairs: the bfloat16
// pieces of x add up in the same C. At the end of a block of k, C is stored, scaled and added to the sums.
#pragma once
#include "panel.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

// Element: int8_t for digit planes, uint16_t for bfloat16 pieces. kPlanes: digit planes that make up a value (1 for
// pieces). kTokenTiles: tiles of tokens at a time.
template <int kPlanes, int kTokenTiles, class Element>
struct TileProduct {
  static constexpr int kA = kPlanes * kTokenTiles;
  static constexpr int kR = kA == 3 ? 1 : 2;  // row blocks at a time: C, A and B share eight tiles
  static constexpr int kC = kA * kR;
  static constexpr int kTileA = kC;
  static constexpr int kTileB = kC + kA;
  static_assert(kTileB + kR <= 8, "a CPU has eight tiles");
  static constexpr int kWidth = sizeof(Element);
  using F = Simd::F;

  const PlanesPanel& a;
  const Planes& x;
  const int tokens_a_tile;                    // rows of A and C: 16, or what is left
  const int step;                             // k of one tile
  const int pieces;                           // rows of x a token has: kPlanes, or the bfloat16 pieces
  alignas(64) int32_t c[2][kC][16][16] = {};  // stored C tiles of this block and of the one before

  void configure() const {
    Tiles::Config config;
    for (int i = 0; i < 8; ++i) {
      const bool is_b = i >= kTileB;
      config.rows[i] = static_cast<uint8_t>(is_b ? step * kWidth / 4 : tokens_a_tile);
      config.row_bytes[i] = static_cast<uint16_t>(i < kC || is_b ? 64 : step * kWidth);
    }
    Tiles::configure(config);
  }

  // One block of k for kTokenTiles token tiles and kR row blocks, into C.
  LOWBIT_INLINE void multiply(const TileProduct& self, int64_t token, int64_t block, int64_t row_block) {
    const Planes& x = self.x;
    const PlanesPanel& a = self.a;
    const int64_t k = block * x.block;
    const int64_t k_end = std::min(k + x.block, x.k_padded);
    const int64_t piece_pitch = x.pitch * kWidth;
    const int64_t x_pitch = self.pieces * piece_pitch;  // bytes from token to token
    const char* xs = reinterpret_cast<const char*>(x.digits) + token * x_pitch;
    const uint8_t* panel = a.at(block, row_block, kWidth);
    const int64_t next_row_block = a.at(block, row_block + 1, kWidth) - panel;
    const int passes = self.pieces / kPlanes;  // bfloat16 pieces are passes over the same C
    unrolled<0, kC>([&](auto i) LOWBIT_FORCE_INLINE { Tiles::zero<i>(); });
    for (int64_t at = k; at < k_end; at += self.step) {
      const uint8_t* w = panel + (at - k) * kRows * kWidth;
      unrolled<0, kR>([&](auto r) LOWBIT_FORCE_INLINE { Tiles::load<kTileB + r>(w + r * next_row_block, 64); });
      for (int pass = 0; pass < passes; ++pass) {
        const char* xk = xs + at * kWidth + pass * piece_pitch;
        unrolled<0, kA>([&](auto i) LOWBIT_FORCE_INLINE {
          Tiles::load<kTileA + i>(xk + (kPlanes > 1 ? i * piece_pitch : i * 16 * x_pitch), x_pitch);
          unrolled<0, kR>([&](auto r)
                              LOWBIT_FORCE_INLINE { Tiles::dot<i * kR + r, kTileA + i, kTileB + r>(Element{}); });
        });
      }
    }
  }

  LOWBIT_INLINE void store(TileProduct& self, int buffer) {
    unrolled<0, kC>([&](auto i) LOWBIT_FORCE_INLINE { Tiles::store<i>(self.c[buffer][i], 64); });
  }

  // Adds a stored block to the sums: digits put together, the block's scale, the group's scale and zero.
  template <bool kZero>
  LOWBIT_INLINE void scale_rows(const TileProduct& self, int buffer, int64_t token, int64_t block, int64_t row_block,
                                const GroupVectors g[kR]) {
    const F base = Simd::set1(256.0f);
    unrolled<0, kTokenTiles>([&](auto i) LOWBIT_FORCE_INLINE {
      const int64_t row = token + i * 16;
      const int64_t pitch = self.a.row_blocks * kRows;
      const float* x_scale = self.x.scale + block * self.x.tokens + row;
      const float* x_sum = self.x.sum + block * self.x.tokens + row;
      float* sums = self.a.sums + row * pitch + row_block * kRows;
      const int tokens = self.tokens_a_tile;
      for (int t = 0; t < tokens; ++t, sums += pitch)
        unrolled<0, kR>([&](auto r) LOWBIT_FORCE_INLINE {
          F v;
          if constexpr (kWidth == 2) {
            v = Simd::load(reinterpret_cast<const float*>(self.c[buffer][i * kR + r][t]));
          } else {
            v = Simd::to_float(self.c[buffer][i * kPlanes * kR + r][t]);
            unrolled<1, kPlanes>([&](auto p) LOWBIT_FORCE_INLINE {
              v = Simd::fma(v, base, Simd::to_float(self.c[buffer][(i * kPlanes + p) * kR + r][t]));
            });
          }
          F total = Simd::fma(g[r].scale, Simd::mul(v, Simd::set1(x_scale[t])), Simd::load(sums + r * kRows));
          if constexpr (kZero) total = Simd::fma(g[r].zero, Simd::set1(x_sum[t]), total);
          Simd::store(sums + r * kRows, total);
        });
    });
  }
  LOWBIT_INLINE void scale(const TileProduct& self, int buffer, int64_t token, int64_t block, int64_t row_block) {
    GroupVectors g[kR];
    unrolled<0, kR>([&](auto r) LOWBIT_FORCE_INLINE {
      g[r] = load_group(*self.a.w, self.a.row_block + row_block + r, self.a.group_of(block), 0);
      g[r].zero = Simd::fma(g[r].scale, Simd::set1(self.a.add_back), g[r].zero);
    });
    if (g[0].has_zero || self.a.add_back != 0) {
      scale_rows<true>(self, buffer, token, block, row_block, g);
    } else {
      scale_rows<false>(self, buffer, token, block, row_block, g);
    }
  }

  // Asks for the rows of x that the block after `block` will multiply: the tiles would wait for every miss.
  void prefetch_x(int64_t token, int64_t block) const {
    const int64_t row_bytes = x.pitch * kWidth;
    const int64_t first = (block + 1) * x.block * kWidth;
    const int64_t end = std::min(first + x.block * kWidth, x.k_padded * kWidth);
    const int64_t rows = tokens_a_tile * kTokenTiles * pieces;
    const char* at = reinterpret_cast<const char*>(x.digits) + token * pieces * row_bytes;
    for (int64_t i = 0; i < rows; ++i, at += row_bytes)
      for (int64_t byte = first; byte < end; byte += 64) Simd::prefetch(at + byte);
  }

  // Why a block late: the vectors scale the block before while the tiles multiply this one.
  void run(int64_t token) {
    int64_t last_block = -1, last_row = 0;
    int buffer = 0;
    for (int64_t b = a.block_begin(); b < a.block_end(); ++b) {
      prefetch_x(token, b);
      for (int64_t r = 0; r < a.row_blocks; r += kR) {
        multiply(*this, token, b, r);
        if (last_block >= 0) scale(*this, buffer ^ 1, token, last_block, last_row);
        store(*this, buffer);
        last_block = b;
        last_row = r;
        buffer ^= 1;
      }
    }
    if (last_block >= 0) scale(*this, buffer ^ 1, token, last_block, last_row);
  }
};

// Tiles of tokens_a_tile tokens from `token` on, as many as there are; returns the first token that is left.
template <int kPlanes, int kTokenTiles, class Element>
int64_t tiles_from(const PlanesPanel& a, int64_t token, int64_t tokens_a_tile) {
  const int64_t tokens = tokens_a_tile * kTokenTiles;
  if (tokens == 0 || token + tokens > a.x->tokens) return token;
  // k of a tile: 64 bytes of x, less where blocks are shorter or the last block is no multiple of that
  const int64_t longest = 64 / static_cast<int64_t>(sizeof(Element));
  const int64_t step = std::min(a.x->block, a.x->k_padded % longest == 0 ? longest : int64_t{kChunk});
  TileProduct<kPlanes, kTokenTiles, Element> product{a, *a.x, static_cast<int>(tokens_a_tile), static_cast<int>(step),
                                                     a.x->planes};
  product.configure();
  for (; token + tokens <= a.x->tokens; token += tokens) product.run(token);
  return token;
}

// Pairs of token tiles where they fit in the eight tiles, single ones, and one that is not full.
template <int kPlanes, class Element>
void tiles_product(const PlanesPanel& a) {
  int64_t token = 0;
  if constexpr (kPlanes == 1) token = tiles_from<1, 2, Element>(a, token, 16);
  token = tiles_from<kPlanes, 1, Element>(a, token, 16);
  tiles_from<kPlanes, 1, Element>(a, token, a.x->tokens - token);
  Tiles::release();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
