// How family decode spreads its work, and where things lie in shared memory. The picture is in resident.cuh.
#pragma once
#include <cstdint>

#include "../../args.h"
#include "../cut.cuh"
#include "../dequant/looked_up.cuh"
#include "../form.cuh"
#include "../layout.cuh"
#include "../ptx/async.cuh"

namespace lowbit::decode {

using layout::kStepK;  // 128 k: whole tiles of every plane

// Shared memory of a block. Two: so that two launches fit on a multiprocessor, and the next one can start early.
// Whole: nothing fits beside it.
constexpr int kSharedTwo = 112 * 1024;
constexpr int kSharedWhole = 227 * 1024;

// How much of a multiprocessor a block takes.
enum class Kind { kHalf, kWhole };

// Tokens: 1, 2 or 4, the most a kernel takes.
template <int Tokens, Kind Way = Kind::kHalf>
struct Tile {
  static_assert(Tokens == 1 || Tokens == 2 || Tokens == 4);
  static constexpr Kind kKind = Way;
  static constexpr int kTokens = Tokens;
  // Why not 16 warps in half a multiprocessor: 64 registers a thread are too few.
  static constexpr int kWarps = kKind == Kind::kHalf ? 8 : 16, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kKind == Kind::kHalf ? 2 : 1;  // that fit on a multiprocessor
  static constexpr int kSharedBytes = kKind == Kind::kHalf ? kSharedTwo : kSharedWhole;
  // Of all warps. Why less for 4 tokens: x takes more.
  static constexpr int kRingKilobytes = kKind == Kind::kWhole ? (Tokens <= 2 ? 150 : 130) : Tokens <= 2 ? 86 : 60;
  static constexpr int kRingBytes = kRingKilobytes * 1024 / kWarps;
};

// What a kernel is built for: so many parts of a step (units) may have scales of their own. 1: groups of 128 k and
// more; 4: of 32 and 64; 8: of 16.
template <int Units, ZeroForm Zeros>
struct Groups : Form<(Units > 1), Zeros> {
  static_assert(Units == 1 || Units == 4 || Units == 8);
  static constexpr int kUnits = Units;
  static constexpr int kUnitShift = Units == 8 ? 4 : 5;  // log2 of the k of one, of shorter groups
  static constexpr int kSets = Units == 8 ? 2 : 1;       // of sums: a product has columns for four units
};

// The most units that a weight has a kernel for. Why one token alone: of the four pairs of columns that a product has,
// each then has a unit. Floats have shorter groups than integers in the formats that people use.
template <class Weight, class Tile>
constexpr int kMostUnits = Tile::kTokens > 1 ? 1
                           : Weight::kFloat  ? bytes::Table<Weight>::kMostUnits
                                             : 4;

constexpr int kMostShift = 3;  // clusters of 8 blocks

// Everything a kernel is told; sizes are those of the unpadded problem unless they say otherwise.
struct Problem {
  const uint8_t *codes, *scales, *zeros;
  const uint8_t* x;
  void* y;
  const void* bias;
  const float* row_scales;
  int64_t x_stride, y_stride;  // elements
  int64_t plane_stride;        // bytes of one bit of every code: padded rows * padded k / 8
  int n, k, m, columns;        // columns: padded k
  int tiles, steps, groups;    // row tiles; steps of 128 k; groups of a row
  int group_shift;             // k >> group_shift is a group; 31: one group
  int group_steps;             // of groups of at least 128: step >> group_steps is one
  int cluster_shift;           // log2 of the blocks of a cluster, at most kMostShift
  int warps_k_shift;           // log2 of the warps of a block that split K
  int early;                   // stages of weights that a warp asks for before the kernel before has ended
  int next_after;              // eighths of a warp's stages that are asked for when the next kernel may begin
  Cut slices, row_groups;      // of steps, of tiles
  int grid;                    // blocks, each with rows or k of its own
  int repeated;                // a block b beyond those does what block b & repeated does (spread.cuh)
  int most_tiles;              // of a row group
  int pass_tiles;              // tiles of a row group whose sums meet at once
  int x_bytes, table_bytes;    // of a block's x; of what is known of each of its tokens and steps
  int meeting_bytes;           // of a pass
  float step, zero_base;       // value = step * (code - zero_base)
  // Of a stored zero: what it takes from codes, what it adds to scaled values; one of them is 0.
  float zero_on_code, zero_on_value;
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
  static constexpr int kTable = 272;  // of a worker, 32 bytes
  static constexpr int kRings = 384;  // Why not 272: loads of a warp would touch five lines of 128 bytes, not four
  static constexpr int kX = kRings + Tile::kWarps * Ring::kBytes;  // then its table, then sums that meet
};

// Where a warp stands: its slice of K, and the tiles of its row group; none where the slice is empty.
struct Position {
  const Problem& p;
  int block, lane, warp, rank;  // rank: of the block in its cluster
  int slice;
  int first_step, end_step, first_tile, end_tile;

  __device__ explicit Position(const Problem& problem)
      : p(problem),
        block(static_cast<int>(blockIdx.x) < p.grid ? blockIdx.x : blockIdx.x & p.repeated),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        rank(block & ((1 << p.cluster_shift) - 1)),
        slice((rank << p.warps_k_shift) + (warp & ((1 << p.warps_k_shift) - 1))) {
    const int group = row_group(warp >> p.warps_k_shift);
    first_step = p.slices(slice), end_step = p.slices(slice + 1);
    first_tile = p.row_groups(group), end_tile = p.row_groups(group + 1);
    if (first_step == end_step) first_tile = end_tile;
    ptx::hold_below<32>(lane), ptx::hold_below<16>(warp), ptx::hold_below<8>(rank), ptx::hold(slice);
    ptx::hold(first_step), ptx::hold(end_step), ptx::hold(first_tile), ptx::hold(end_tile);
  }

  // Row group i of the block. Why not one after the other: the longer ones, which come first, would be those of some
  // blocks alone, and where tiles are few other blocks would have none.
  __device__ __forceinline__ int row_group(int i) const { return (block + i * p.grid) >> p.cluster_shift; }

  // The first step of the block of a rank.
  __device__ __forceinline__ int block_step(int rank) const { return p.slices(rank << p.warps_k_shift); }
};

}  // namespace lowbit::decode
