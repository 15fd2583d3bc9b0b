// How family decode spreads a product over blocks and warps: plain arithmetic on the host, with costs measured on an
// H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../../args.h"
#include "resident.cuh"

namespace lowbit::decode {

// What of a kernel that depends on. Why not types: this is then compiled once, not for every kernel.
struct Traits {
  int tokens, warps, shared_bytes;  // of its blocks
  int rows;                         // row tiles that a warp has side by side
  int x_at;                         // where x begins in shared memory
  int table_step_bytes;             // of what is known of a token at a step
  int sum_bytes;                    // of a tile's sums from a warp
};

template <class Worker, class Tile>
constexpr Traits kTraits = {Tile::kTokens,
                            Tile::kWarps,
                            Tile::kSharedBytes,
                            Worker::Ring::kRows,
                            Map<typename Worker::Ring, Tile>::kX,
                            Worker::kTableBytes,
                            kSumBytes<Worker>};

// Splits K over 2^cluster_shift blocks of 2^warps_k_shift warps each, in p; the bytes of shared memory that a block
// then takes, or 0 when that is more than there is.
inline int split(const Traits& traits, Problem& p, int cluster_shift, int warps_k_shift, const Launch& launch) {
  constexpr int kMostTiles = 8;
  const int rows = traits.rows, cluster = 1 << cluster_shift, warps_k = 1 << warps_k_shift;
  const int splits = cluster * warps_k, warps_n = traits.warps / warps_k;
  const int row_groups =
      std::min(launch.clusters[cluster_shift] * warps_n, (p.tiles + warps_n - 1) / warps_n * warps_n);
  p.cluster_shift = cluster_shift, p.warps_k_shift = warps_k_shift;
  p.early = launch.forced.parts ? launch.forced.early : 1, p.next_after = launch.forced.next_after;
  p.grid = row_groups / warps_n * cluster;
  p.slices = {p.steps / splits, p.steps % splits};
  p.row_groups = {p.tiles / row_groups, p.tiles % row_groups};
  p.most_tiles = (p.tiles + row_groups - 1) / row_groups;
  const int block_steps = p.slices.each * warps_k + std::min(p.slices.more, warps_k);
  p.x_bytes = block_steps * p.m * kRowBytes;
  p.table_bytes = ((block_steps + 8) * traits.tokens * traits.table_step_bytes + 15) / 16 * 16;
  const int64_t fixed = traits.x_at + static_cast<int64_t>(p.x_bytes) + p.table_bytes;
  for (p.pass_tiles = std::min(kMostTiles, (p.most_tiles + rows - 1) / rows * rows); p.pass_tiles >= rows;
       p.pass_tiles -= rows) {
    const int owned = (warps_n * p.pass_tiles + cluster - 1) / cluster;
    p.meeting_bytes = owned * splits * traits.sum_bytes;
    if (fixed + 2 * p.meeting_bytes <= traits.shared_bytes) return static_cast<int>(fixed) + 2 * p.meeting_bytes;
  }
  return 0;
}

// What the busiest warp has to do, in steps of 128 k of one row tile. Measured on an H200: two tiles side by side
// take 1.7 times as long as one, also where the second is missing; a tile's sums cost 1 step with 1 or 2 tokens, 2.5
// with 4; every doubling of the row groups of a block, which then reads more places at once, costs 12%.
inline float cost(const Traits& traits, const Problem& p, int warps_n) {
  const int steps = p.slices.each + (p.slices.more > 0);
  const float tiles = traits.rows == 1 ? static_cast<float>(p.most_tiles) : 1.7f * ((p.most_tiles + 1) / 2);
  float spread_out = 1.0f;
  for (; warps_n > 1; warps_n /= 2) spread_out += 0.12f;
  const float sums = traits.tokens <= 2 ? 1.0f : 2.5f;
  return tiles * steps * spread_out + sums * p.most_tiles + 4.0f * ((p.most_tiles + p.pass_tiles - 1) / p.pass_tiles);
}

// How the work is spread, in p: the smallest cluster that holds x, and the cheapest split in it, or as it is forced.
// The bytes of shared memory, or 0 when nothing fits.
inline int spread(const Traits& traits, Problem& p, const Launch& launch) {
  // Clusters came with compute capability 9.0, like launches that overlap.
  const int most_cluster_shift = launch.overlap ? 1 : 0;
  for (int cluster_shift = 0; cluster_shift <= most_cluster_shift; ++cluster_shift) {
    if (!launch.clusters[cluster_shift]) continue;
    const Split& forced = launch.forced;
    if (forced.parts && (forced.blocks != 1 << cluster_shift || forced.warps != traits.warps ||
                         forced.row_tiles * forced.parts != traits.warps))
      continue;
    Problem best{};
    float best_price = 0.0f;
    int bytes = 0;
    for (int warps_k_shift = 0; (1 << warps_k_shift) <= traits.warps; ++warps_k_shift) {
      if (forced.parts && forced.parts != 1 << warps_k_shift) continue;
      Problem found = p;
      const int need = split(traits, found, cluster_shift, warps_k_shift, launch);
      if (!need) continue;
      const float price = cost(traits, found, traits.warps >> warps_k_shift);
      if (bytes && price >= best_price) continue;
      best = found, bytes = need, best_price = price;
    }
    if (!bytes) continue;
    p = best;
    return bytes;
  }
  return 0;
}

}  // namespace lowbit::decode
