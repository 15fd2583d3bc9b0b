// What one warp does with its slice of row tiles whose scales come in chunks: floats of few tokens, where columns that
// tokens leave free hold further steps of 128 k (phases); and every type with scales finer than 128 k.
#pragma once
#include <cstdint>

#include "activations.cuh"
#include "chunk_feed.cuh"
#include "products.cuh"

namespace lowbit::decode {

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
using ChunkFeedOf = ChunkFeed<Weight, Tile, Fine, Zeros, std::conditional_t<Tile::kMany, Phases, Strip>>;

// Fragments go to two classes in turn. Why: the products of one sum wait for each other.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
struct ChunkWorker : Products<Weight, Act, Tile, Zeros, ChunkFeedOf<Weight, Act, Tile, Fine, Zeros>, 2, false> {
  using Base = Products<Weight, Act, Tile, Zeros, ChunkFeedOf<Weight, Act, Tile, Fine, Zeros>, 2, false>;
  using Base::at, Base::p, Base::x, Base::ones, Base::first, Base::decoder, Base::sums, Base::total;
  using Base::clear, Base::find_rows, Base::load_words, Base::sum_of_x, Base::apply_scales;
  using Base::kBits, Base::kColumns, Base::kTokens, Base::kRows, Base::kClasses, Base::kOnes;
  using typename Base::Decoder, typename Base::Feed, typename Base::Ring, typename Base::Sum, typename Base::Words;
  static_assert(Fine || !Tile::kMany);
  static constexpr int kPhases = Fine ? 1 : Tile::kPhases;
  static constexpr int kAhead = Ring::kDepth - 1;  // stages to fetch before the first is read
  using XFragments = uint32_t[4][kColumns][4];     // 32 k each

  const uint32_t zeros;  // in shared memory: bytes of 0

  __device__ ChunkWorker(const Position& position, uint32_t zeros_at, uint32_t x_at, uint32_t ones_at)
      : Base(position, x_at, ones_at), zeros(zeros_at) {}

  template <class Between>
  static __device__ __forceinline__ void bring_x(const Position& at, uint32_t x, uint32_t ones, Between between) {
    between();
    decode::bring_x<Act, Tile, kOnes && !Fine>(at, x, ones, 1.0f / Decoder::kUnit);
  }

  // row: this lane's row for ldmatrix. Column c of 8 is token c % kTokens in phase c / kTokens, else 0.
  __device__ __forceinline__ void load_x(const uint32_t (&row)[kColumns], int phase, XFragments& x) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const bool used = at.lane % 8 / kTokens == phase;
      const uint32_t from = used ? row[column] : zeros;
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::load_matrices(x[i][column], from + i * 64);
    }
  }

  static __device__ __forceinline__ void multiply(const uint32_t (&a)[4], const XFragments& x, int f, Sum& to) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
      ptx::mma<Act>(to[column], a, x[f / 2][column][f % 2 * 2], x[f / 2][column][f % 2 * 2 + 1]);
  }

  // The columns hold steps began .. began + kPhases - 1 of a chunk, those below `steps`: apply their scales.
  __device__ __forceinline__ void finish_phases(uint32_t scales, int chunk, int began, int steps) {
    const int t = at.lane % 4, g = at.lane / 4;
    uint32_t scale[kRows][2], stored[kRows][2] = {};
    float x_sum[kColumns][2] = {};
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
      if (kOnes)
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

  // The slice of kRows tiles, from its first stage in the ring: adds to total.
  __device__ __forceinline__ void run_slice(Place& place, Feed& feed, int first_step, int end_step) {
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
  __device__ __forceinline__ void run_tile(Place& place, Feed& feed) {
    Base::clear_total();
    run_slice(place, feed, at.first_step, at.end_step);
  }
};

}  // namespace lowbit::decode
