// How family decode spreads its work, and where things lie in shared memory. The picture is in decode.cuh.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../../args.h"
#include "../layout.cuh"

namespace lowbit::decode {

using layout::kStepK;  // 128 k: whole tiles of every plane

// Tokens: 1, 2, 4, 8 or 16, the most a kernel takes.
template <int Tokens, int Warps = 8>
struct Tile {
  static constexpr int kTokens = Tokens;
  static constexpr int kColumns = (Tokens + 7) / 8;            // tiles of 8 tokens
  static constexpr int kPhases = Tokens < 8 ? 8 / Tokens : 1;  // steps side by side in the columns
  static constexpr int kWarps = Warps, kThreads = 32 * kWarps;
  // Why: two launches must fit on a multiprocessor, or the next one can't start early.
  static constexpr int kSharedBytes = 112 * 1024;
  static constexpr int kRingBytes = (Tokens <= 2 ? 76 : 60) * 1024 / kWarps;  // of a warp; x takes most of the rest
  // Why this much: the weights of 25 MB that all multiprocessors then ask for stay in L2 until they are read.
#ifndef LOWBIT_PREFETCH_KB
#define LOWBIT_PREFETCH_KB 0
#endif
  static constexpr int kPrefetchBytes = LOWBIT_PREFETCH_KB * 1024 / kWarps;
};

// K or tiles cut into parts that differ by one at most: part i starts at i * each + min(i, more).
struct Cut {
  int each, more;
  __device__ __forceinline__ int operator()(int i) const { return i * each + min(i, more); }
};

// Everything a kernel is told; sizes are those of the unpadded problem unless they say otherwise.
struct Problem {
  const uint8_t *codes, *scales, *zeros;
  const uint8_t* x;
  void* y;
  const void* bias;
  int64_t x_stride, y_stride;  // elements
  int64_t plane_stride;        // bytes of one bit of every code: padded rows * padded k / 8
  int n, k, m, columns;        // columns: padded k
  int tiles, steps, groups;    // row tiles; steps of 128 k; groups of a row
  int group_shift;             // k >> group_shift is a group; 31: one group
  int group_steps;             // of groups of at least 128: step >> group_steps is one
  int cluster_shift;           // log2 of the blocks of a cluster
  int warps_k_shift;           // log2 of the warps of a block that split K
  Cut slices, row_groups;      // of steps, of tiles
  int grid;                    // blocks
  int most_tiles;              // of a row group
  int pass_tiles;              // tiles of a row group whose sums meet at once
  int x_bytes, table_bytes;    // of a block's x; of what is known of each of its tokens and steps
  int meeting_bytes;           // of a pass
  float step, zero_base;       // value = step * (code - zero_base)
  float zero_factor;           // 1 / step
  bool bf16_scales;
  ZeroKind zero_kind;
  FloatType bias_type;
};

constexpr int kRowBytes = 256 + 16;  // of a token at one step; 16 more, so that 8 rows of ldmatrix meet no bank twice

// What goes into a ring: stages of kSteps steps of a row tile (tiles of every plane), and scales, then zeros, of
// chunks.
template <class Weight, class Tile, bool Fine, bool Zeros>
struct Ring {
  static constexpr int kBits = Weight::kBits;
  // Row tiles side by side: they share x. Why not always 2: registers, and bytes that are waited for at once.
  static constexpr int kRows = !Fine && kBits <= 4 && Tile::kTokens < 16 ? 2 : 1;
  static constexpr int kSteps = Fine ? 1 : (kBits == 1 ? 8 : kBits == 2 ? 4 : kBits <= 4 ? 2 : 1) / kRows;
  static_assert(kSteps <= 8);
  static constexpr int kChunk = Fine ? 2 : 8;  // steps whose scales come together, with the first stage
  static constexpr int kTileBytes = 2 * kStepK * kBits * kSteps;  // of one row tile in a stage
  static constexpr int kStageBytes = kTileBytes * kRows;
  static constexpr int kGroupBytes = 32 * kChunk * (Fine ? 8 : 1);
  static constexpr int kTileScaleBytes = kGroupBytes * (Zeros ? 2 : 1);
  static constexpr int kScaleBytes = kTileScaleBytes * kRows;
  static constexpr int kFit = Tile::kRingBytes / (kStageBytes + kScaleBytes);
  static constexpr int kDepth = kFit < 2 ? 2 : kFit > 8 ? 8 : kFit;  // stages
  // Why as many: a chunk may be one stage.
  static constexpr int kScaleSlots = kDepth;
  static constexpr int kBytes = kDepth * kStageBytes + kScaleSlots * kScaleBytes;
};

// Where things lie in shared memory.
template <class Ring, class Tile>
struct Map {
  static constexpr int kZeros = 0;    // 256 bytes of 0, which columns without x read
  static constexpr int kMet = 256;    // two barriers: the sums of an even, of an odd pass have come
  static constexpr int kRings = 384;  // Why not 272: loads of a warp would touch five lines of 128 bytes, not four
  static constexpr int kX = kRings + Tile::kWarps * Ring::kBytes;  // then its table, then sums that meet
};

// Where a warp stands: its slice of K, and the tiles of its row group.
struct Position {
  const Problem& p;
  const int lane, warp, rank;  // rank: of the block in its cluster
  int slice, first_row_group;  // first_row_group: of the block
  int first_step, end_step, first_tile, end_tile;

  __device__ Position(const Problem& problem, int warps)
      : p(problem),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        rank(blockIdx.x & ((1 << p.cluster_shift) - 1)),
        slice((rank << p.warps_k_shift) + (warp & ((1 << p.warps_k_shift) - 1))),
        first_row_group((blockIdx.x >> p.cluster_shift) * (warps >> p.warps_k_shift)) {
    const int row_group = first_row_group + (warp >> p.warps_k_shift);
    first_step = p.slices(slice), end_step = p.slices(slice + 1);
    first_tile = p.row_groups(row_group), end_tile = p.row_groups(row_group + 1);
  }

  // The first step of the block of a rank.
  __device__ __forceinline__ int block_step(int rank) const { return p.slices(rank << p.warps_k_shift); }
};

// Scales or zeros of rows g and g + 8 as floats, from their word.
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, bool bf16) {
  const float2 half = __half22float2(reinterpret_cast<const __half2&>(pair));
  return {bf16 ? __uint_as_float(pair << 16) : half.x, bf16 ? __uint_as_float(pair & 0xFFFF0000u) : half.y};
}

}  // namespace lowbit::decode
