// How family decode spreads a product over blocks and warps: plain arithmetic on the host, with costs measured on an
// H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../../args.h"
#include "resident.cuh"

namespace lowbit::decode {

// Splits K over 2^cluster_shift blocks of 2^warps_k_shift warps each, in p; the bytes of shared memory that a block
// then takes, or 0 when that is more than there is.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int split(Problem& p, int cluster_shift, int warps_k_shift, const Launch& launch) {
  using Worker = WorkerOf<Weight, Act, Tile, Fine, Zeros>;
  using Map = decode::Map<typename Worker::Ring, Tile>;
  constexpr int kRows = Worker::Ring::kRows, kMostTiles = 8;
  const int cluster = 1 << cluster_shift, warps_k = 1 << warps_k_shift;
  const int splits = cluster * warps_k, warps_n = Tile::kWarps / warps_k;
  const int row_groups =
      std::min(launch.clusters[cluster_shift] * warps_n, (p.tiles + warps_n - 1) / warps_n * warps_n);
  p.cluster_shift = cluster_shift, p.warps_k_shift = warps_k_shift;
  p.grid = row_groups / warps_n * cluster;
  p.slices = {p.steps / splits, p.steps % splits};
  p.row_groups = {p.tiles / row_groups, p.tiles % row_groups};
  p.most_tiles = (p.tiles + row_groups - 1) / row_groups;
  const int block_steps = p.slices.each * warps_k + std::min(p.slices.more, warps_k);
  p.x_bytes = block_steps * p.m * kRowBytes;
  p.table_bytes = ((block_steps + 8) * Tile::kTokens * Worker::kTableBytes + 15) / 16 * 16;
  const int64_t fixed = Map::kX + static_cast<int64_t>(p.x_bytes) + p.table_bytes;
  for (p.pass_tiles = std::min(kMostTiles, (p.most_tiles + kRows - 1) / kRows * kRows); p.pass_tiles >= kRows;
       p.pass_tiles -= kRows) {
    const int owned = (warps_n * p.pass_tiles + cluster - 1) / cluster;
    p.meeting_bytes = owned * splits * kSumBytes<Worker>;
    if (fixed + 2 * p.meeting_bytes <= Tile::kSharedBytes) return static_cast<int>(fixed) + 2 * p.meeting_bytes;
  }
  return 0;
}

// What the busiest warp has to do, in steps of 128 k of one row tile. Measured on an H200: two tiles side by side
// take 1.7 times as long as one, also where the second is missing; a tile's sums cost 1 step with 1 or 2 tokens, 2.5
// with 4; every doubling of the row groups of a block, which then reads more places at once, costs 12%.
template <int Rows, int Tokens>
inline float cost(const Problem& p, int warps_n) {
  const int steps = p.slices.each + (p.slices.more > 0);
  const float tiles = Rows == 1 ? static_cast<float>(p.most_tiles) : 1.7f * ((p.most_tiles + 1) / 2);
  float spread_out = 1.0f;
  for (; warps_n > 1; warps_n /= 2) spread_out += 0.12f;
  const float sums = Tokens <= 2 ? 1.0f : 2.5f;
  return tiles * steps * spread_out + sums * p.most_tiles + 4.0f * ((p.most_tiles + p.pass_tiles - 1) / p.pass_tiles);
}

// How the work is spread, in p: the smallest cluster that holds x, and the cheapest split in it. The bytes of shared
// memory, or 0 when nothing fits.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int spread(Problem& p, const Launch& launch) {
  constexpr int kRows = WorkerOf<Weight, Act, Tile, Fine, Zeros>::Ring::kRows;
  // Clusters came with compute capability 9.0, like launches that overlap.
  const int most_cluster_shift = launch.overlap ? 1 : 0;
  for (int cluster_shift = 0; cluster_shift <= most_cluster_shift; ++cluster_shift) {
    if (!launch.clusters[cluster_shift]) continue;
    Problem best{};
    float best_price = 0.0f;
    int bytes = 0;
    for (int warps_k_shift = 0; (1 << warps_k_shift) <= Tile::kWarps; ++warps_k_shift) {
      Problem found = p;
      const int need = split<Weight, Act, Tile, Fine, Zeros>(found, cluster_shift, warps_k_shift, launch);
      if (!need) continue;
      const float price = cost<kRows, Tile::kTokens>(found, Tile::kWarps >> warps_k_shift);
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
