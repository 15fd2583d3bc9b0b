// Stages of a block on their way to its ring in shared memory: all threads copy 16 bytes at a time (cp.async).
#pragma once
#include <cstdint>

#include "../dequant/planes.cuh"
#include "../lane_words.cuh"
#include "../ptx/async.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm80 {

template <class Weight, class Tile, bool Fine, bool Zeros>
struct Feed {
  using Stage = gemm_sm80::Stage<Weight, Tile, Fine, Zeros>;
  static constexpr int kBits = Weight::kBits, kThreads = Tile::kThreads;

  const Problem& p;

  __device__ explicit Feed(const Problem& problem) : p(problem) {}

  // Codes, scales and zeros. Row tiles beyond those of W are left out: sums of them go nowhere.
  __device__ __forceinline__ void ask_for_weights(const Cursor& at, uint32_t stage) const {
    const int thread = threadIdx.x;
    uint32_t to = stage + Stage::kX + thread * 16;
    layout::for_planes<kBits>([&](auto plane) {
      constexpr int kWidth = decltype(plane)::value, kPieces = 16 * kWidth;  // of 16 bytes: a row tile's 128 k
      constexpr int kAll = Tile::kRowTiles * kPieces;
      const int tile = at.row_block * Tile::kRowTiles + thread / kPieces;
      const uint8_t* from =
          p.codes + layout::plane_low(kBits, kWidth) * p.plane_bytes + thread % kPieces * 16 +
          static_cast<uint64_t>(static_cast<uint32_t>(tile * p.deal.stages + at.stage)) * (256 * kWidth);
#pragma unroll
      for (int i = 0; i * kThreads < kAll; ++i)
        if ((kAll >= kThreads || thread < kAll) && tile + i * (kThreads / kPieces) < p.tiles)
          // kThreads / kPieces row tiles further
          ptx::copy_async(to + i * kThreads * 16, from + static_cast<uint64_t>(p.deal.stages) * (i * kThreads * 16));
      to += kAll * 16;
    });
    ask_for_groups(at, stage + Stage::kX + Stage::kCodes, thread);
  }

  // Scales and zeros: a row tile's groups of a stage lie one after the other. Those beyond the last become 0.
  __device__ __forceinline__ void ask_for_groups(const Cursor& at, uint32_t to, int thread) const {
    const int pieces = Fine ? 2 * p.stage_groups : 2, shift = Fine ? 4 - min(p.group_fragments, 3) : 1;
    const int tile = at.row_block * Tile::kRowTiles + (thread >> shift), piece = thread & (pieces - 1);
    if (thread >= Tile::kRowTiles * pieces || tile >= p.tiles) return;
    const int group = (Fine ? at.stage * 8 >> p.group_fragments : at.stage >> p.group_steps) + piece / 2;
    const uint64_t place = static_cast<uint64_t>(static_cast<uint32_t>(tile * p.groups + group)) * 32 + piece % 2 * 16;
    const auto copy = [&](uint32_t here, const uint8_t* from) {
      if constexpr (Fine) {
        const bool there = group < p.groups;
        ptx::copy_async(here, there ? from + place : from, there ? 16 : 0);
      } else {
        ptx::copy_async(here, from + place);
      }
    };
    copy(to + thread * 16, p.scales);
    if (Zeros) copy(to + Stage::kScales + thread * 16, p.zeros);
  }

  // x; 0 beyond K, whatever lies there. Tokens beyond M are left out: sums of them go nowhere.
  __device__ __forceinline__ void ask_for_x(const Cursor& at, uint32_t stage) const {
    constexpr int kPieces = 16, kAtOnce = kThreads / kPieces;  // pieces of a token; tokens that threads copy at once
    static_assert(kAtOnce % 8 == 0);                           // so that a thread's place in a row stays the same
    const int thread = threadIdx.x, own = thread / kPieces, piece = thread % kPieces;
    const int token = at.token + own, tokens = min(p.tile_tokens, p.m - at.token);
    const uint32_t to = stage + piece / 8 * Stage::kXBox + own * 128 + ((piece ^ own) % 8) * 16;
    const uint8_t* from = p.x + (static_cast<uint64_t>(static_cast<uint32_t>(token)) * p.x_pieces +
                                 static_cast<uint32_t>(at.stage * kPieces + piece)) *
                                    16;
    const auto for_tokens = [&](const auto& copy) {
#pragma unroll
      for (int i = 0; i * kAtOnce < Tile::kTokens; ++i)
        if (own + i * kAtOnce < tokens)
          copy(to + i * (kAtOnce * 128), from + static_cast<uint64_t>(p.x_pieces) * (i * kAtOnce * 16));
    };
    if (at.stage * kStepK + kStepK <= p.k) {
      for_tokens([](uint32_t here, const uint8_t* x) { ptx::copy_async(here, x); });
    } else {
      const int bytes = 2 * (p.k - at.stage * kStepK) - piece * 16;
      if (bytes <= 0) from = p.x;  // Why: nothing of it is read, but it must be an address
      for_tokens([&](uint32_t here, const uint8_t* x) { ptx::copy_async(here, x, min(max(bytes, 0), 16)); });
    }
  }
};

}  // namespace lowbit::gemm_sm80
