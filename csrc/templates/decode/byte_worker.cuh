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
#include "fold.cuh"
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
  static constexpr int kBits = Weight::kBits, kTokens = Tile::kTokens, kRows = Ring::kRows;
  static constexpr int kPhases = kFine ? 1 : 4 / kTokens;                        // steps in a product
  static constexpr int kTurn = kPhases > Ring::kSteps ? kPhases : Ring::kSteps;  // steps in which stages and these meet
  static constexpr bool kManyStages = kPhases > Ring::kSteps;                    // that a product takes
  static_assert(kUnits <= kMostUnits<Weight, Tile>);
  static constexpr bool kLookedUp = bytes::kLookedUp<Weight>;
  // How far apart the fragments of an operand are. Why not lifted: registers of 1 bit with two tokens, and of 6 with
  // fine groups; 5 bits have one field in five that would gain.
  static constexpr int kApart = kBits == 1   ? (kTokens == 2 ? 1 : 4)
                                : kBits <= 3 ? 2
                                : kBits == 6 ? (kFine ? 1 : 2)
                                : kBits == 7 ? 4
                                             : 1;
  using Order = bytes::Order<kApart>;
  using X = Digits<Act, Tile, Order, kUnits>;
  using Table = bytes::Table<Weight>;
  using Parts = std::conditional_t<kLookedUp, bytes::LookedUpParts, bytes::Parts<kBits, kApart>>;
  // Whether the stage after those under way is asked for before the codes of this one. Why not always: it takes as long
  // as these need to come. Why there: they have few stages, and more bytes to wait for.
  static constexpr bool kFetchFirst = kTokens == 4 && kBits > 3;
  // Whether it keeps what the problem says of scales. Why not there: registers run out.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr bool kHolds = kBits > 1 || kTokens < 4;
#else
  static constexpr bool kHolds = kBits > 1 || kTokens == 1 || !kZeros;
#endif

  // What it hands in: items of kFloats, kItems a tile, of which lanes keep floats where there are phases.
  static constexpr int kFloats = 2, kItems = 8 * kTokens;
  using Fold = decode::Fold<kTokens, kRows>;
  static constexpr bool kFolds = Fold::kAny;
  static constexpr int kTableBytes = 8 * kUnits;  // of a token at one step
  // What a code counts for in the sums of rows g and g + 8.
  static __host__ __device__ constexpr float one(int h) {
    return static_cast<float>(1 << Parts::bit(Parts::kWidest, 0, h));
  }

  const Position& at;
  const Problem& p;
  uint32_t zeros;       // in shared memory: bytes of 0
  uint32_t row, entry;  // where this lane's digits of a slice begin, and its exponents and sums
  uint32_t row_step;    // how far the digits of the next step are
  uint32_t scale_at;    // in a stage: its word of scales, of the first product and set
  int steps;            // of the slice
  float zero_base[2];   // without stored zeros what it takes from sums of x, of rows g and g + 8
  int bf16_scales;
  Table table;
  int sums[kRows][kSets][Parts::kCount][4];
  float total[kRows][2];

  __device__ ByteWorker(const Position& position, uint32_t zeros_at, uint32_t x_at, uint32_t table_at)
      : at(position), p(position.p), zeros(zeros_at) {
    const int begin = at.first_step - at.block_step(at.rank), column = at.lane / 4, t = at.lane % 4;
    const int unit = kFine ? t : scale_phase() % Ring::kSteps, shift = kFine ? p.group_shift - Form::kUnitShift : 0;
    entry = table_at + ((begin + scale_phase()) * kTokens + t % kTokens) * kTableBytes + (kFine ? unit * 8 : 0);
    scale_at = Ring::kScales + (unit >> shift << shift) * 32 + at.lane / 4 * 4;
    // Why min: tokens that don't exist read the last one; their sums are never stored.
    const int token = min(column / 2 % kTokens, tokens() - 1);
    row = x_at + ((begin + read_phase()) * tokens() + token) * kRowBytes + column % 2 * 64 + t * 16;
    row_step = tokens() * kRowBytes;
    steps = at.end_step - at.first_step;
    for (int h = 0; h < 2; ++h) zero_base[h] = kZeros ? p.zero_base : -p.zero_base * one(h);
    bf16_scales = p.bf16_scales;
    ptx::hold(zeros), ptx::hold(scale_at);
    ptx::hold(row), ptx::hold(entry);
    ptx::hold(steps);
    if (kHolds) {
      const int zero = ptx::always_zero();
      ptx::hold_common(zero_base[0], zero), ptx::hold_common(bf16_scales, zero);
      if (!kZeros) ptx::hold_common(zero_base[1], zero);
    }
    clear_sums(), clear_total();
  }

  __device__ __forceinline__ void clear_total() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = 0.0f;
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
  // Multiplies planes of up to `Width` bits.
  template <int Width>
  __device__ __forceinline__ void multiply_planes(const planes::Words<kBits> (&words)[kRows],
                                                  const uint32_t (&digits)[8]) {
    if constexpr (Width > 0) {
      if constexpr ((kBits & Width) != 0) {
        constexpr int kFrom = 2 * layout::plane_low(kBits, Width), kFirst = Parts::first(Width);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            uint32_t a[4];
            if constexpr (kLookedUp) {
              table.fragments(words[r].word, i, a);
            } else {
              bytes::fragments<Width, kApart>(words[r].word + kFrom, i, a);
            }
            ptx::mma_bytes(sums[r][i * kSets / 4][kFirst + Parts::sum(Width, i)], a, digits[2 * i], digits[2 * i + 1]);
          }
      }
      multiply_planes<Width / 2>(words, digits);
    }
  }

  // The same of codes of 3 bits, which are put together.
  __device__ __forceinline__ void multiply_merged(const planes::Words<3> (&words)[kRows], const uint32_t (&digits)[8]) {
    uint32_t a[kRows][2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if constexpr (!kLookedUp) {
          bytes::fragments(words[r], i, a[r][i % 2]);
        } else if (i % 2 == 0) {
          table.fragments(words[r], i / 2, a[r][0], a[r][1]);
        }
        ptx::mma_bytes(sums[r][0][Parts::sum(2, i)], a[r][i % 2], digits[2 * i], digits[2 * i + 1]);
      }
  }

  // row: where this lane's digits are; meanwhile: what to do while they come.
  template <class Run>
  __device__ __forceinline__ void run_step(uint32_t stage, int in_stage, uint32_t row, Run meanwhile) {
    uint32_t digits[8];
    X::load(row, zeros, at.lane, digits);
    planes::Words<kBits> words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_words<Ring::kSteps>(stage + r * Ring::kTileBytes, in_stage, at.lane, words[r]);
    meanwhile();
    if constexpr (kBits == 3) {
      multiply_merged(words, digits);
    } else {
      multiply_planes<8>(words, digits);
    }
  }

  // ---- scales ------------------------------------------------------------------------------------------------------
  // This lane's words of a step: of each row tile.
  struct Scales {
    uint32_t scale[kRows] = {}, zero[kRows] = {};

    __device__ __forceinline__ void load(uint32_t from) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        scale[r] = ptx::load_shared(from + r * Ring::kTileScales);
        if (kZeros) zero[r] = ptx::load_shared(from + (kRows + r) * Ring::kTileScales);
      }
    }
  };

  // total += scale * sums, of one set. Scales: 0 where the step that this lane sums is none of the slice; entry: its
  // place in the table.
  __device__ __forceinline__ void finish(int set, const Scales& scales, uint32_t entry) {
    uint32_t words[2];
    ptx::load_shared(entry, words[0], words[1]);
    const float unit = __uint_as_float(words[0]), x_sum = __uint_as_float(words[1]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float2 pair = unpack_pair(scales.scale[r], bf16_scales);
      const float2 stored = kZeros ? unpack_pair(scales.zero[r], bf16_scales) : float2{};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float scale = h ? pair.y : pair.x, own_zero = h ? stored.y : stored.x;
        // Why both factors, of which one is 0: a choice would take twice the instructions.
        const float zero = kZeros ? -one(h) * fmaf(own_zero, p.zero_on_code, zero_base[0]) : zero_base[h];
        const float value = fmaf(zero, x_sum, bytes::sum_of_planes<Parts>(sums[r][set], h));
        total[r][h] = fmaf(scale * unit, value, total[r][h]);
        if (kZeros) total[r][h] = fmaf(own_zero * (p.zero_on_value * one(h)) * unit, x_sum, total[r][h]);
      }
    }
  }

  // ---- a slice of kRows row tiles ----------------------------------------------------------------------------------
  static __device__ __forceinline__ uint32_t start(uint32_t ring) {
    return ring + (Ring::kDepth - 1) * Ring::kStageBytes;  // the stage before the first
  }

  // stage: that was read last, the one that is free now.
  __device__ __forceinline__ void next_stage(uint32_t& stage, Feed& feed) const {
    feed.to = stage;
    stage += Ring::kStageBytes;
    if (stage == feed.ring + Ring::kDepth * Ring::kStageBytes) stage = feed.ring;
    ptx::wait_groups<Ring::kDepth - 2>();
    __syncwarp();  // what other lanes fetched has come, and every lane is done with the stage before
  }

  __device__ __forceinline__ void run_tile(uint32_t& stage, Feed& feed) {
    const int reads = read_phase(), sums_of = scale_phase();
    uint32_t entry = this->entry, row = this->row;
    clear_total();
    table.load(zeros + Map<Ring, Tile>::kTable);

    int turn = 0;
#pragma unroll 1
    do {
      Scales scales;
      uint32_t own = turn + reads < steps ? row : zeros;  // where there are phases
#pragma unroll
      for (int i = 0; i < kTurn; ++i) {
        const int phase = i % kPhases, first = i - phase;  // first: of the product
        // Steps past the slice multiply whatever the stage holds by x = 0.
        const bool begins = i % Ring::kSteps == 0 && (i == 0 || turn + i < steps);  // a stage
        if (begins) next_stage(stage, feed);
        if (begins && kFetchFirst) feed.fetch();
        const bool used = (kPhases == 1 && i == 0) || turn + first + sums_of < steps;
        // Why here: the stage may be gone when the product is done.
        if (kManyStages && phase % Ring::kSteps == 0 && sums_of / Ring::kSteps == phase / Ring::kSteps && used)
          scales.load(stage + scale_at);
        // Why two ways: one for both compiles to more instructions, with 4 tokens up to 9% of the kernel.
        uint32_t from;
        if (kPhases > 1) {
          from = reads == phase ? own : zeros;
        } else {
          from = i == 0 || turn + i < steps ? row : zeros;
          row += row_step;
        }
        run_step(stage, i % Ring::kSteps, from, [&] {
          if (begins && !kFetchFirst) feed.fetch();
        });
        if (phase != kPhases - 1) continue;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          if (!kManyStages) {
            scales = Scales{};
            if (used) scales.load(stage + scale_at + first % Ring::kSteps * (32 * kUnits) + set * (4 * 32));
          }
          finish(set, scales, (used ? entry : zeros) + set * (4 * 8));
        }
        clear_sums();
        entry += kPhases * kTokens * kTableBytes;
        if (kPhases > 1) {
          row += kPhases * row_step;
          own = turn + i + 1 + reads < steps ? row : zeros;
        }
      }
      turn += kTurn;
    } while (turn < steps);
  }

  // ---- sums that meet ----------------------------------------------------------------------------------------------
  // Calls store(tile, float number, floats) for what this lane hands in.
  template <class Store>
  __device__ __forceinline__ void hand_in(Store store) const {
    if constexpr (!Fold::kAny) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) store(r, at.lane * kFloats, total[r]);
    } else {
      float values[2 * kRows];
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) values[i] = total[i / 2][i % 2];
      Fold::add_up(at.lane, values);
      const auto own = Fold::kept(at.lane);
      if (Fold::is_first(at.lane))
        store(own.tile, own.float_number, reinterpret_cast<const float (&)[Fold::kKept]>(values));
    }
  }

  // Which row of 16 and which token the float i of an item is.
  struct Spot {
    int row, token;
  };
  static __device__ __forceinline__ Spot spot(int item, int i) { return {item / kTokens + 8 * i, item % kTokens}; }
  // What a sum of a row is to be multiplied by, but for the step between codes.
  static __device__ __forceinline__ float unit(int row) {
    constexpr float kUnit[2] = {1.0f / (1 << Parts::bit(Parts::kWidest, 0, 0)),
                                1.0f / (1 << Parts::bit(Parts::kWidest, 0, 1))};
    return row < 8 ? kUnit[0] : kUnit[1];  // Why not by arithmetic: a division takes some 20 instructions
  }
};

}  // namespace lowbit::decode
