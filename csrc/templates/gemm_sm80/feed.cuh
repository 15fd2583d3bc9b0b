// Stages of a block on their way to its ring in shared memory: its copiers copy 16 bytes each at a time (cp.async).
#pragma once
#include <cstdint>
#include <type_traits>

#include "../dequant/planes.cuh"
#include "../lane_words.cuh"
#include "../ptx/async.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm80 {

template <class Weight, class Tile, class Form>
struct Feed {
  using Stage = gemm_sm80::Stage<Weight, Tile, Form>;
  static constexpr bool kFine = Form::kFine;
  static constexpr int kBits = Weight::kBits, kSteps = Stage::kSteps, kThreads = Tile::kCopiers;

  const Problem& p;

  __device__ explicit Feed(const Problem& problem) : p(problem) {}

  static __device__ __forceinline__ int own_thread() { return threadIdx.x - Tile::kFirstCopier; }

  // Codes, scales and zeros; 0 beyond K. Row tiles beyond those of W are left out: sums of them go nowhere.
  __device__ __forceinline__ void ask_for_weights(const Cursor& at, uint32_t stage) const {
    const int thread = own_thread(), step = at.stage * kSteps;
    const auto copy_planes = [&](auto whole) {  // whether all row tiles and steps are there
      uint32_t to = stage + Stage::kX + thread * 16;
      layout::for_planes<kBits>([&](auto plane) {
        constexpr int kWidth = decltype(plane)::value, kPieces = 16 * kWidth * kSteps;  // 16 bytes each, of a row tile
        constexpr int kAll = Tile::kRowTiles * kPieces;
        static_assert(kAll % kThreads == 0 && kThreads % kPieces == 0);
        const int tile = at.row_block * Tile::kRowTiles + thread / kPieces;
        [[maybe_unused]] const bool there = step + thread % kPieces / (16 * kWidth) < p.steps;
        const uint8_t* first = p.planes[planes::plane_index(kBits, kWidth)];
        const uint8_t* from = first + thread % kPieces * 16 +
                              static_cast<uint64_t>(static_cast<uint32_t>(tile * p.steps + step)) * (256 * kWidth);
        ptx::keep_apart(from);
#pragma unroll
        for (int i = 0; i * kThreads < kAll; ++i) {
          // kThreads / kPieces row tiles further
          const uint8_t* own = from + static_cast<int64_t>(p.steps) * (i * kThreads / kSteps * 16);
          if constexpr (decltype(whole)::value) {
            ptx::copy_async(to + i * kThreads * 16, own);
          } else if (tile + i * (kThreads / kPieces) < p.tiles) {
            ptx::copy_async(to + i * kThreads * 16, there ? own : first, there ? 16 : 0);
          }
        }
        to += kAll * 16;
      });
    };
    if ((at.row_block + 1) * Tile::kRowTiles <= p.tiles && step + kSteps <= p.steps) {
      copy_planes(std::true_type{});
    } else {
      copy_planes(std::false_type{});
    }
    ask_for_groups(at, stage + Stage::kX + Stage::kCodes, thread);
  }

  // Scales and zeros: a row tile's groups of a stage lie one after the other. Those beyond the last become 0.
  __device__ __forceinline__ void ask_for_groups(const Cursor& at, uint32_t to, int thread) const {
    constexpr int kAll = Tile::kRowTiles * kSteps * (kFine ? 16 : 2);  // most pieces of 16 bytes
    const int step = at.stage * kSteps;
    const int shift = kFine ? 4 - min(p.group_fragments, 3) + kSteps / 2 : 1 + (kSteps == 2 && p.group_steps == 0);
#pragma unroll
    for (int i = 0; i < kAll; i += kThreads) {
      const int own = thread + i, row_tile = own >> shift, piece = own & ((1 << shift) - 1);
      const int tile = at.row_block * Tile::kRowTiles + row_tile;
      if (row_tile >= Tile::kRowTiles || tile >= p.tiles) return;
      const int group = (kFine ? step * 8 >> p.group_fragments : step >> p.group_steps) + piece / 2;
      const uint64_t place =
          static_cast<uint64_t>(static_cast<uint32_t>(tile * p.groups + group)) * 32 + piece % 2 * 16;
      const auto copy = [&](uint32_t here, const uint8_t* from) {
        if constexpr (kFine || kSteps > 1) {
          const bool there = group < p.groups;
          ptx::copy_async(here, there ? from + place : from, there ? 16 : 0);
        } else {
          ptx::copy_async(here, from + place);
        }
      };
      copy(to + own * 16, p.scales);
      if (Form::kZeros) copy(to + Stage::kScales + own * 16, p.zeros);
    }
  }

  // x; 0 beyond K, whatever lies there. Tokens beyond M are left out: sums of them go nowhere.
  __device__ __forceinline__ void ask_for_x(const Cursor& at, uint32_t stage) const {
    constexpr int kPieces = 16, kAtOnce = kThreads / kPieces;  // pieces of 128 k of a token; tokens copied at once
    static_assert(kAtOnce % 8 == 0);                           // so that a thread's place in a row stays the same
    const int thread = own_thread(), own = thread / kPieces, piece = thread % kPieces;
    const int token = at.token + own, tokens = min(p.tile_tokens, p.m - at.token), first = at.stage * kSteps;
    const uint32_t to = stage + piece / 8 * Stage::kXBox + own * 128 + ((piece ^ own) % 8) * 16;
    const uint8_t* from = p.x + (static_cast<uint64_t>(static_cast<uint32_t>(token)) * p.x_pieces +
                                 static_cast<uint32_t>(first * kPieces + piece)) *
                                    16;
    ptx::keep_apart(from);
    const auto for_tokens = [&](auto whole, const auto& copy) {  // whether there are as many as the tile has
#pragma unroll
      for (int i = 0; i * kAtOnce < Tile::kTokens; ++i)
        if (decltype(whole)::value || own + i * kAtOnce < tokens)
#pragma unroll
          for (int step = 0; step < kSteps; ++step)
            copy(to + i * (kAtOnce * 128) + step * 2 * Stage::kXBox,
                 from + static_cast<uint64_t>(p.x_pieces) * (i * kAtOnce * 16) + step * 256, step);
    };
    const auto copy = [](uint32_t here, const uint8_t* x, int) { ptx::copy_async(here, x); };
    if ((first + kSteps) * kStepK > p.k) {
      const int all = 2 * (p.k - first * kStepK) - piece * 16;
      for_tokens(std::false_type{}, [&](uint32_t here, const uint8_t* x, int step) {
        const int bytes = min(max(all - step * 256, 0), 16);
        ptx::copy_async(here, bytes ? x : p.x, bytes);  // Why p.x: nothing of it is read, but it must be an address
      });
    } else if (tokens == Tile::kTokens) {
      for_tokens(std::true_type{}, copy);
    } else {
      for_tokens(std::false_type{}, copy);
    }
  }
};

}  // namespace lowbit::gemm_sm80
