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
    if (p.pass_tiles < p.most_tiles && warps_n * p.pass_tiles < cluster) return 0;  // meeting.cuh
    const int owned = (warps_n * p.pass_tiles + cluster - 1) / cluster;
    p.meeting_bytes = owned * splits * traits.sum_bytes;
    if (fixed + 2 * p.meeting_bytes <= traits.shared_bytes) return static_cast<int>(fixed) + 2 * p.meeting_bytes;
  }
  return 0;
}

// What a split costs, about, in steps of 128 k of one row tile: of the busiest warp, where two tiles side by side take
// `both` times as long as one, and of one by one what all warps have on average counts too, `average` of it, because
// memory brings them together; every doubling of the row groups of a block, which then reads more places at once, takes
// more; a tile's sums, x, and a cluster of blocks; and all of it more where multiprocessors stay idle, since they bring
// no weights. Fitted to the order of times on H200s (benchmarks/results/nvidia-h200/sweep_splits_20261123_decode.json
// and _20261126_few_bits, _many_bits: 207 products of 1, 2 and 4 rows, 15 shapes, int1 to int8): what is chosen is, of
// the 186 where that was timed, 1.0% slower than the fastest of both kinds of blocks on average, 7% at worst.
struct Costs {
  float both, average, groups, sums, x, idle;
  float cluster[kMostShift][2];  // of 2, 4, 8 blocks; up to 4 bits, above
};
constexpr Costs kCostsHalf = {0.25f, 0.0f, 0.23f, 1.6f, 0.21f, 0.25f, {{2.6f, 0.2f}}};
constexpr Costs kCostsWhole = {0.95f, 0.4f, 0.18f, 2.5f, 0.16f, 0.25f, {{8.0f, 5.4f}}};

// Whether K is so long that clusters of 4 and 8 blocks are thought of: x of all of it takes a block's time, and its
// memory. Why not always: nothing gains at 8192 x 8192 and with fewer k, and each is one more split to look at. Why not
// of floats that are no bytes: not timed.
inline bool has_many_steps(const Traits& traits, const Problem& p) { return p.steps >= 72 && !traits.is_float; }
// The costs from there on, fitted to 189 products of 1, 2 and 4 rows, eleven shapes, and those of before
// (sweep_splits_20261126_clusters.json): what is chosen is 1.4% slower than the fastest on average, 20% at worst (2560
// x 9728). Why none for more than 4 bits by halves: those take whole multiprocessors.
constexpr float kNever = 1e6f;
constexpr Costs kManyHalf = {
    0.367f, 0.0f, 0.089f, 1.88f, 0.113f, 1.98f, {{1.34f, 3.29f}, {9.85f, kNever}, {8.4f, kNever}}};
constexpr Costs kManyWhole = {
    1.007f, 0.139f, 0.141f, 2.5f, 0.16f, 1.98f, {{8.03f, 4.86f}, {3.0f, 4.41f}, {9.44f, 5.01f}}};
// The most row groups of a block there: more were never timed.
constexpr int kMostGroups = 4;

inline float cost(const Traits& traits, const Problem& p, int warps_n, int blocks) {
  const bool half = traits.warps == 8, many = has_many_steps(traits, p);
  const Costs& costs = half ? (many ? kManyHalf : kCostsHalf) : many ? kManyWhole : kCostsWhole;
  const int steps = p.slices.each + (p.slices.more > 0);
  const int multiplied = (steps + traits.turn - 1) / traits.turn * traits.turn;
  const float most = static_cast<float>(p.most_tiles);
  const float average = static_cast<float>(p.tiles) / static_cast<float>((p.grid >> p.cluster_shift) * warps_n);
  const float tiles =
      traits.rows == 1 ? most + costs.average * (average - most) : costs.both * ((p.most_tiles + 1) / 2);
  float spread_out = 1.0f;
  for (; warps_n > 1; warps_n /= 2) spread_out += costs.groups;
  const float shared = p.cluster_shift == 0 ? 0.0f : costs.cluster[p.cluster_shift - 1][traits.bits >= 5];
  const float x = costs.x * static_cast<float>((steps << p.warps_k_shift) * traits.tokens);
  const float idle = static_cast<float>(blocks) / static_cast<float>(p.grid) - 1.0f;
  return (tiles * multiplied * spread_out + costs.sums * most + x + shared) * (1.0f + costs.idle * idle);
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
  // Why late: clusters of a next launch that begins early take places of this one, 3584 x 14336, four rows, W2 6.6 us
  // by this, 9.1 by (1, 0).
  if (traits.warps == 8 && p.cluster_shift > 1) return {8, 6};
  const int64_t size = megabytes(p, bits);
  if (traits.warps > 8) return {bits == 3 || bits == 5 || bits == 6 ? 2 : 1, 0};
  if (bits >= 5) return {2, 0};
  if (bits == 4 && p.m > 2) return {1, 0};
  if (size <= 10) return {4, 4};
  if (bits == 3 || p.steps >= 128) return {8, 6};
  return {bits == 4 ? 2 : 1, 0};
}

// A problem as it is spread, what it takes of a block's shared memory (0: nothing fits), and what that costs.
struct Spread {
  Problem p;
  int bytes;
  float price;
};

// The cheapest split, or as it is forced.
inline Spread spread(const Traits& traits, const Problem& p, const Launch& launch) {
  const Split& forced = launch.forced;
  Spread best{};
  if (forced.parts && (forced.warps != traits.warps || forced.row_tiles * forced.parts != traits.warps)) return best;
  // Clusters came with compute capability 9.0, like launches that overlap.
  const bool many = has_many_steps(traits, p);
  const int most_shift = !launch.overlap ? 0 : many || forced.parts ? kMostShift : 1;
  for (int cluster_shift = most_shift; cluster_shift >= 0; --cluster_shift) {
    if (!launch.clusters[cluster_shift] || (forced.parts && forced.blocks != 1 << cluster_shift)) continue;
    for (int warps_k_shift = 0; (1 << warps_k_shift) <= traits.warps; ++warps_k_shift) {
      if (forced.parts ? forced.parts != 1 << warps_k_shift : many && traits.warps >> warps_k_shift > kMostGroups)
        continue;
      Problem found = p;
      const int need = split(traits, found, cluster_shift, warps_k_shift, launch);
      if (!need) continue;
      const float price = cost(traits, found, traits.warps >> warps_k_shift, launch.clusters[0]);
      if (best.bytes && price >= best.price) continue;
      best = {found, need, price};
    }
  }
  if (!best.bytes) return best;
  const When own = forced.parts ? When{forced.early, forced.next_after} : when(traits, best.p);
  best.p.early = own.early, best.p.next_after = own.next_after;
  return best;
}

}  // namespace lowbit::decode
