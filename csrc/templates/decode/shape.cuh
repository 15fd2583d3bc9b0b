// How family decode spreads its work, and where things lie in shared memory. The picture is in decode.cuh.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../../args.h"
#include "../layout.cuh"

namespace lowbit::decode {

using layout::kStepK;  // 128 k: whole tiles of every plane

// Shared memory of a block. Two: so that two launches fit on a multiprocessor, and the next one can start early. Alone:
// for kernels of which two blocks must not meet on a multiprocessor, but a block of another one. Whole: for kernels
// that nothing fits beside.
constexpr int kSharedTwo = 112 * 1024;
constexpr int kSharedAlone = 204 * 1024;
constexpr int kSharedWhole = 227 * 1024;

// How x comes to a block: it stays in shared memory, of which the block takes half or all (resident.cuh), or it passes
// by in phases (phases.cuh).
enum class Kind { kHalf, kWhole, kPhases };

// Tokens: 1, 2, 4, 8 or 16, the most a kernel takes.
template <int Tokens, Kind Way = (Tokens >= 8 ? Kind::kPhases : Kind::kHalf)>
struct Tile {
  static constexpr Kind kKind = Way;
  static constexpr bool kMany = kKind == Kind::kPhases;
  static constexpr int kTokens = Tokens;
  static constexpr int kColumns = (Tokens + 7) / 8;            // tiles of 8 tokens
  static constexpr int kPhases = Tokens < 8 ? 8 / Tokens : 1;  // steps side by side in the columns
  // Why not 16 warps in half a multiprocessor: 64 registers a thread are too few.
  static constexpr int kWarps = kKind == Kind::kHalf ? 8 : 16, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kKind == Kind::kHalf ? 2 : 1;  // that fit on a multiprocessor
  static constexpr int kSharedBytes = kKind == Kind::kHalf    ? kSharedTwo
                                      : kKind == Kind::kWhole ? kSharedWhole
                                                              : kSharedAlone;
  // Of all warps. Why less for 4 and 8 tokens: x takes more.
  static constexpr int kRingKilobytes = kKind == Kind::kPhases  ? 160
                                        : kKind == Kind::kWhole ? (Tokens <= 2   ? 150
                                                                   : Tokens == 4 ? 130
                                                                                 : 104)
                                        : Tokens <= 2           ? 86
                                                                : 60;
  static constexpr int kRingBytes = kRingKilobytes * 1024 / kWarps;
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
  // Where K is walked in phases:
  int parts_k;              // blocks that share K
  int phases, phase_steps;  // of a block
  float* parts;             // sums of each part of K
  float step, zero_base;    // value = step * (code - zero_base)
  float zero_factor;        // 1 / step
  bool bf16_scales;
  ZeroKind zero_kind;
  FloatType bias_type;
};

constexpr int kRowBytes = 256 + 16;  // of a token at one step; 16 more, so that 8 rows of ldmatrix meet no bank twice

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

  // The same where blocks that have nothing in common share K.
  __device__ Position(const Problem& problem, int warps, int parts_k)
      : p(problem),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        rank(blockIdx.x % parts_k),
        slice((rank << p.warps_k_shift) + (warp & ((1 << p.warps_k_shift) - 1))),
        first_row_group(blockIdx.x / parts_k * (warps >> p.warps_k_shift)) {
    const int row_group = first_row_group + (warp >> p.warps_k_shift);
    first_step = end_step = 0;
    first_tile = p.row_groups(row_group), end_tile = p.row_groups(row_group + 1);
  }

  // This warp's part of a phase of its block.
  __device__ __forceinline__ void slice_of(int phase, int& first, int& end) const {
    const int each = p.phase_steps >> p.warps_k_shift;
    const int block_end = p.slices(rank + 1);
    first = p.slices(rank) + phase * p.phase_steps + (warp & ((1 << p.warps_k_shift) - 1)) * each;
    end = min(first + each, block_end);
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
