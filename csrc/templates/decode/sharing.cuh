// How blocks and warps of family decode share a product. Plain arithmetic that compiles for the host too.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../../args.h"
#include "../cut.cuh"
#include "tile.cuh"

namespace lowbit::decode {

constexpr int kMostShift = 3;  // clusters of 8 blocks

// What is shared, and how; a kernel is told this and more (Problem).
struct Sharing {
  int m, tiles, steps;       // rows of x; row tiles; steps of 128 k
  int cluster_shift;         // log2 of the blocks of a cluster, at most kMostShift
  int warps_k_shift;         // log2 of the warps of a block that split K
  int early;                 // stages of weights that a warp asks for before the kernel before has ended
  bool two_each;             // whether the launch has two blocks on each multiprocessor
  int late;                  // blocks from this one on ask for one stage so early
  int next_after;            // eighths of a warp's stages that are asked for when the next kernel may begin
  Cut slices, row_groups;    // of steps, of tiles
  int grid;                  // blocks, each with rows or k of its own
  int repeated;              // a block b beyond those does what block b & repeated does (launched_blocks)
  int most_tiles;            // of a row group
  int pass_tiles;            // tiles of a row group whose sums meet at once
  int x_bytes, table_bytes;  // of a block's x; of what is known of each of its tokens and steps
  int meeting_bytes;         // of a pass
};

// What of a weight products depend on. units: parts of a step of 128 k that have scales of their own (shape.cuh).
struct WeightForm {
  int bits;
  bool is_float, zeros;
  int units;

  // Whether codes are multiplied as bytes: those of short floats are looked up.
  constexpr bool by_bytes() const { return !is_float || bits <= 4; }
  constexpr bool operator==(const WeightForm& o) const {
    return bits == o.bits && is_float == o.is_float && zeros == o.zeros && units == o.units;
  }
};

// What sharing depends on of a kernel.
struct Traits {
  WeightForm weight;
  int tokens, warps, shared_bytes;  // of its blocks
  int rows;                         // row tiles that a warp has side by side
  int turn;                         // steps that a warp multiplies at least: a slice is rounded up to turns
  int stage_steps, depth;           // steps of a stage; stages of a warp's ring
  int x_at;                         // where x begins in shared memory
  int table_step_bytes;             // of what is known of a token at a step
  int sum_bytes;                    // of a tile's sums from a warp

  constexpr bool whole() const { return warps > 8; }  // a block has all of a multiprocessor
  constexpr bool by_two_steps() const { return weight.bits == 3 && stage_steps == 2; }  // ring_of
  constexpr bool operator==(const Traits& o) const {
    return weight == o.weight && tokens == o.tokens && warps == o.warps && shared_bytes == o.shared_bytes &&
           rows == o.rows && turn == o.turn && stage_steps == o.stage_steps && depth == o.depth && x_at == o.x_at &&
           table_step_bytes == o.table_step_bytes && sum_bytes == o.sum_bytes;
  }
};

// Of a weight's kernels, also for a plan, which does not see them (kernel_of in decode.cuh compares).
template <class Tile>
constexpr Traits traits_of(const WeightForm& weight) {
  const bool bytes = weight.by_bytes();
  const RingSizes ring =
      bytes ? ring_of<Tile>(weight.bits, weight.units, weight.zeros) : float_ring_of<Tile>(weight.bits);
  const bool fills = bytes && weight.units == 1;  // products that have columns for several steps
  return {weight,
          Tile::kTokens,
          Tile::kWarps,
          Tile::kSharedBytes,
          ring.rows,
          fills ? turn_of(Tile::kTokens, ring.steps) : ring.steps,
          ring.steps,
          ring.depth,
          kRingsAt + Tile::kWarps * ring.bytes(),
          bytes ? 8 * weight.units : 0,
          64 * Tile::kTokens};
}

// Splits K over 2^cluster_shift blocks of 2^warps_k_shift warps each, in p, where so many of those clusters run at
// once, or twice as many (two_each); the bytes of shared memory that a block then takes, or 0 when that is more than
// there is, or no multiprocessor would have two blocks.
//
// Why two blocks on each multiprocessor in place of one of all of it: the next launch begins where one of them has
// ended, and has its first weights when the other one ends; a block of all of it finds memory idle for 1.9 us. The
// blocks that begin first, the lower ones, ask for several stages (`when`). Those that begin when the launch before
// ends ask for one, or x would stand in line behind weights. One row, us, int3, int4, int5, int8 at 8192 x 8192
// 8.0, 9.5, 11.9, 17.2; so 7.6, 9.0, 11.2, 16.6.
inline int share(const Traits& traits, Sharing& p, int cluster_shift, int warps_k_shift, int clusters, bool two_each) {
  constexpr int kMostTiles = 8;  // of a pass that is not the only one
  const int rows = traits.rows, cluster = 1 << cluster_shift, warps_k = 1 << warps_k_shift;
  const int splits = cluster * warps_k, warps_n = traits.warps / warps_k;
  const int most_groups = clusters * warps_n * (two_each ? 2 : 1);
  const int row_groups = std::min(most_groups, (p.tiles + warps_n - 1) / warps_n * warps_n);
  p.cluster_shift = cluster_shift, p.warps_k_shift = warps_k_shift;
  p.grid = row_groups / warps_n * cluster;
  if (two_each && p.grid <= clusters * cluster) return 0;
  p.two_each = two_each, p.late = two_each ? p.grid / 2 : p.grid;
  p.slices = {p.steps / splits, p.steps % splits};
  p.row_groups = {p.tiles / row_groups, p.tiles % row_groups};
  p.most_tiles = (p.tiles + row_groups - 1) / row_groups;
  const int block_steps = p.slices.each * warps_k + std::min(p.slices.more, warps_k);
  if (int64_t{block_steps} * p.m * kRowBytes > traits.shared_bytes) return 0;
  p.x_bytes = block_steps * p.m * kRowBytes;
  p.table_bytes = ((block_steps + 8) * traits.tokens * traits.table_step_bytes + 15) / 16 * 16;
  const int64_t fixed = traits.x_at + static_cast<int64_t>(p.x_bytes) + p.table_bytes;
  // Why all tiles at once where there is room: warps wait for the slowest one in every pass. 57344 x 8192, one row, W1
  // 21.5 us in two passes, 20.9 in one.
  for (int tiles = (p.most_tiles + rows - 1) / rows * rows; tiles >= rows;
       tiles = tiles > kMostTiles ? kMostTiles / rows * rows : tiles - rows) {
    const int passes = tiles < p.most_tiles ? 2 : 1;        // whose sums lie there at once, at most
    if (passes > 1 && warps_n * tiles < cluster) return 0;  // meeting.cuh
    const int64_t owned = (int64_t{warps_n} * tiles + cluster - 1) / cluster;
    const int64_t bytes = owned * splits * traits.sum_bytes, all = fixed + passes * bytes;
    if (all > traits.shared_bytes) continue;
    p.pass_tiles = tiles, p.meeting_bytes = static_cast<int>(bytes);
    return static_cast<int>(all);
  }
  return 0;
}

// How many blocks are launched: where launches overlap, as many of half of a multiprocessor as there are
// multiprocessors, or halves of them; those beyond p.grid repeat what others do. Why: on a multiprocessor that a launch
// leaves idle the next one, which begins early, has two blocks, and takes twice as long. Measured on an H200, us, 128
// blocks and these 132: one row, 2048 x 6144 W4 5.16 and 4.27, 4096 x 1024 W4 3.42 and 2.89, W8 3.28 and 2.59; 64 and
// 132: 1024 x 3072 W2 3.23 and 2.84. Why not clusters of 4 and 8: no more of them fit.
inline int launched_blocks(const Traits& traits, Sharing& p, const Launch& launch) {
  const int all = launch.clusters[p.cluster_shift] << p.cluster_shift << p.two_each;
  if (!launch.overlap || traits.whole() || p.cluster_shift > 1 || p.grid >= all) return p.grid;
  int most = 1;  // the largest power of two of blocks, whole clusters of them
  while (2 * most <= p.grid) most *= 2;
  p.repeated = most - 1;
  return all;
}

}  // namespace lowbit::decode
