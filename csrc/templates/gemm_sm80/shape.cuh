// How family gemm_sm80 cuts its work, and where things lie in shared memory. The picture is in gemm_sm80.cuh.
#pragma once
#include <cstdint>

#include "../../args.h"
#include "../deal.cuh"
#include "../layout.cuh"

namespace lowbit::gemm_sm80 {

using layout::kStepK;  // 128 k: whole tiles of every plane

// Shared memory of a block, where a multiprocessor has 164 KB and more, and where it has 100 KB, of which the system
// takes 1 KB. Why all of it, needed or not: two blocks must not meet on a multiprocessor.
constexpr int kSharedLarge = 160 * 1024, kSharedSmall = 98 * 1024;

// Compute capabilities 8.0, 8.7 and 9.0 to 11.x; the others are 8.6, 8.9 and 12.x.
constexpr bool is_large(int capability) {
  return capability == 80 || capability == 87 || (capability >= 90 && capability < 120);
}

// Of a block: row tiles of 16 rows, and pairs of them.
constexpr int kPairs = 8, kRowTiles = 2 * kPairs;

// Tokens: columns of a tile. A warp multiplies two row tiles by all of them, so that one load of x from shared memory
// serves both. Up to 64 tokens two warps share a pair of row tiles, each has 64 k of a stage: 16 warps of 128
// registers. With 128 tokens there are 8 warps of 255 registers, for sums alone 128.
template <int Tokens>
struct Tile {
  static constexpr int kTokens = Tokens, kColumns = Tokens / 8;
  static constexpr int kPairs = gemm_sm80::kPairs, kWarpTiles = 2;
  static constexpr int kWarpsOfK = Tokens <= 32 ? 2 : 1;
  static constexpr int kWarps = kPairs * kWarpsOfK, kThreads = 32 * kWarps;
  static constexpr int kRowTiles = gemm_sm80::kRowTiles;
  static constexpr int kCluster = 1;  // blocks of a task
  // Sums leave no registers for what could be kept from stage to stage.
  static constexpr bool kTight = Tokens >= 64;
};

// What a block holds of W and x for 128 k of a task: a stage.
//
//   x      [64 k][token][128 bytes], 16 bytes at place c of a token lie at c ^ token % 8: no two of the eight rows that
//          ldmatrix reads at once share a bank
//   codes  plane by plane, [row tile][tile of the plane]; scales [row tile][group][32 bytes], then zeros alike
template <class Weight, class Tile, bool Fine, bool Zeros>
struct Stage {
  static constexpr int kBits = Weight::kBits;
  static constexpr bool kFine = Fine, kZeros = Zeros, kFloatScales = false;
  static constexpr int kXBox = Tile::kTokens * 128;  // bytes of 64 k
  static constexpr int kX = 2 * kXBox;
  static constexpr int kCodes = Tile::kRowTiles * 256 * kBits;
  static constexpr int kScales = Tile::kRowTiles * 32 * (Fine ? 8 : 1);  // room for them
  static constexpr int kBytes = kX + kCodes + kScales * (Zeros ? 2 : 1);
  static_assert(kBytes % 128 == 0);  // swizzles repeat
  // Stages in the ring of a device of either kind; fewer than 2: the tile is not for it. Why no more than 5: enough
  // bytes are under way then.
  static constexpr int kLarge = kSharedLarge / kBytes > 5 ? 5 : kSharedLarge / kBytes;
  static constexpr int kSmall = kSharedSmall / kBytes > 5 ? 5 : kSharedSmall / kBytes;
  static_assert(kLarge >= 2);
  // Stages of weights asked for before the kernel before has ended. Why not all: x would stand in line behind them.
  static constexpr int kEarly = kBits <= 2 ? 1 : kBits <= 4 ? 2 : 3;
};

// Everything a kernel is told; sizes are those of the unpadded problem.
struct Problem {
  const uint8_t *codes, *scales, *zeros;
  const uint8_t* x;
  int64_t plane_bytes;  // of one bit of every code
  uint32_t x_pieces;    // 16 bytes each, from a token to the next
  int n, m, k;
  int tiles, groups;  // row tiles of W; groups of a row
  int row_blocks;
  int token_tiles;      // tiles of tokens; a row block and a tile of tokens make a task
  int tile_tokens;      // of each, a multiple of 8
  Deal deal;            // of tasks to workers, blocks; stages: of all of K
  bool large;           // which ring
  int group_steps;      // stage >> group_steps is a group, of at least 128
  int group_fragments;  // fragment >> group_fragments is a group
  int stage_groups;     // groups in a stage, a power of two
  float* parts;         // sums of parts of tasks: [worker][first, last][row tile][column][lane][4]
  void* y;
  const void* bias;
  const float* row_scales;
  int64_t y_stride;       // elements
  float step, zero_base;  // value = step * (code - zero_base)
  float factor[2];        // of a finished sum, by row half: 1
  bool bf16_scales;
  ZeroKind zero_kind;
  FloatType bias_type;
};

}  // namespace lowbit::gemm_sm80
