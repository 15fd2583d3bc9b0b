// What one warp does with its slice of a row tile of codes that are bytes: products of these, exact until a group is
// scaled.
//
// Columns 2i and 2i + 1 of a product are the low and high digits of one token; so a product holds four tokens, and a
// lane 4g + t finds rows g and g + 8 of token t. With fewer than four tokens it holds further steps of 128 k (phases):
// column pair i is token i % kTokens in phase i / kTokens. Where groups are shorter than 128 k, they hold parts of one
// step (units) instead, each with x of its own k and 0 elsewhere, so that these have sums of their own; eight units
// have two sets of sums, one of each 64 k.
#pragma once
#include <cstdint>

#include "../dequant/bytes.cuh"
#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"
#include "digits.cuh"
#include "shape.cuh"
#include "stage_feed.cuh"
#include "stage_words.cuh"

namespace lowbit::decode {

template <class Weight, class Act, class Tile, class Form>
struct ByteWorker {
  using Feed = StageFeed<Weight, Tile, Form>;
  using Ring = typename Feed::Ring;
  static constexpr bool kZeros = Form::kZeros, kFine = Form::kFine;
  static constexpr int kUnits = Form::kUnits, kSets = Form::kSets;
  using X = Digits<Act, Tile, bytes::kMerged<Weight::kBits>, kUnits>;
  static constexpr bool kFloat = false;
  static constexpr int kBits = Weight::kBits, kTokens = Tile::kTokens, kRows = Ring::kRows;
  static constexpr int kPhases = kFine ? 1 : 4 / kTokens;                        // steps in a product
  static constexpr int kTurn = kPhases > Ring::kSteps ? kPhases : Ring::kSteps;  // steps in which stages and these meet
  static_assert(kUnits <= kMostUnits<Weight, Tile>);
  static constexpr bool kLookedUp = bytes::kLookedUp<Weight>;
  using Table = bytes::Table<Weight>;
  using Parts = std::conditional_t<kLookedUp, bytes::LookedUpParts, bytes::Parts<kBits, true>>;
  // Merged: whole codes are made of planes, of an even fragment and the next at once; lifted: the latter stay higher.
  static constexpr bool kMerged = bytes::kMerged<kBits>, kLifted = kMerged && !kLookedUp;

  // Whether it keeps what the problem says of scales. Why not there: registers run out.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr bool kHolds = kBits > 1 || kTokens < 4;
#else
  static constexpr bool kHolds = true;
#endif

  // What it hands in: items of kFloats, kItems a tile.
  static constexpr int kFloats = 2, kItems = 8 * kTokens;
  static constexpr int kTableBytes = 8 * kUnits;  // of a token at one step

  const Position& at;
  const Problem& p;
  const uint32_t zeros;  // in shared memory: bytes of 0
  uint32_t row, entry;   // where this lane's digits of a slice begin, and its exponents and sums
  uint32_t scale_at;     // its word of a step's scales, of the first set
  float zero_base;
  int bf16_scales;
  Table table;
  int sums[kRows][kSets][Parts::kCount][4];
  float total[kRows][2];

  __device__ ByteWorker(const Position& position, uint32_t zeros_at, uint32_t x_at, uint32_t table_at)
      : at(position), p(position.p), zeros(zeros_at) {
    const int begin = at.first_step - at.block_step(at.rank), column = at.lane / 4, t = at.lane % 4;
    const int unit = kFine ? t : 0, shift = kFine ? p.group_shift - Form::kUnitShift : 0;
    entry = table_at + ((begin + scale_phase()) * kTokens + t % kTokens) * kTableBytes + unit * 8;
    scale_at = (unit >> shift << shift) * 32 + at.lane / 4 * 4;
    // Why min: tokens that don't exist read the last one; their sums are never stored.
    const int token = min(column / 2 % kTokens, tokens() - 1);
    row = x_at + ((begin + read_phase()) * tokens() + token) * kRowBytes + column % 2 * 64 + t * 16;
    zero_base = p.zero_base, bf16_scales = p.bf16_scales;
    if (kFine) ptx::hold(scale_at);
    ptx::hold(row), ptx::hold(entry);
    if (kHolds) ptx::hold(zero_base), ptx::hold(bf16_scales);
    clear_sums();
  }

  __device__ __forceinline__ int tokens() const { return kTokens == 1 ? 1 : p.m; }
  // A lane reads x of one phase, and scales that of the token it sums.
  __device__ __forceinline__ int read_phase() const { return kFine ? 0 : at.lane / 4 / 2 / kTokens; }
  __device__ __forceinline__ int scale_phase() const { return kFine ? 0 : at.lane % 4 / kTokens; }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int set = 0; set < kSets; ++set)
#pragma unroll
        for (int part = 0; part < Parts::kCount; ++part)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[r][set][part][i] = 0;
  }

  // ---- products ----------------------------------------------------------------------------------------------------
  // The part of fragments 2i and 2i + 1 of a plane that begins with part `first`.
  template <int Width>
  static __device__ __forceinline__ constexpr int part_of(int first, int i) {
    return Width == 1 && i % 2 ? first + 1 : first;
  }

  // Multiplies the plane of one width, whose sums begin with part First.
  template <int Width, int First>
  __device__ __forceinline__ void multiply_plane(uint32_t stage, int step, const uint32_t (&digits)[8]) {
    uint32_t words[kRows][2 * Width];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      load_plane<Width>(stage + r * Ring::kTileBytes + step * 256 * Width, at.lane, words[r]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint32_t a[4];
        if constexpr (kLookedUp) {
          table.fragments(words[r], i, a);
        } else {
          bytes::fragments<Width, true>(words[r], i, a);
        }
        ptx::mma_bytes(sums[r][i * kSets / 4][part_of<Width>(First, i)], a, digits[2 * i], digits[2 * i + 1]);
      }
  }

  template <int Width, int First>
  __device__ __forceinline__ void multiply(uint32_t stage, int step, const uint32_t (&digits)[8]) {
    if constexpr (Width > 0) {
      constexpr bool kHas = (kBits & Width) != 0;
      if constexpr (kHas) multiply_plane<Width, First>(stage, step, digits);
      multiply<Width / 2, First + kHas>(stage + kHas * Ring::kSteps * 256 * Width, step, digits);
    }
  }

  // The same of codes whose planes are put together.
  __device__ __forceinline__ void multiply_merged(uint32_t stage, int step, const uint32_t (&digits)[8]) {
    planes::Words<kBits> words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_words<Ring::kSteps>(stage + r * Ring::kTileBytes, step, at.lane, words[r]);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        uint32_t even[4], odd[4];
        if constexpr (kLookedUp) {
          table.fragments(words[r], i, even, odd);
        } else {
          bytes::fragments<kBits, false>(words[r], i, even);
        }
        ptx::mma_bytes(sums[r][0][kLifted], even, digits[4 * i], digits[4 * i + 1]);
        if constexpr (!kLookedUp) bytes::fragments<kBits, true>(words[r], i, odd);
        ptx::mma_bytes(sums[r][0][0], odd, digits[4 * i + 2], digits[4 * i + 3]);
      }
  }

  // Digits of the unit whose columns this lane has, 0 for the others.
  __device__ __forceinline__ void load_units(uint32_t row, uint32_t (&digits)[8]) const {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if constexpr (kUnits == 8) {
        digits[unit] = ptx::load_shared((at.lane / 8 == unit % 4 ? row : zeros) + unit / 4 * 128 + unit % 4 * 4);
        continue;
      }
      const uint32_t from = (at.lane / 8 == unit ? row : zeros) + unit / 2 * 128;
      uint32_t* to = digits + unit / 2 * 4;
      if constexpr (kMerged) {  // even fragments come first
        to[unit % 2] = ptx::load_shared(from + unit % 2 * 4);
        to[2 + unit % 2] = ptx::load_shared(from + 8 + unit % 2 * 4);
      } else {
        ptx::load_shared(from + unit % 2 * 8, to[unit % 2 * 2], to[unit % 2 * 2 + 1]);
      }
    }
  }

  // row: where this lane's digits are.
  __device__ __forceinline__ void run_step(uint32_t stage, int in_stage, uint32_t row) {
    uint32_t digits[8];
    if constexpr (kFine) {
      load_units(row, digits);
    } else {
      ptx::load_shared(row, digits[0], digits[1], digits[2], digits[3]);
      ptx::load_shared(row + 128, digits[4], digits[5], digits[6], digits[7]);
    }
    if constexpr (kMerged) {
      multiply_merged(stage, in_stage, digits);
    } else {
      multiply<8, 0>(stage, in_stage, digits);
    }
  }

  // ---- scales ------------------------------------------------------------------------------------------------------
  // total += scale * sums, then sums = 0. Of the phase that this lane sums: scales: its word of row tile 0; entry: its
  // place in the table; used: whether its step is part of the slice.
  __device__ __forceinline__ void finish(uint32_t scales, uint32_t entry, bool used) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) finish_set(set, scales + set * (4 * 32), entry + set * (4 * 8), used);
    clear_sums();
  }

  __device__ __forceinline__ void finish_set(int set, uint32_t scales, uint32_t entry, bool used) {
    uint32_t words[2];
    ptx::load_shared(entry, words[0], words[1]);
    const float unit = used ? __uint_as_float(words[0]) : 0.0f, x_sum = used ? __uint_as_float(words[1]) : 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t from = scales + r * Ring::kTileScales;
      // Why 0: what lies there was never written.
      const float2 pair = unpack_pair(used ? ptx::load_shared(from) : 0, bf16_scales);
      const float2 stored =
          kZeros && used ? unpack_pair(ptx::load_shared(from + kRows * Ring::kTileScales), bf16_scales) : float2{};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        constexpr float kOne[2] = {static_cast<float>(1 << Parts::bit(0, 0)),
                                   static_cast<float>(1 << Parts::bit(0, 1))};
        const float scale = h ? pair.y : pair.x, own_zero = h ? stored.y : stored.x;
        // Why both factors, of which one is 0: a choice would take twice the instructions.
        const float zero = kZeros ? fmaf(own_zero, p.zero_on_code, zero_base) : zero_base;
        const auto value_of = [&](int part) {
          int digits[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            digits[i] = sums[r][set][part][2 * h + i];
            if (kLifted) digits[i] += static_cast<int>(Parts::factor(1, h)) * sums[r][set][1][2 * h + i];
          }
          return static_cast<float>(digits[0] + 256 * digits[1]);
        };
        float value = value_of(0);
#pragma unroll
        for (int part = 1; part < (kLifted ? 1 : Parts::kCount); ++part)
          value = fmaf(value_of(part), Parts::factor(part, h), value);
        value = fmaf(-zero * kOne[h], x_sum, value);
        total[r][h] = fmaf(scale * unit, value, total[r][h]);
        if (kZeros) total[r][h] = fmaf(own_zero * (p.zero_on_value * kOne[h]) * unit, x_sum, total[r][h]);
      }
    }
  }

  // ---- a slice of kRows row tiles ----------------------------------------------------------------------------------
  struct Place {
    uint32_t stage, slot;  // in the ring: the stage that was read last; of its scales, counted in bytes
  };
  static __device__ __forceinline__ Place start(uint32_t ring) {
    return {ring + (Ring::kDepth - 1) * Ring::kStageBytes, (Ring::kSlots - 1) * Ring::kSlotBytes};
  }

  __device__ __forceinline__ void next_stage(Place& place, Feed& feed) const {
    place.stage += Ring::kStageBytes;
    if (place.stage == feed.ring + Ring::kDepth * Ring::kStageBytes) place.stage = feed.ring;
    place.slot = Ring::wrapped(place.slot + Ring::kSlotBytes);
    ptx::wait_groups<Ring::kDepth - 2>();
    __syncwarp();  // what other lanes fetched has come, and every lane is done with the stage before
    feed.fetch();
  }

  // place: the stage before the first.
  __device__ __forceinline__ void run_tile(Place& place, Feed& feed) {
    const int steps = at.end_step - at.first_step, reads = read_phase(), scales = scale_phase();
    uint32_t entry = this->entry, row = this->row;
#pragma unroll
    for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = 0.0f;
    table.load(zeros + Map<Ring, Tile>::kTable);

#pragma unroll 1
    for (int turn = 0; turn < steps; turn += kTurn) {
      const uint32_t first_slot = Ring::wrapped(place.slot + Ring::kSlotBytes);
      uint32_t own = turn + reads < steps ? row : zeros;  // where there are phases
#pragma unroll
      for (int i = 0; i < kTurn; ++i) {
        // Steps past the slice multiply whatever the stage holds by x = 0.
        if (i % Ring::kSteps == 0 && (i == 0 || turn + i < steps)) next_stage(place, feed);
        // Why two ways: one for both compiles to more instructions, with 4 tokens up to 9% of the kernel.
        uint32_t from;
        if (kPhases > 1) {
          from = reads == i % kPhases ? own : zeros;
        } else {
          from = i == 0 || turn + i < steps ? row : zeros;
          row += tokens() * kRowBytes;
        }
        run_step(place.stage, i % Ring::kSteps, from);
        if (i % kPhases != kPhases - 1) continue;
        const int last = i + 1 - kPhases;
        const bool used = (kPhases == 1 && i == 0) || turn + last + scales < steps;
        // Steps of one turn lie in stages one after the other.
        const uint32_t in_stage = (last + scales) % Ring::kSteps * (32 * kUnits) + (kFine ? scale_at : at.lane / 4 * 4);
        const uint32_t slot = Ring::wrapped(first_slot + (last + scales) / Ring::kSteps * Ring::kSlotBytes);
        finish(feed.ring + Ring::kDepth * Ring::kStageBytes + slot + in_stage, entry, used);
        entry += kPhases * kTokens * kTableBytes;
        if (kPhases > 1) {
          row += kPhases * tokens() * kRowBytes;
          own = turn + last + kPhases + reads < steps ? row : zeros;
        }
      }
    }
  }

  // ---- sums that meet ----------------------------------------------------------------------------------------------
  // Calls store(item, floats) for what this lane found of row tile r.
  template <class Store>
  __device__ __forceinline__ void hand_in(int r, Store store) {
    if constexpr (kTokens == 4) {
      store(at.lane, total[r]);
    } else {
      float both[2] = {total[r][0], total[r][1]};
#pragma unroll
      for (int lanes = kTokens; lanes < 4; lanes *= 2)  // phases
#pragma unroll
        for (int h = 0; h < 2; ++h) both[h] += __shfl_xor_sync(~0u, both[h], lanes);
      if (at.lane % 4 < kTokens) store(at.lane / 4 * kTokens + at.lane % 4, both);
    }
  }

  // Which row of 16 and which token the float i of an item is.
  struct Spot {
    int row, token;
  };
  static __device__ __forceinline__ Spot spot(int item, int i) { return {item / kTokens + 8 * i, item % kTokens}; }
  // What a sum of a row is to be multiplied by, but for the step between codes.
  static __device__ __forceinline__ float unit(int row) {
    constexpr float kUnit[2] = {1.0f / (1 << Parts::bit(0, 0)), 1.0f / (1 << Parts::bit(0, 1))};
    return row < 8 ? kUnit[0] : kUnit[1];  // Why not by arithmetic: a division takes some 20 instructions
  }
};

}  // namespace lowbit::decode
