// What workers have in common that multiply in the type of x: codes to fragments, sums of groups to scaled sums.
#pragma once
#include <cstdint>

#include "../dequant/float.cuh"
#include "../dequant/int.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "shape.cuh"
#include "stage_words.cuh"

namespace lowbit::decode {

// Of `Classes` sums a group (at least as many as the decoder asks for). BeginAtOffset: sums begin at what the offset of
// the codes takes away.
template <class Weight, class Act, class Tile, bool Zeros, class Feed_, int Classes, bool BeginAtOffset>
struct Products {
  using Feed = Feed_;
  using Ring = typename Feed::Ring;
  using Decoder = lowbit::Decoder<Weight, Act>;
  using Words = typename Decoder::Words;
  static constexpr int kBits = Weight::kBits, kColumns = Tile::kColumns, kTokens = Tile::kTokens;
  static constexpr int kRows = Ring::kRows, kClasses = Classes;
  static constexpr bool kOnes = Decoder::kSubtractOffset || Zeros;  // sums of x are needed
  using Sum = float[kColumns][4];

  // What it hands in: items of kFloats, kItems a tile.
  static constexpr int kFloats = 4, kItems = kTokens <= 2 ? 8 : kTokens == 4 ? 16 : kColumns * 32;
  static constexpr int kTableBytes = 4;  // of a token at one step

  const Position& at;
  const Problem& p;
  uint32_t x, ones;  // in shared memory: x and its sums, from step `first` on
  int first;
  const Decoder decoder;
  Sum sums[kRows][kClasses], total[kRows];  // of a group; of the tile, scaled

  __device__ Products(const Position& position, uint32_t x_at, uint32_t ones_at)
      : at(position),
        p(position.p),
        x(x_at),
        ones(ones_at),
        first(position.block_step(position.rank)),
        decoder(position.p.zero_base) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kClasses; ++c) clear(sums[r][c]);
  }

  static __device__ __forceinline__ void clear(Sum& sum) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[column][i] = 0.0f;
  }

  __device__ __forceinline__ void clear_total() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) clear(total[r]);
  }

  // ---- from shared memory to registers -----------------------------------------------------------------------------
  // One step of a stage: this lane's words of every plane.
  __device__ __forceinline__ void load_words(uint32_t stage, int step, Words& words) const {
    decode::load_words<Ring::kSteps>(stage, step, at.lane, words);
  }

  // This lane's row of x for ldmatrix, at a step of the block.
  __device__ __forceinline__ void find_rows(int step, uint32_t (&row)[kColumns]) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      // Why min: tokens that don't exist read the last one; their sums are never stored.
      const int token = min(column * 8 + at.lane % 8 % kTokens, p.m - 1);
      row[column] = x + ((step - first) * p.m + token) * kRowBytes + at.lane / 8 * 16;
    }
  }

  // The sum of x of a column, counted from the first token of a step.
  __device__ __forceinline__ float sum_of_x(int step, int column) const {
    return __uint_as_float(ptx::load_shared(ones + ((step - first) * kTokens + column) * 4));
  }

  // ---- scales ------------------------------------------------------------------------------------------------------
  // total += scale * (sums - zero * x_sum), then sums = 0. scale, stored: words of rows g and g + 8, of columns 2t and
  // 2t + 1; x_sum: sums of x of these columns.
  __device__ __forceinline__ void apply_scales(int r, const uint32_t (&scales)[2], const uint32_t (&stored)[2],
                                               const float (&x_sum)[kColumns][2]) {
    constexpr float kFactor[2] = {static_cast<float>(1 << Decoder::exponent(0, 0)),
                                  static_cast<float>(1 << Decoder::exponent(0, 1))};
    constexpr float kBase = Decoder::kSubtractOffset ? 1.0f : 0.0f;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float2 pair = unpack_pair(scales[side], p.bf16_scales);
      const float scale[2] = {pair.x, pair.y};
      float zero[2] = {p.zero_base * (kBase * kFactor[0]), p.zero_base * (kBase * kFactor[1])};
      float shift[2] = {0.0f, 0.0f};
      if constexpr (Zeros) {
        const float2 values = unpack_pair(stored[side], p.bf16_scales);
        const float own[2] = {values.x * p.zero_factor * kFactor[0], values.y * p.zero_factor * kFactor[1]};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          zero[h] += p.zero_kind == ZeroKind::kZero ? own[h] : 0.0f;
          shift[h] = p.zero_kind == ZeroKind::kMin ? own[h] : 0.0f;
        }
      }
#pragma unroll
      for (int column = 0; column < kColumns; ++column)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = 2 * h + side;
          float value = sums[r][0][column][i];
#pragma unroll
          for (int c = 1; c < kClasses; ++c) {
            const int more = Decoder::exponent(c, h) - Decoder::exponent(0, h);
            const float factor = more >= 0 ? 1.0f / (1 << (more & 31)) : static_cast<float>(1 << (-more & 31));
            value = fmaf(sums[r][c][column][i], factor, value);
          }
          if (kOnes && !BeginAtOffset) value = fmaf(-zero[h], x_sum[column][side], value);
          total[r][column][i] = fmaf(scale[h], value, total[r][column][i]);
          if (Zeros) total[r][column][i] = fmaf(shift[h], x_sum[column][side], total[r][column][i]);
        }
    }
#pragma unroll
    for (int c = 0; c < kClasses; ++c) clear(sums[r][c]);
  }

  // ---- sums that meet ----------------------------------------------------------------------------------------------
  // Calls store(item, floats) for what this lane found of row tile r.
  template <class Store>
  __device__ __forceinline__ void hand_in(int r, Store store) {
    if constexpr (kTokens <= 4) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = total[r][0][i];
        if (kTokens == 1) values[i] = i % 2 ? 0.0f : total[r][0][i] + total[r][0][i + 1];
        if (kTokens == 1 && i % 2) continue;
#pragma unroll
        for (int lanes = kTokens == 4 ? 2 : 1; lanes < 4; lanes *= 2)  // phases
          values[i] += __shfl_xor_sync(~0u, values[i], lanes);
      }
      constexpr int kLanes = kItems / 8;  // of a row
      if (at.lane % 4 < kLanes) store(at.lane / 4 * kLanes + at.lane % 4, values);
    } else {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) store(column * 32 + at.lane, total[r][column]);
    }
  }

  // Which row of 16 and which token the float i of an item is.
  struct Spot {
    int row, token;
  };
  static __device__ __forceinline__ Spot spot(int item, int i) {
    const int row = (kTokens <= 4 ? item / (kItems / 8) : item % 32 / 4) + i / 2 * 8;
    return {row, (kTokens <= 2 ? 0 : kTokens == 4 ? item % 2 * 2 : item / 32 * 8 + item % 4 * 2) + i % 2};
  }
  // What a sum of a row is to be multiplied by, but for the step between codes.
  static __device__ __forceinline__ float unit(int row) {
    return Decoder::kUnit / (1 << Decoder::exponent(0, row / 8));
  }
};

}  // namespace lowbit::decode
