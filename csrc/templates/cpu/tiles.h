// The M > 1 product on matrix tiles, for byte panels and for bfloat16 panels.
//
//   A: 16 tokens x step of k        rows of x as they lie in memory
//   B: step of k x 16 rows          a row block of the panel as it lies in memory: [quad or pair][16 rows][k]
//   C: 16 tokens x 16 rows          one for each A tile and each row block of a pair
//
// Bytes: one A tile a digit plane (or, with one plane, two tiles of tokens). Pairs: the bfloat16 pieces of x add up in
// the same C. At the end of a block of k, C is stored, scaled and added to the sums.
#pragma once
#include "panel.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

// Element: uint8_t for digit planes, uint16_t for bfloat16 pieces. kA: A tiles at a time. kPlanes: digit planes that
// make up a value (1 for pairs).
template <int kA, int kPlanes, class Element>
struct TileProduct {
  static_assert(kPlanes == 1 || kA == kPlanes, "planes of one token tile, or token tiles of one plane");
  static constexpr int kC = kA * 2;
  static constexpr bool kOneByOne = kC + kA + 2 > 8;  // too few tiles to hold every A: reload them for each row block
  static constexpr int kTileA = kC;
  static constexpr int kTileB = kOneByOne ? kC + 1 : kC + kA;
  static constexpr int kTokenTiles = kA / kPlanes;
  static constexpr int kWidth = sizeof(Element);
  using F = Simd::F;
  using I = Simd::I;

  const PlanesPanel& a;
  const Planes& x;
  int tokens_a_tile;  // rows of A and C: 16, or what is left
  int step;           // k of one tile
  int pieces;         // rows of x a token has: kPlanes, or the bfloat16 pieces
  alignas(64) int32_t c[kC][16][16];

  void configure() const {
    Tiles::Config config;
    for (int i = 0; i < 8; ++i) {
      const bool is_b = i >= kTileB;
      config.rows[i] = static_cast<uint8_t>(is_b ? step * kWidth / 4 : tokens_a_tile);
      config.row_bytes[i] = static_cast<uint16_t>(i < kC || is_b ? 64 : step * kWidth);
    }
    Tiles::configure(config);
  }

  // One block of k for kTokenTiles token tiles and two row blocks: multiply into C, store C.
  LOWBIT_INLINE void multiply(TileProduct& self, int64_t token, int64_t block, int64_t row_block) {
    const Planes& x = self.x;
    const PlanesPanel& a = self.a;
    const int64_t k = block * x.block;
    const int64_t k_end = std::min(k + x.block, x.k_padded);
    const int64_t x_pitch = self.pieces * x.k_padded * kWidth;  // bytes from token to token
    const int64_t piece_pitch = x.k_padded * kWidth;
    const char* xs = reinterpret_cast<const char*>(x.digits) + token * x_pitch;
    const uint8_t* panel = a.bytes + row_block * a.k_count * kRows * kWidth;
    const int64_t next_row_block = a.k_count * kRows * kWidth;
    unrolled<0, kC>([&](auto i) LOWBIT_FORCE_INLINE { Tiles::zero<i>(); });
    const int passes = self.pieces / kPlanes;  // bfloat16 pieces are passes over the same C
    for (int64_t at = k; at < k_end; at += self.step) {
      const uint8_t* w = panel + (at - a.k_begin) * kRows * kWidth;
      for (int pass = 0; pass < passes; ++pass) {
        const char* xk = xs + at * kWidth + pass * piece_pitch;
        auto a_tile = [&](int i) { return kPlanes > 1 ? xk + i * piece_pitch : xk + i * 16 * x_pitch; };
        if constexpr (kOneByOne) {
          unrolled<0, 2>([&](auto r) LOWBIT_FORCE_INLINE {
            Tiles::load<kTileB>(w + r * next_row_block, 64);
            unrolled<0, kA>([&](auto i) LOWBIT_FORCE_INLINE {
              Tiles::load<kTileA>(a_tile(i), x_pitch);
              Tiles::dot<i * 2 + r, kTileA, kTileB>(Element{});
            });
          });
        } else {
          unrolled<0, kA>([&](auto i) LOWBIT_FORCE_INLINE { Tiles::load<kTileA + i>(a_tile(i), x_pitch); });
          unrolled<0, 2>([&](auto r) LOWBIT_FORCE_INLINE {
            Tiles::load<kTileB + r>(w + r * next_row_block, 64);
            unrolled<0, kA>([&](auto i) LOWBIT_FORCE_INLINE {
              Tiles::dot<i * 2 + r, kTileA + i, kTileB + r>(Element{});
            });
          });
        }
      }
    }
    unrolled<0, kC>([&](auto i) LOWBIT_FORCE_INLINE { Tiles::store<i>(self.c[i], 64); });
  }

  // Adds a stored block to the sums: digits put together, the block's scale, the group's scale and zero.
  LOWBIT_INLINE void scale(TileProduct& self, int64_t token, int64_t block, int64_t row_block) {
    const Planes& x = self.x;
    const PlanesPanel& a = self.a;
    GroupVectors g[2];
    for (int r = 0; r < 2; ++r) g[r] = load_group(*a.w, a.row_block + row_block + r, a.group_of(block), 0);
    const F base = Simd::set1(256.0f);
    for (int i = 0; i < kTokenTiles; ++i)
      for (int t = 0; t < self.tokens_a_tile; ++t) {
        const int64_t row = token + i * 16 + t;
        const int64_t at = row * x.blocks + block;
        const F x_scale = Simd::set1(x.scale[at]);
        float* sums = a.sums + (row * a.row_blocks + row_block) * kRows;
        unrolled<0, 2>([&](auto r) LOWBIT_FORCE_INLINE {
          F v;
          if constexpr (kWidth == 2) {
            v = Simd::load(reinterpret_cast<const float*>(self.c[i * 2 + r][t]));
          } else {
            v = Simd::zero();
            unrolled<0, kPlanes>([&](auto p) LOWBIT_FORCE_INLINE {
              const I start = Simd::broadcast(x.start + (row * kPlanes + p) * x.blocks + block);
              const F digit = Simd::to_float(Simd::add_int(start, self.c[(i * kPlanes + p) * 2 + r][t]));
              v = p == 0 ? digit : Simd::fma(v, base, digit);
            });
          }
          F total = Simd::fma(g[r].scale, Simd::mul(v, x_scale), Simd::load(sums + r * kRows));
          if (g[r].has_zero) total = Simd::fma(g[r].zero, Simd::set1(x.sum[at]), total);
          Simd::store(sums + r * kRows, total);
        });
      }
  }

  void run(int64_t token) {
    for (int64_t b = a.block_begin(); b < a.block_end(); ++b)
      for (int64_t r = 0; r < a.row_blocks; r += 2) {
        multiply(*this, token, b, r);
        scale(*this, token, b, r);
      }
  }
};

template <int kA, int kPlanes, class Element>
int64_t tiles_from(const PlanesPanel& a, int64_t token, int64_t tokens_a_tile, int pieces) {
  using P = TileProduct<kA, kPlanes, Element>;
  const int64_t tokens = tokens_a_tile * P::kTokenTiles;
  if (tokens_a_tile == 0 || token + tokens > a.x->tokens) return token;
  // k of a tile: 64 bytes of x, less where blocks are shorter or the last block is no multiple of that
  const int64_t longest = 64 / static_cast<int64_t>(sizeof(Element));
  const int64_t step = std::min(a.x->block, a.x->k_padded % longest == 0 ? longest : int64_t{kChunk});
  P product{a, *a.x, static_cast<int>(tokens_a_tile), static_cast<int>(step), pieces, {}};
  product.configure();
  for (; token + tokens <= a.x->tokens; token += tokens) product.run(token);
  return token;
}

// Tokens that were done: all of them, or none where vectors are faster than a tile that is nearly empty.
template <int kPlanes>
int64_t tiles_planes(const PlanesPanel& a) {
  constexpr int64_t kFewest = 3;
  if (a.x->tokens < kFewest) return 0;
  int64_t token = 0;
  if constexpr (kPlanes == 1) {
    token = tiles_from<2, 1, uint8_t>(a, token, 16, 1);
  }
  token = tiles_from<kPlanes, kPlanes, uint8_t>(a, token, 16, kPlanes);
  token = tiles_from<kPlanes, kPlanes, uint8_t>(a, token, a.x->tokens - token, kPlanes);
  Tiles::release();
  return token;
}

inline void tiles_pairs(const PlanesPanel& a) {
  int64_t token = tiles_from<2, 1, uint16_t>(a, 0, 16, a.x->planes);
  token = tiles_from<1, 1, uint16_t>(a, token, 16, a.x->planes);
  tiles_from<1, 1, uint16_t>(a, token, a.x->tokens - token, a.x->planes);
  Tiles::release();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
