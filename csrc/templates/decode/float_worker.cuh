// What one warp does with its slice of row tiles of floats, which it multiplies in the type of x. Columns of a product
// that tokens leave free hold further steps of 128 k (phases), whose scales come in chunks.
#pragma once
#include <cstdint>

#include "../dequant/float.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "activations.cuh"
#include "float_feed.cuh"
#include "shape.cuh"
#include "stage_words.cuh"

namespace lowbit::decode {

template <class Weight, class Act, class Tile>
struct FloatWorker {
  using Feed = FloatFeed<Weight, Tile>;
  using Ring = typename Feed::Ring;
  using X = Values<Tile>;
  using Decoder = lowbit::Decoder<Weight, Act>;
  using Words = typename Decoder::Words;
  using Sum = float[4];
  using Table = bytes::NoTable;
  static constexpr int kBits = Weight::kBits, kTokens = Tile::kTokens, kRows = Ring::kRows;
  static constexpr int kPhases = 8 / kTokens;  // steps in a product
  static constexpr int kTurn = 1;              // steps that a slice is rounded up to
  // Of a group. Fragments go to them in turn. Why: the products of one sum wait for each other.
  static constexpr int kSums = 2;
  static_assert(!Decoder::kSubtractOffset);

  // What it hands in: items of kFloats, kItems a tile; of each row, kLanes lanes do.
  static constexpr int kLanes = kTokens == 4 ? 2 : 1;
  static constexpr int kFloats = kTokens == 1 ? 2 : 4, kItems = 8 * kLanes;
  static constexpr bool kFolds = false;  // a lane may have an item of each row tile
  static constexpr int kTableBytes = 0;  // nothing else is known of x
  static constexpr bool kZeros = false;

  const Position& at;
  const Problem& p;
  const uint32_t zeros, x;  // in shared memory: bytes of 0, x
  const int first;          // the step that x begins with
  const Decoder decoder;
  Sum sums[kRows][kSums], total[kRows];  // of a group; of the tile, scaled

  __device__ FloatWorker(const Position& position, uint32_t zeros_at, uint32_t x_at, uint32_t /*table*/)
      : at(position),
        p(position.p),
        zeros(zeros_at),
        x(x_at),
        first(position.block_step(position.rank)),
        decoder(position.p.zero_base) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kSums; ++c) clear(sums[r][c]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) clear(total[r]);
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
  // The columns hold steps began .. began + kPhases - 1 of a chunk, those below `steps`: their sums, scaled, are added
  // to the total, and begin again.
  __device__ __forceinline__ void finish_phases(uint32_t scales, int chunk, int began, int steps) {
    const int t = at.lane % 4, g = at.lane / 4;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int own = began + (2 * t + side) / kTokens;
      const int group =
          p.group_shift == 7 ? own : ((chunk + own) * kStepK >> p.group_shift) - (chunk * kStepK >> p.group_shift);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t word =
            own < steps ? ptx::load_shared(scales + r * Ring::kTileScaleBytes + group * 32 + g * 4) : 0;
        const float2 scale = unpack_pair(word, p.bf16_scales);
        total[r][side] = fmaf(scale.x, sums[r][0][side] + sums[r][1][side], total[r][side]);
        total[r][2 + side] = fmaf(scale.y, sums[r][0][2 + side] + sums[r][1][2 + side], total[r][2 + side]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kSums; ++c) clear(sums[r][c]);
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

  // The slice of kRows tiles, from its first stage in the ring.
  __device__ __forceinline__ void run_tile(Place& place, Feed& feed) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) clear(total[r]);
#pragma unroll 1
    for (int chunk = at.first_step; chunk < at.end_step; chunk += Ring::kChunk) {
      const int steps = min(Ring::kChunk, at.end_step - chunk);
      run_chunk(place, feed, chunk, steps);
      place.scales += Ring::kScaleBytes;
      if (place.scales == feed.ring + Ring::kBytes) place.scales -= Ring::kScaleSlots * Ring::kScaleBytes;
    }
  }

  // ---- sums that meet ----------------------------------------------------------------------------------------------
  // Calls store(tile, float number, floats) for what this lane hands in.
  template <class Store>
  __device__ __forceinline__ void hand_in(Store store) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float values[kFloats];
#pragma unroll
      for (int i = 0; i < kFloats; ++i) {
        values[i] = kTokens == 1 ? total[r][2 * i] + total[r][2 * i + 1] : total[r][i];
#pragma unroll
        for (int lanes = kLanes; lanes < 4; lanes *= 2) values[i] += __shfl_xor_sync(~0u, values[i], lanes);  // phases
      }
      if (at.lane % 4 < kLanes) store(r, (at.lane / 4 * kLanes + at.lane % 4) * kFloats, values);
    }
  }

  // Which row of 16 and which token the float i of an item is.
  struct Spot {
    int row, token;
  };
  static __device__ __forceinline__ Spot spot(int item, int i) {
    constexpr int kEach = kFloats / 2;  // of a row
    return {item / kLanes + i / kEach * 8, item % kLanes * kEach + i % kEach};
  }
  // What a sum of a row is to be multiplied by, but for the step between codes.
  static __device__ __forceinline__ float unit(int row) {
    constexpr float kUnit[2] = {Decoder::kUnit / (1 << Decoder::exponent(0)),
                                Decoder::kUnit / (1 << Decoder::exponent(1))};
    return row < 8 ? kUnit[0] : kUnit[1];
  }
};

}  // namespace lowbit::decode
