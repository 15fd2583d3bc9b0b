// What one warp does with its slice of a row tile: codes to products, sums of groups to scaled sums.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../dequant/float.cuh"
#include "../dequant/int.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "activations.cuh"
#include "chunk_feed.cuh"
#include "shape.cuh"
#include "stage_feed.cuh"

namespace lowbit::decode {

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
struct Worker {
  // Many tokens walk K in phases of the block, few in one go. Scales finer than 128 k come in chunks.
  static constexpr bool kMany = Tile::kMany, kStaged = kMany && !Fine;
  using Feed = std::conditional_t<kStaged, StageFeed<Weight, Tile, Zeros, Phases>,
                                  ChunkFeed<Weight, Tile, Fine, Zeros, std::conditional_t<kMany, Phases, Strip>>>;
  using Ring = typename Feed::Ring;
  using Decoder = lowbit::Decoder<Weight, Act>;
  using Words = typename Decoder::Words;
  static constexpr int kBits = Weight::kBits, kColumns = Tile::kColumns, kTokens = Tile::kTokens;
  static constexpr int kPhases = Fine ? 1 : Tile::kPhases;
  // Fragments go to classes in turn. Why more than a decoder asks for: the products of one sum wait for each other.
  static constexpr int kClasses = kPhases == 1 && kColumns * Ring::kRows > 1 ? Decoder::kClasses : 2;
  static constexpr bool kOnes = Decoder::kSubtractOffset || Zeros;  // sums of x are needed
  // With a step a group, sums can begin at what the offset takes away, for nothing.
  // Why not up to 3 bits with 16 tokens: registers.
  static constexpr bool kBeginAtOffset =
      kPhases == 1 && !Fine && Decoder::kSubtractOffset && !Zeros && (kTokens <= 8 || kBits > 3);
  using Sum = float[kColumns][4];
  using XFragments = uint32_t[4][kColumns][4];  // 32 k each

  // How many stages to fetch before the first is read.
  static constexpr int kAhead = kStaged ? Ring::kDepth : Ring::kDepth - 1;
  // What it hands in: items of kFloats, kItems a tile.
  static constexpr int kFloats = 4, kItems = kTokens <= 2 ? 8 : kTokens == 4 ? 16 : kColumns * 32;
  static constexpr int kTableBytes = 4;  // of a token at one step

  const Position& at;
  const Problem& p;
  const uint32_t zeros;  // in shared memory: bytes of 0
  uint32_t x, ones;      // x and its sums, from step `first` on
  int first;
  const Decoder decoder;
  static constexpr int kRows = Ring::kRows;
  Sum sums[kRows][kClasses], total[kRows];  // of a group; of the tile, scaled

  __device__ Worker(const Position& position, uint32_t zeros_at, uint32_t x_at, uint32_t ones_at)
      : at(position),
        p(position.p),
        zeros(zeros_at),
        x(x_at),
        ones(ones_at),
        first(position.block_step(position.rank)),
        decoder(position.p.zero_base) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kClasses; ++c) clear(sums[r][c]);
  }

  template <class Between>
  static __device__ __forceinline__ void bring_x(const Position& at, uint32_t x, uint32_t ones, Between between) {
    between();
    decode::bring_x<Act, Tile, kOnes && !Fine>(at, x, ones, 1.0f / Decoder::kUnit);
  }

  static __device__ __forceinline__ void clear(Sum& sum) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[column][i] = 0.0f;
  }

  // ---- from shared memory to registers -----------------------------------------------------------------------------
  // row: this lane's row for ldmatrix. Column c of 8 is token c % kTokens in phase c / kTokens, else 0.
  __device__ __forceinline__ void load_x(const uint32_t (&row)[kColumns], int phase, XFragments& x) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const bool used = kTokens >= 8 || at.lane % 8 / kTokens == phase;
      const uint32_t from = used ? row[column] : zeros;
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::load_matrices(x[i][column], from + i * 64);
    }
  }

  // One step of a stage: this lane's words of every plane.
  __device__ __forceinline__ void load_words(uint32_t stage, int step, Words& words) const {
#pragma unroll
    for (int width = 8; width >= 1; width /= 2) {
      if (!(kBits & width)) continue;
      uint32_t* to = words.word + 2 * (kBits & ~(2 * width - 1));
      const uint32_t from = stage + step * 256 * width;
      if (width == 1) {
        ptx::load_shared(from + at.lane * 8, to[0], to[1]);
      } else {
#pragma unroll
        for (int i = 0; i < width / 2; ++i)
          ptx::load_shared(from + i * 512 + at.lane * 16, to[4 * i], to[4 * i + 1], to[4 * i + 2], to[4 * i + 3]);
      }
      stage += Ring::kSteps * 256 * width;
    }
  }

  // ---- arithmetic --------------------------------------------------------------------------------------------------
  static __device__ __forceinline__ void multiply(const uint32_t (&a)[4], const XFragments& x, int f, Sum& to) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
      ptx::mma<Act>(to[column], a, x[f / 2][column][f % 2 * 2], x[f / 2][column][f % 2 * 2 + 1]);
  }

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
          if (kOnes && !kBeginAtOffset) value = fmaf(-zero[h], x_sum[column][side], value);
          total[r][column][i] = fmaf(scale[h], value, total[r][column][i]);
          if (Zeros) total[r][column][i] = fmaf(shift[h], x_sum[column][side], total[r][column][i]);
        }
    }
#pragma unroll
    for (int c = 0; c < kClasses; ++c) clear(sums[r][c]);
  }

  // The sum of x of a column, counted from the first token of a step.
  __device__ __forceinline__ float sum_of_x(int step, int column) const {
    return __uint_as_float(ptx::load_shared(ones + ((step - first) * kTokens + column) * 4));
  }

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

  // The columns hold steps began .. began + kPhases - 1 of a chunk, those below `steps`: apply their scales.
  __device__ __forceinline__ void finish_phases(uint32_t scales, int chunk, int began, int steps) {
    const int t = at.lane % 4, g = at.lane / 4;
    uint32_t scale[kRows][2], stored[kRows][2] = {};
    float x_sum[kColumns][2] = {};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int own = began + (kTokens < 8 ? (2 * t + side) / kTokens : 0);
      const int group =
          p.group_shift == 7 ? own : ((chunk + own) * kStepK >> p.group_shift) - (chunk * kStepK >> p.group_shift);
      const bool used = kTokens >= 8 || own < steps;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t from = scales + r * Ring::kTileScaleBytes + group * 32 + g * 4;
        if (kTokens >= 8 && side == 1) {
          scale[r][1] = scale[r][0], stored[r][1] = stored[r][0];  // one group for all columns
        } else {
          scale[r][side] = used ? ptx::load_shared(from) : 0;
          if (Zeros) stored[r][side] = used ? ptx::load_shared(from + Ring::kGroupBytes) : 0;
        }
      }
      if (kOnes && !kBeginAtOffset)
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
          x_sum[column][side] = used ? sum_of_x(chunk + began, column * 8 + 2 * t + side) : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) apply_scales(r, scale[r], stored[r], x_sum);
  }

  // ---- a chunk: up to 8 steps of a tile ----------------------------------------------------------------------------
  struct Place {
    uint32_t stage, scales;  // in the ring
  };
  static __device__ __forceinline__ Place start(uint32_t ring) {
    if constexpr (kStaged) {
      return {ring, 0};
    } else {
      return {ring + (Ring::kDepth - 1) * Ring::kStageBytes, ring + Ring::kDepth * Ring::kStageBytes};
    }
  }

  // Moves on to the next stage of the ring, which has come then.
  __device__ __forceinline__ void next_stage(Place& place, Feed& feed) const {
    place.stage += Ring::kStageBytes;
    if (place.stage == feed.ring + Ring::kDepth * Ring::kStageBytes) place.stage = feed.ring;
    ptx::wait_groups<Ring::kDepth - 2>();
    __syncwarp();  // what other lanes fetched has come, and every lane is done with the stage before
    feed.fetch();
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

  __device__ __forceinline__ void run_step(uint32_t stage, int in_stage, int phase, uint32_t (&row)[kColumns],
                                           int row_bytes) {
    XFragments x;
    load_x(row, phase, x);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) row[column] += row_bytes;
    Words words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_words(stage + r * Ring::kTileBytes, in_stage, words[r]);
#pragma unroll
    for (int f = 0; f < 8; ++f)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint32_t a[4];
        decoder.fragment(words[r], f, a);
        multiply(a, x, f, sums[r][f % kClasses]);
      }
  }

  // place.stage: the stage before the chunk's first.
  __device__ __forceinline__ void run_chunk(Place& place, Feed& feed, int chunk, int steps) {
    uint32_t row[kColumns];
    find_rows(chunk, row);
    const int row_bytes = p.m * kRowBytes;
#pragma unroll 1
    for (int step = 0; step < steps; step += Ring::kSteps) {
      next_stage(place, feed);
#pragma unroll
      for (int i = 0; i < Ring::kSteps; ++i) {
        if (i && step + i >= steps) break;
        if (kBeginAtOffset) begin_at_offset(chunk + step + i);
        run_step(place.stage, i, (step + i) % kPhases, row, row_bytes);
        // Why here only: phases end with a stage, or with every few of its steps.
        constexpr int kEvery = kPhases < Ring::kSteps ? kPhases : Ring::kSteps;
        if ((i + 1) % kEvery == 0 && i + 1 < Ring::kSteps && (step + i + 1) % kPhases == 0)
          finish_phases(place.scales, chunk, step + i + 1 - kPhases, steps);
      }
      const int done = min(step + Ring::kSteps, steps);
      // A short stage has finished whole phases above.
      const bool whole = step + Ring::kSteps <= steps;
      if (whole ? done % kPhases == 0 || done == steps : done % kPhases != 0 || kPhases > Ring::kSteps)
        finish_phases(place.scales, chunk, (done - 1) / kPhases * kPhases, steps);
    }
  }

  // A slice of kRows tiles whose stages bring their own scales. All of the ring is in flight: the oldest stage lies
  // where the next one will, its scales one slot further. Its words go to registers at once; with up to 8 tokens its
  // place is free again while they are multiplied.
  __device__ __forceinline__ void run_staged(Feed& feed, int first_step, int end_step) {
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
        if (kBeginAtOffset) {
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

  // The same with groups of 16, 32 or 64 k: scales follow every fragment, second or fourth one.
  __device__ __forceinline__ void run_chunk_fine(Place& place, Feed& feed, int chunk, int steps) {
    const int shift = p.group_shift - 4, mask = (1 << shift) - 1, own = at.lane % 8,
              row_bytes = own < kTokens ? p.m * kRowBytes : 0;
    uint32_t row[kColumns];
    find_rows(chunk, row);
    if (own >= kTokens) row[0] = zeros;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      next_stage(place, feed);
      Sum ones = {};
      Words words;
      load_words(place.stage, 0, words);
      uint32_t x[kColumns][4];
#pragma unroll
      for (int f = 0; f < 8; ++f) {
        if (f % 2 == 0)
#pragma unroll
          for (int column = 0; column < kColumns; ++column) ptx::load_matrices(x[column], row[column] + f / 2 * 64);
        uint32_t a[4];
        decoder.fragment(words, f, a);
        constexpr uint32_t kOne = Decoder::kOne;
        const uint32_t one[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          ptx::mma<Act>(sums[0][f % kClasses][column], a, x[column][f % 2 * 2], x[column][f % 2 * 2 + 1]);
          if (kOnes) ptx::mma<Act>(ones[column], one, x[column][f % 2 * 2], x[column][f % 2 * 2 + 1]);
        }
        if ((f & mask) != mask) continue;
        if (((chunk + step) * 8 + f) >> shift >= p.groups) continue;  // beyond k: no scale came
        const uint32_t group = place.scales + ((step * 8 + f) >> shift) * 32 + at.lane / 4 * 4;
        const uint32_t scale = ptx::load_shared(group),
                       stored = Zeros ? ptx::load_shared(group + Ring::kGroupBytes) : 0;
        float found[kColumns][2];
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
          found[column][0] = ones[column][0], found[column][1] = ones[column][1];
        apply_scales(0, {scale, scale}, {stored, stored}, found);
        clear(ones);
      }
#pragma unroll
      for (int column = 0; column < kColumns; ++column) row[column] += row_bytes;
    }
  }

  __device__ __forceinline__ void clear_total() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) clear(total[r]);
  }

  // The slice of kRows tiles, from its first stage in the ring: adds to total.
  __device__ __forceinline__ void run_slice(Place& place, Feed& feed, int first_step, int end_step) {
    if constexpr (kStaged) {
      run_staged(feed, first_step, end_step);
    } else {
#pragma unroll 1
      for (int chunk = first_step; chunk < end_step; chunk += Ring::kChunk) {
        const int steps = min(Ring::kChunk, end_step - chunk);
        if constexpr (Fine) {
          run_chunk_fine(place, feed, chunk, steps);
        } else {
          run_chunk(place, feed, chunk, steps);
        }
        place.scales += Ring::kScaleBytes;
        if (place.scales == feed.ring + Ring::kBytes) place.scales -= Ring::kScaleSlots * Ring::kScaleBytes;
      }
    }
  }
  __device__ __forceinline__ void run_tile(Place& place, Feed& feed) {
    clear_total();
    run_slice(place, feed, at.first_step, at.end_step);
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
