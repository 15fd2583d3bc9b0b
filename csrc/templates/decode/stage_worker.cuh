// What one warp does with its slice of row tiles, many tokens and scales of at least 128 k.
#pragma once
#include <cstdint>
#include <type_traits>

#include "products.cuh"
#include "stage_feed.cuh"

namespace lowbit::decode {

// How its sums are kept. Sums can begin at what the offset takes away for nothing, with a step a group. Why not with 1
// bit and 16 tokens: registers.
template <class Weight, class Act, class Tile, bool Zeros>
struct StageSums {
  using Decoder = lowbit::Decoder<Weight, Act>;
  static constexpr bool kBegin = Decoder::kSubtractOffset && !Zeros && (Tile::kTokens <= 8 || Weight::kBits > 1);
  using Base = Products<Weight, Act, Tile, Zeros, StageFeed<Weight, Tile, Zeros, Phases>, Decoder::kClasses, kBegin>;
};

template <class Weight, class Act, class Tile, bool Zeros>
struct StageWorker : StageSums<Weight, Act, Tile, Zeros>::Base {
  using Base = typename StageSums<Weight, Act, Tile, Zeros>::Base;
  using Base::at, Base::p, Base::x, Base::ones, Base::first, Base::decoder, Base::sums, Base::total;
  using Base::find_rows, Base::load_words, Base::sum_of_x, Base::apply_scales;
  using Base::kBits, Base::kColumns, Base::kTokens, Base::kRows, Base::kClasses, Base::kOnes;
  using typename Base::Decoder, typename Base::Feed, typename Base::Ring, typename Base::Words;
  static constexpr bool kBegin = StageSums<Weight, Act, Tile, Zeros>::kBegin;
  static constexpr int kAhead = Ring::kDepth;  // stages to fetch before the first is read

  __device__ StageWorker(const Position& position, uint32_t /*zeros*/, uint32_t x_at, uint32_t ones_at)
      : Base(position, x_at, ones_at) {}

  __device__ __forceinline__ void begin_at_offset(int step) {
    constexpr float kFactor[2] = {-static_cast<float>(1 << Decoder::exponent(0, 0)),
                                  -static_cast<float>(1 << Decoder::exponent(0, 1))};
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x_sum = sum_of_x(step, column * 8 + at.lane % 4 * 2 + i % 2);
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r][0][column][i] = p.zero_base * kFactor[i / 2] * x_sum;
      }
  }

  struct Place {};  // where it reads follows from where it fetches
  static __device__ __forceinline__ Place start(uint32_t /*ring*/) { return {}; }

  // A slice of kRows tiles whose stages bring their own scales. All of the ring is in flight: the oldest stage lies
  // where the next one will, its scales one slot further. Its words go to registers at once; with up to 8 tokens its
  // place is free again while they are multiplied.
  __device__ __forceinline__ void run_slice(Place& /*place*/, Feed& feed, int first_step, int end_step) {
    uint32_t row[kColumns];
    find_rows(first_step, row);
    const int row_bytes = p.m * kRowBytes;
#pragma unroll 1
    for (int step = first_step; step < end_step; step += Ring::kSteps) {
      ptx::wait_groups<Ring::kDepth - 1>();
      __syncwarp();  // what other lanes fetched has come
      Words words[Ring::kSteps][kRows];
#pragma unroll
      for (int i = 0; i < Ring::kSteps; ++i)
#pragma unroll
        for (int r = 0; r < kRows; ++r) load_words(feed.to + r * Ring::kTileBytes, i, words[i][r]);
      const uint32_t slot =
          feed.ring + Ring::kDepth * Ring::kStageBytes + Ring::wrapped(feed.slot + Ring::kSlotBytes) + at.lane / 4 * 4;
      // Why at the end with 16 tokens: registers.
      constexpr bool kFetchLast = kTokens > 8;
      if (!kFetchLast) {
        __syncwarp();
        feed.fetch();
      }
#pragma unroll
      for (int i = 0; i < Ring::kSteps; ++i) {
        if (i && step + i >= end_step) break;
        float x_sum[kColumns][2] = {};
        if (kBegin) {
          begin_at_offset(step + i);
        } else if (kOnes) {
#pragma unroll
          for (int column = 0; column < kColumns; ++column)
#pragma unroll
            for (int side = 0; side < 2; ++side)
              x_sum[column][side] = sum_of_x(step + i, column * 8 + at.lane % 4 * 2 + side);
        }
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          uint32_t fragments[kColumns][4];
#pragma unroll
          for (int column = 0; column < kColumns; ++column)
            ptx::load_matrices(fragments[column], row[column] + quarter * 64);
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              uint32_t a[4];
              decoder.fragment(words[i][r], 2 * quarter + half, a);
#pragma unroll
              for (int column = 0; column < kColumns; ++column)
                ptx::mma<Act>(sums[r][half % kClasses][column], a, fragments[column][2 * half],
                              fragments[column][2 * half + 1]);
            }
        }
#pragma unroll
        for (int column = 0; column < kColumns; ++column) row[column] += row_bytes;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const uint32_t from = slot + r * Ring::kTileScales + i * 32;
          const uint32_t scale = ptx::load_shared(from);
          const uint32_t stored = Zeros ? ptx::load_shared(from + kRows * Ring::kTileScales) : 0;
          apply_scales(r, {scale, scale}, {stored, stored}, x_sum);
        }
      }
      if (kFetchLast) {
        __syncwarp();
        feed.fetch();
      }
    }
  }
};

}  // namespace lowbit::decode
