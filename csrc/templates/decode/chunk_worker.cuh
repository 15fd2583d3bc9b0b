// What one warp does with its slice of row tiles whose scales come in chunks: floats, where columns of a product that
// tokens leave free hold further steps of 128 k (phases); and every type with scales finer than 128 k. Both multiply in
// the type of x.
#pragma once
#include <cstdint>

#include "../dequant/float.cuh"
#include "../dequant/int.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "activations.cuh"
#include "chunk_feed.cuh"
#include "shape.cuh"
#include "stage_words.cuh"

namespace lowbit::decode {

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
struct ChunkWorker {
  using Feed = ChunkFeed<Weight, Tile, Fine, Zeros>;
  using Ring = typename Feed::Ring;
  using Decoder = lowbit::Decoder<Weight, Act>;
  using Words = typename Decoder::Words;
  using Sum = float[4];
  static constexpr int kTokens = Tile::kTokens, kRows = Ring::kRows;
  static constexpr int kPhases = Fine ? 1 : 8 / kTokens;  // steps in a product
  // Of a group. Fragments go to them in turn. Why: the products of one sum wait for each other.
  static constexpr int kSums = 2;
  static constexpr bool kXSums = Decoder::kSubtractOffset || Zeros;  // sums of x are needed

  // What it hands in: items of kFloats, kItems a tile; of each row, kLanes lanes do.
  static constexpr int kLanes = kTokens == 4 ? 2 : 1;
  static constexpr int kFloats = 4, kItems = 8 * kLanes;
  static constexpr int kTableBytes = 4;  // of a token at one step

  const Position& at;
  const Problem& p;
  const uint32_t zeros, x, x_sums;  // in shared memory: bytes of 0, x, its sums
  const int first;                  // the step that x and its sums begin with
  const Decoder decoder;
  Sum sums[kRows][kSums], total[kRows];  // of a group; of the tile, scaled

  __device__ ChunkWorker(const Position& position, uint32_t zeros_at, uint32_t x_at, uint32_t x_sums_at)
      : at(position),
        p(position.p),
        zeros(zeros_at),
        x(x_at),
        x_sums(x_sums_at),
        first(position.block_step(position.rank)),
        decoder(position.p.zero_base) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kSums; ++c) clear(sums[r][c]);
  }

  template <class Between>
  static __device__ __forceinline__ void bring_x(const Position& at, uint32_t x, uint32_t x_sums, Between between) {
    between();
    decode::bring_x<Act, Tile, kXSums && !Fine>(at, x, x_sums, 1.0f / Decoder::kUnit);
  }

  static __device__ __forceinline__ void clear(Sum& sum) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
  }

  // This lane's row of x for ldmatrix, at a step.
  __device__ __forceinline__ uint32_t find_row(int step) const {
    // Why min: tokens that don't exist read the last one; their sums are never stored.
    const int token = min(at.lane % 8 % kTokens, p.m - 1);
    return x + ((step - first) * p.m + token) * kRowBytes + at.lane / 8 * 16;
  }

  // ---- scales ------------------------------------------------------------------------------------------------------
  // total += scale * (sums - zero * x_sum), then sums = 0. scale, stored: words of rows g and g + 8, of columns 2t and
  // 2t + 1; x_sum: sums of x of these columns.
  __device__ __forceinline__ void apply_scales(int r, const uint32_t (&scales)[2], const uint32_t (&stored)[2],
                                               const float (&x_sum)[2]) {
    constexpr float kFactor[2] = {static_cast<float>(1 << Decoder::exponent(0)),
                                  static_cast<float>(1 << Decoder::exponent(1))};
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
      for (int h = 0; h < 2; ++h) {
        const int i = 2 * h + side;
        float value = sums[r][0][i] + sums[r][1][i];
        if (kXSums) value = fmaf(-zero[h], x_sum[side], value);
        total[r][i] = fmaf(scale[h], value, total[r][i]);
        if (Zeros) total[r][i] = fmaf(shift[h], x_sum[side], total[r][i]);
      }
    }
#pragma unroll
    for (int c = 0; c < kSums; ++c) clear(sums[r][c]);
  }

  // The columns hold steps began .. began + kPhases - 1 of a chunk, those below `steps`: apply their scales.
  __device__ __forceinline__ void finish_phases(uint32_t scales, int chunk, int began, int steps) {
    const int t = at.lane % 4, g = at.lane / 4;
    uint32_t scale[kRows][2], stored[kRows][2] = {};
    float x_sum[2] = {};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int own = began + (2 * t + side) / kTokens;
      const int group =
          p.group_shift == 7 ? own : ((chunk + own) * kStepK >> p.group_shift) - (chunk * kStepK >> p.group_shift);
      const bool used = own < steps;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t from = scales + r * Ring::kTileScaleBytes + group * 32 + g * 4;
        scale[r][side] = used ? ptx::load_shared(from) : 0;
        if (Zeros) stored[r][side] = used ? ptx::load_shared(from + Ring::kGroupBytes) : 0;
      }
      if (kXSums) {
        const uint32_t from = x_sums + ((chunk + began - first) * kTokens + 2 * t + side) * kTableBytes;
        x_sum[side] = used ? __uint_as_float(ptx::load_shared(from)) : 0.0f;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) apply_scales(r, scale[r], stored[r], x_sum);
  }

  // ---- a chunk of kRows tiles --------------------------------------------------------------------------------------
  struct Place {
    uint32_t stage, scales;  // in the ring
  };
  static __device__ __forceinline__ Place start(uint32_t ring) {
    return {ring + (Ring::kDepth - 1) * Ring::kStageBytes, ring + Ring::kDepth * Ring::kStageBytes};
  }

  // Moves on to the next stage of the ring, which has come then.
  __device__ __forceinline__ void next_stage(Place& place, Feed& feed) const {
    place.stage += Ring::kStageBytes;
    if (place.stage == feed.ring + Ring::kDepth * Ring::kStageBytes) place.stage = feed.ring;
    ptx::wait_groups<Ring::kDepth - 2>();
    __syncwarp();  // what other lanes fetched has come, and every lane is done with the stage before
    feed.fetch();
  }

  // row: where this lane reads x.
  __device__ __forceinline__ void run_step(uint32_t stage, uint32_t row) {
    uint32_t b[4][4];  // x: 32 k each
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::load_matrices(b[i], row + i * 64);
    Words words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_words<1>(stage + r * Ring::kTileBytes, 0, at.lane, words[r]);
#pragma unroll
    for (int f = 0; f < 8; ++f)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint32_t a[4];
        decoder.fragment(words[r], f, a);
        ptx::mma<Act>(sums[r][f % kSums], a, b[f / 2][f % 2 * 2], b[f / 2][f % 2 * 2 + 1]);
      }
  }

  // place.stage: the stage before the chunk's first. Column c of 8 holds token c % kTokens in phase c / kTokens, else
  // 0.
  __device__ __forceinline__ void run_chunk(Place& place, Feed& feed, int chunk, int steps) {
    uint32_t row = find_row(chunk);
    const int row_bytes = p.m * kRowBytes;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      next_stage(place, feed);
      run_step(place.stage, at.lane % 8 / kTokens == step % kPhases ? row : zeros);
      row += row_bytes;
      const int done = step + 1;
      if (done % kPhases == 0 || done == steps) finish_phases(place.scales, chunk, step / kPhases * kPhases, steps);
    }
  }

  // The same with groups of 16, 32 or 64 k: scales follow every fragment, second or fourth one.
  __device__ __forceinline__ void run_chunk_fine(Place& place, Feed& feed, int chunk, int steps) {
    const int shift = p.group_shift - 4, mask = (1 << shift) - 1;
    const bool used = at.lane % 8 < kTokens;
    uint32_t row = find_row(chunk);
    if (!used) row = zeros;
    const int row_bytes = used ? p.m * kRowBytes : 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      next_stage(place, feed);
      Sum x_sum = {};
      Words words;
      load_words<1>(place.stage, 0, at.lane, words);
      uint32_t b[4];
#pragma unroll
      for (int f = 0; f < 8; ++f) {
        if (f % 2 == 0) ptx::load_matrices(b, row + f / 2 * 64);
        uint32_t a[4];
        decoder.fragment(words, f, a);
        constexpr uint32_t kOne = Decoder::kOne;
        const uint32_t one[4] = {kOne, kOne, kOne, kOne};
        ptx::mma<Act>(sums[0][f % kSums], a, b[f % 2 * 2], b[f % 2 * 2 + 1]);
        if (kXSums) ptx::mma<Act>(x_sum, one, b[f % 2 * 2], b[f % 2 * 2 + 1]);
        if ((f & mask) != mask) continue;
        if (((chunk + step) * 8 + f) >> shift >= p.groups) continue;  // beyond k: no scale came
        const uint32_t group = place.scales + ((step * 8 + f) >> shift) * 32 + at.lane / 4 * 4;
        const uint32_t scale = ptx::load_shared(group),
                       stored = Zeros ? ptx::load_shared(group + Ring::kGroupBytes) : 0;
        apply_scales(0, {scale, scale}, {stored, stored}, {x_sum[0], x_sum[1]});
        clear(x_sum);
      }
      row += row_bytes;
    }
  }

  // The slice of kRows tiles, from its first stage in the ring.
  __device__ __forceinline__ void run_tile(Place& place, Feed& feed) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) clear(total[r]);
#pragma unroll 1
    for (int chunk = at.first_step; chunk < at.end_step; chunk += Ring::kChunk) {
      const int steps = min(Ring::kChunk, at.end_step - chunk);
      if constexpr (Fine) {
        run_chunk_fine(place, feed, chunk, steps);
      } else {
        run_chunk(place, feed, chunk, steps);
      }
      place.scales += Ring::kScaleBytes;
      if (place.scales == feed.ring + Ring::kBytes) place.scales -= Ring::kScaleSlots * Ring::kScaleBytes;
    }
  }

  // ---- sums that meet ----------------------------------------------------------------------------------------------
  // Calls store(item, floats) for what this lane found of row tile r.
  template <class Store>
  __device__ __forceinline__ void hand_in(int r, Store store) {
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = total[r][i];
      if (kTokens == 1) values[i] = i % 2 ? 0.0f : total[r][i] + total[r][i + 1];
      if (kTokens == 1 && i % 2) continue;
#pragma unroll
      for (int lanes = kLanes; lanes < 4; lanes *= 2) values[i] += __shfl_xor_sync(~0u, values[i], lanes);  // phases
    }
    if (at.lane % 4 < kLanes) store(at.lane / 4 * kLanes + at.lane % 4, values);
  }

  // Which row of 16 and which token the float i of an item is.
  struct Spot {
    int row, token;
  };
  static __device__ __forceinline__ Spot spot(int item, int i) {
    return {item / kLanes + i / 2 * 8, item % kLanes * 2 + i % 2};
  }
  // What a sum of a row is to be multiplied by, but for the step between codes.
  static __device__ __forceinline__ float unit(int row) { return Decoder::kUnit / (1 << Decoder::exponent(row / 8)); }
};

}  // namespace lowbit::decode
