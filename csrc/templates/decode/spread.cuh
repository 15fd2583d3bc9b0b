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
  int bits;
  bool is_float;
  int tokens, warps, shared_bytes;  // of its blocks
  int rows;                         // row tiles that a warp has side by side
  int turn;                         // steps that a warp multiplies at least: a slice is rounded up to turns
  int x_at;                         // where x begins in shared memory
  int table_step_bytes;             // of what is known of a token at a step
  int sum_bytes;                    // of a tile's sums from a warp
};

template <class Worker, class Tile>
constexpr Traits kTraits = {
    Worker::kBits,       Worker::kFloat,      Tile::kTokens, Tile::kWarps,
    Tile::kSharedBytes,  Worker::Ring::kRows, Worker::kTurn, Map<typename Worker::Ring, Tile>::kX,
    Worker::kTableBytes, kSumBytes<Worker>};

// Of codes.
inline int64_t megabytes(const Problem& p, int bits) { return int64_t{256} * bits * p.tiles * p.steps >> 20; }

// Splits K over 2^cluster_shift blocks of 2^warps_k_shift warps each, in p; the bytes of shared memory that a block
// then takes, or 0 when that is more than there is.
inline int split(const Traits& traits, Problem& p, int cluster_shift, int warps_k_shift, const Launch& launch) {
  constexpr int kMostTiles = 8;
  const int rows = traits.rows, cluster = 1 << cluster_shift, warps_k = 1 << warps_k_shift;
  const int splits = cluster * warps_k, warps_n = traits.warps / warps_k;
  const int row_groups =
      std::min(launch.clusters[cluster_shift] * warps_n, (p.tiles + warps_n - 1) / warps_n * warps_n);
  p.cluster_shift = cluster_shift, p.warps_k_shift = warps_k_shift;
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

// What a split costs, about, in steps of 128 k of one row tile: of the busiest warp, where two tiles side by side take
// `both` times as long as one, and of one by one what all warps have on average counts too, `average` of it, because
// memory brings them together; every doubling of the row groups of a block, which then reads more places at once, takes
// more; a tile's sums, x, and a pair of blocks; and all of it more where multiprocessors stay idle, since they bring no
// weights. Fitted to the order of times on H200s (benchmarks/results/nvidia-h200/sweep_splits_20261123_decode.json and
// _20261126_few_bits, _many_bits: 207 products of 1, 2 and 4 rows, 15 shapes, int1 to int8): what is chosen is, of the
// 186 where that was timed, 1.0% slower than the fastest of both kinds of blocks on average, 7% at worst.
struct Costs {
  float both, average, groups, sums, x, pair[2];  // pair: up to 4 bits, above
};
constexpr Costs kCostsHalf = {0.25f, 0.0f, 0.23f, 1.6f, 0.21f, {2.6f, 0.2f}};
constexpr Costs kCostsWhole = {0.95f, 0.4f, 0.18f, 2.5f, 0.16f, {8.0f, 5.4f}};
constexpr float kCostIdle = 0.25f;

inline float cost(const Traits& traits, const Problem& p, int warps_n, int blocks) {
  const Costs& costs = traits.warps == 8 ? kCostsHalf : kCostsWhole;
  const int steps = p.slices.each + (p.slices.more > 0);
  const int multiplied = (steps + traits.turn - 1) / traits.turn * traits.turn;
  const float most = static_cast<float>(p.most_tiles);
  const float average = static_cast<float>(p.tiles) / static_cast<float>((p.grid >> p.cluster_shift) * warps_n);
  const float tiles =
      traits.rows == 1 ? most + costs.average * (average - most) : costs.both * ((p.most_tiles + 1) / 2);
  float spread_out = 1.0f;
  for (; warps_n > 1; warps_n /= 2) spread_out += costs.groups;
  const float pair = p.cluster_shift == 0 ? 0.0f : costs.pair[traits.bits >= 5];
  const float x = costs.x * static_cast<float>((steps << p.warps_k_shift) * traits.tokens);
  const float idle = static_cast<float>(blocks) / static_cast<float>(p.grid) - 1.0f;
  return (tiles * multiplied * spread_out + costs.sums * most + x + pair) * (1.0f + kCostIdle * idle);
}

// How many stages a warp asks for early, and when the next kernel may begin (Split::early, next_after). The time of
// small products is that of one launch after the other: blocks ask for weights as early as they can, and let the next
// one begin when they have asked for half of theirs: it is to fill the time in which this one ends. Larger ones ask for
// little early, since x would stand in line behind it. Measured as costs were; us by (1, 0) and by what is chosen: 4096
// x 4096, W1 2.77 and 2.72, W4 3.96 and 3.32; 8192 x 8192, W3 8.45 and 8.17; 8192 x 28672, W1 13.6 and 13.1; whole,
// 28672 x 4096, W3 14.1 and 13.4; but 8192 x 8192, W4 9.9 and by (2, 0) 10.1.
struct When {
  int early, next_after;
};
inline When when(const Traits& traits, const Problem& p) {
  if (traits.is_float) return {1, 0};
  const int bits = traits.bits;
  const int64_t size = megabytes(p, bits);
  if (traits.warps > 8) return {bits == 3 || bits == 5 || bits == 6 ? 2 : 1, 0};
  if (bits >= 5) return {2, 0};
  if (bits == 4 && p.m > 2) return {1, 0};
  if (size <= 10) return {4, 4};
  if (bits == 3 || p.steps >= 128) return {8, 6};
  return {bits == 4 ? 2 : 1, 0};
}

// How the work is spread, in p: the cheapest split, or as it is forced. The bytes of shared memory, or 0 when nothing
// fits.
inline int spread(const Traits& traits, Problem& p, const Launch& launch) {
  const Split& forced = launch.forced;
  if (forced.parts && (forced.warps != traits.warps || forced.row_tiles * forced.parts != traits.warps)) return 0;
  // Clusters came with compute capability 9.0, like launches that overlap.
  const bool pairs = launch.overlap && launch.clusters[1];
  Problem best{};
  float best_price = 0.0f;
  int bytes = 0;
  for (int cluster_shift = pairs; cluster_shift >= 0; --cluster_shift) {
    if (!launch.clusters[cluster_shift] || (forced.parts && forced.blocks != 1 << cluster_shift)) continue;
    for (int warps_k_shift = 0; (1 << warps_k_shift) <= traits.warps; ++warps_k_shift) {
      if (forced.parts && forced.parts != 1 << warps_k_shift) continue;
      Problem found = p;
      const int need = split(traits, found, cluster_shift, warps_k_shift, launch);
      if (!need) continue;
      const float price = cost(traits, found, traits.warps >> warps_k_shift, launch.clusters[0]);
      if (bytes && price >= best_price) continue;
      best = found, bytes = need, best_price = price;
    }
  }
  if (!bytes) return 0;
  p = best;
  const When own = forced.parts ? When{forced.early, forced.next_after} : when(traits, p);
  p.early = own.early, p.next_after = own.next_after;
  return bytes;
}

}  // namespace lowbit::decode
