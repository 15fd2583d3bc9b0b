// How family gemm_sm80 cuts its work, and where things lie in shared memory. The picture is in gemm_sm80.cuh.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../args.h"
#include "../deal.cuh"
#include "../layout.cuh"
#include "../narrow/ring.cuh"

namespace lowbit::gemm_sm80 {

using layout::kStepK;  // 128 k: whole tiles of every plane

// Shared memory of a block, where a multiprocessor has 164 KB and more, and where it has 100 KB, of which the system
// takes 1 KB. Why all of it, needed or not: two blocks must not meet on a multiprocessor.
constexpr int kSharedLarge = 160 * 1024, kSharedSmall = 98 * 1024;

// Compute capabilities 8.0, 8.7 and 9.0 to 11.x; the others are 8.6, 8.9 and 12.x.
constexpr bool is_large(int capability) {
  return capability == 80 || capability == 87 || (capability >= 90 && capability < 120);
}

constexpr int kRowTiles = 16;  // of a block: 16 rows each

// Tokens: columns of a tile. Up to 32 a warp multiplies one row tile, and four more warps bring stages and add up x
// (narrow.cuh). With more, each of 8 warps multiplies two, so that one load of x from shared memory serves both, and
// all of them bring stages; with 128 tokens they have 255 registers, for sums alone 128.
template <int Tokens, bool Narrow = (Tokens <= 32)>
struct Tile {
  static constexpr int kTokens = Tokens, kColumns = Tokens / 8;
  static constexpr bool kNarrow = Narrow;
  static constexpr int kRowTiles = gemm_sm80::kRowTiles, kWarpTiles = kNarrow ? 1 : 2;
  static constexpr int kWarps = kRowTiles / kWarpTiles;  // that multiply
  static constexpr int kThreads = 32 * kWarps + (kNarrow ? 128 : 0);
  static constexpr int kFirstCopier = kNarrow ? 32 * kWarps : 0;  // threads from this one on copy stages
  static constexpr int kCopiers = kThreads - kFirstCopier;
  static constexpr int kCluster = 1;  // blocks of a task
};

// The tile that a form of weights has. Why not narrow with 32 tokens and fine groups: registers run out.
template <class Wanted, class Form>
using TileFor = std::conditional_t<Wanted::kTokens == 32 && Form::kFine, Tile<32, false>, Wanted>;

// What a block holds of W and x at once: a stage of some steps of 128 k.
//
//   x      [64 k][token][128 bytes], 16 bytes at place c of a token lie at c ^ token % 8: no two of the eight rows that
//          ldmatrix reads at once share a bank
//   codes  plane by plane, [row tile][step][tile of the plane]; scales [row tile][group][32 bytes], then zeros alike
template <class Weight, class Tile, class Form>
struct Stage {
  static constexpr int kBits = Weight::kBits;
  static constexpr bool kFine = Form::kFine, kZeros = Form::kZeros, kFloatScales = false, kOneRow = false;
  static constexpr bool kWhole = Form::kWhole;
  static constexpr int kXBox = Tile::kTokens * 128;                           // bytes of 64 k
  static constexpr int kStepCodes = Tile::kRowTiles * 256 * kBits;            // and of 128 k
  static constexpr int kStepScales = Tile::kRowTiles * 32 * (kFine ? 8 : 1);  // room for them
  static constexpr int kMost = Tile::kNarrow ? 8 : 5;  // stages in a ring. Why no more: enough bytes are under way then
  static constexpr int kStepSums =
      kZeros && !kWhole ? Tile::kTokens * 4 * (kFine ? 8 : 1) : 0;  // of x: narrow/x_sums.cuh
  static constexpr int kStepBytes = 2 * kXBox + kStepCodes + kStepScales * (kZeros ? 2 : 1);
  // What warps make of scales and zeros (narrow/groups.cuh): of fine groups, and not for 16 tokens, whose workers have
  // no register left.
  static constexpr int kGroups =
      Tile::kNarrow && kFine && Tile::kTokens < 16 ? Tile::kRowTiles * 32 * (kZeros ? 16 : 8) : 0;
  // Why two where they fit: a third of a narrow worker's instructions are those of a stage.
  static constexpr int kTwo = 2 * (2 * kStepBytes) + kMost * (3 * 8 + 2 * kStepSums) + kGroups + 128;
  static constexpr bool kScarce =  // registers: it would spill
      Tile::kTokens == 16 ? (kFine ? kBits <= 3 : kBits == 3) : kFine && kWhole && kBits == 3;
  static constexpr int kSteps = Tile::kTokens <= 16 && kTwo <= kSharedSmall && !kScarce ? 2 : 1;
  static constexpr int kX = 2 * kXBox * kSteps, kXAt = 0, kCodesAt = kX, kCodes = kStepCodes * kSteps,
                       kScales = kStepScales * kSteps;
  static constexpr int kBytes = kStepBytes * kSteps, kSums = kStepSums * kSteps;
  static_assert(kBytes % 128 == 0);  // swizzles repeat
  // Wide tiles: behind each stage the barriers of its place, copies that have come and warps that have read.
  static constexpr int kFull = kBytes, kEmpty = kBytes + 8, kPlace = Tile::kNarrow ? kBytes : kBytes + 128;
  static constexpr int kHead =
      Tile::kNarrow ? (kMost * (3 * 8 + kSums) + kGroups + 127) / 128 * 128 : 0;  // bytes before stages
  // Stages in the ring of a device of either kind; fewer than 2: the tile is not for it.
  static constexpr int fit(int shared) {
    const int stages = (shared - kHead) / kPlace;
    return stages > kMost ? kMost : stages;
  }
  static constexpr int kLarge = fit(kSharedLarge), kSmall = fit(kSharedSmall);
  static_assert(kLarge >= 2);
  // Stages of weights asked for before the kernel before has ended. Why not all: x would stand in line behind them.
  static constexpr int kEarly = kSteps == 2 || kBits <= 2 ? 1 : kBits <= 4 ? 2 : 3;
};

// The ring of narrow tiles, as narrow/worker.cuh wants it: barriers, sums of x, stages.
template <class Stage>
struct Ring {
  static constexpr bool kApart = true, kSplits = false, kOneTask = false;
  static constexpr bool kByEngine = false;  // cp.async is ordered by the barriers
  static constexpr bool kSumsLast = true;   // sums of x follow from all of a stage: who has seen them has seen that

  const uint32_t base;
  const int depth;  // stages

  __device__ __forceinline__ narrow::Place first() const { return narrow::Place(depth); }
  __device__ __forceinline__ uint32_t full(uint32_t place) const { return base + 8 * place; }
  __device__ __forceinline__ uint32_t summed(uint32_t place) const { return full(Stage::kMost + place); }
  __device__ __forceinline__ uint32_t empty(uint32_t place) const { return full(2 * Stage::kMost + place); }
  __device__ __forceinline__ uint32_t sums(uint32_t place) const {
    return full(3 * Stage::kMost) + place * Stage::kSums;
  }
  __device__ __forceinline__ uint32_t groups() const { return base + Stage::kHead - Stage::kGroups; }
  __device__ __forceinline__ uint32_t stage(uint32_t place) const {
    return base + Stage::kHead + place * Stage::kBytes;
  }
};

// Everything a kernel is told; sizes are those of the unpadded problem.
struct Problem {
  const uint8_t* planes[3];  // of codes, widest first
  const uint8_t *scales, *zeros;
  const uint8_t* x;
  uint32_t x_pieces;  // 16 bytes each, from a token to the next
  int n, m, k;
  int tiles, groups;    // row tiles of W; groups of a row
  int steps;            // of 128 k
  Patches patches;      // a row block and a tile of tokens make a task
  int tile_tokens;      // of each, a multiple of 8
  Deal deal;            // of tasks to workers, blocks; stages: of all of K
  bool large;           // which ring
  int group_steps;      // step >> group_steps is a group, of at least 128
  int group_fragments;  // fragment >> group_fragments is a group
  int stage_groups;     // groups in a stage, a power of two
  float* parts;         // sums of parts of tasks: [worker][first, last][row tile][column][lane][4]
  void* y;
  const void* bias;
  const float* row_scales;
  int64_t y_stride;       // elements
  float step, zero_base;  // value = step * (code - zero_base)
  // Of a stored zero: what it takes from codes, what it adds to scaled values; one of them is 0.
  float zero_on_code, zero_on_value;
  float factor[2];  // of a finished sum, by row half
  bool bf16_scales;
  ZeroKind zero_kind;
  FloatType bias_type;
};

}  // namespace lowbit::gemm_sm80
