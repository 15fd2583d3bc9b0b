// How family decode spreads its work, and where things lie in shared memory. The picture is in resident.cuh.
#pragma once
#include <cstdint>

#include "../../args.h"
#include "../dequant/looked_up.cuh"
#include "../form.cuh"
#include "../layout.cuh"
#include "../ptx/async.cuh"
#include "sharing.cuh"
#include "tile.cuh"

namespace lowbit::decode {

using layout::kStepK;  // 128 k: whole tiles of every plane

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

// Everything a kernel is told; sizes are those of the unpadded problem unless they say otherwise.
struct Problem : Sharing {
  const uint8_t *codes, *scales, *zeros;
  const uint8_t* x;
  void* y;
  const void* bias;
  const float* row_scales;
  int64_t x_stride, y_stride;  // elements
  int64_t plane_stride;        // bytes of one bit of every code: padded rows * padded k / 8
  int n, k, columns;           // columns: padded k
  int groups;                  // of a row
  int group_shift;             // k >> group_shift is a group; 31: one group
  int group_steps;             // of groups of at least 128: step >> group_steps is one
  float step, zero_base;       // value = step * (code - zero_base)
  // Of a stored zero: what it takes from codes, what it adds to scaled values; one of them is 0.
  float zero_on_code, zero_on_value;
  bool bf16_scales;
  ZeroKind zero_kind;
  FloatType bias_type;
};

// Where things lie in shared memory.
template <class Ring, class Tile>
struct Map {
  static constexpr int kZeros = 0;    // 256 bytes of 0, which columns without x read
  static constexpr int kMet = 256;    // two barriers: the sums of an even, of an odd pass have come
  static constexpr int kTable = 272;  // of a worker, 32 bytes
  static constexpr int kRings = kRingsAt;
  static constexpr int kX = kRings + Tile::kWarps * Ring::kBytes;  // then its table, then sums that meet
};

// Where a warp stands: its slice of K, and the tiles of its row group; none where the slice is empty.
struct Position {
  const Problem& p;
  int block, lane, warp, rank;  // rank: of the block in its cluster
  int slice;
  int first_step, end_step, first_tile, end_tile;

  // repeats: whether there may be blocks beyond p.grid (launched_blocks).
  __device__ Position(const Problem& problem, bool repeats)
      : p(problem),
        block(!repeats || static_cast<int>(blockIdx.x) < p.grid ? blockIdx.x : blockIdx.x & p.repeated),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        rank(block & ((1 << p.cluster_shift) - 1)),
        slice((rank << p.warps_k_shift) + (warp & ((1 << p.warps_k_shift) - 1))) {
    const int group = row_group(warp >> p.warps_k_shift);
    first_step = p.slices(slice), end_step = p.slices(slice + 1);
    first_tile = p.row_groups(group), end_tile = p.row_groups(group + 1);
    if (first_step == end_step) first_tile = end_tile;
  }

  // What has been found is kept from here on, not found again where it is used.
  __device__ __forceinline__ void keep() {
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
