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

// How many blocks are launched: where launches overlap, as many of half of a multiprocessor as there are
// multiprocessors; those beyond p.grid repeat what others do. Why: on a multiprocessor that a launch leaves idle the
// next one, which begins early, has two blocks, and takes twice as long. Measured on an H200, us, 128
// blocks and these 132: one row, 2048 x 6144 W4 5.16 and 4.27, 4096 x 1024 W4 3.42 and 2.89, W8 3.28 and 2.59; 64 and
// 132: 1024 x 3072 W2 3.23 and 2.84. Why not clusters of 4 and 8: no more of them fit.
inline int launched_blocks(const Traits& traits, Problem& p, const Launch& launch) {
  const int all = launch.clusters[p.cluster_shift] << p.cluster_shift;
  if (!launch.overlap || traits.warps != 8 || p.cluster_shift > 1 || p.grid >= all) return p.grid;
  int most = 1;  // the largest power of two of blocks, whole clusters of them
  while (2 * most <= p.grid) most *= 2;
  p.repeated = most - 1;
  return all;
}

// What a product takes by a split, about, in us: a start; the greater of products and memory, and more where the other
// is nearly as much; x of a block; sums of tiles, passes and clusters. Warps multiply whole turns and row tiles side by
// side, also where some are not there; memory brings less where multiprocessors stay idle, or read many places at once.
// Fitted to times on H200s: 654 products of 1, 2 and 4 rows, 44 shapes from 1024 x 3072 to 57344 x 8192, int1 to int8
// (sweep_splits_* of benchmarks/results/nvidia-h200). What is chosen is 1.4% slower than the fastest split of both
// kinds of blocks on average, 14% at worst, within 5% in 92%; fitted to three quarters of the shapes it was 1.6% on the
// rest.
struct Costs {
  float start[3], tokens[3];      // tokens: what products take with 1, 2 and 4
  float product[8];               // of a row tile x 128 k, by bits, where each scheduler has a warp
  float memory;                   // bytes of all weights in a us
  float idle, groups;             // what they take more: by half of the multiprocessors, by twice the row groups
  float both;                     // of the lesser of products and memory, times its share of the greater
  float sums, pass;               // of a tile, of each pass but the first
  float cluster[kMostShift + 1];  // of 1, 2, 4, 8 blocks
};
constexpr Costs kCostsHalf = {{1.41f, 1.17f, 1.06f},
                              {1.0f, 1.09f, 1.26f},
                              {0.0402f, 0.0468f, 0.0695f, 0.0637f, 0.0976f, 0.109f, 0.158f, 0.124f},
                              4.74e6f,
                              0.555f,
                              0.0f,
                              0.23f,
                              0.133f,
                              0.844f,
                              {0.0f, 0.0161f, 0.288f, 0.414f}};
constexpr Costs kCostsWhole = {{1.93f, 1.6f, 1.11f},
                               {1.0f, 1.12f, 1.22f},
                               {0.0336f, 0.0359f, 0.047f, 0.0343f, 0.0703f, 0.0675f, 0.0843f, 0.0509f},
                               6.05e6f,
                               0.229f,
                               0.03f,
                               0.425f,
                               0.186f,
                               0.553f,
                               {0.0f, 0.485f, 0.811f, 1.08f}};
constexpr float kXUs = 0.014f;  // of a token and 128 k

inline float cost(const Traits& traits, const Problem& p, int blocks) {
  const Costs& costs = traits.warps == 8 ? kCostsHalf : kCostsWhole;
  const int steps = p.slices.each + (p.slices.more > 0), own = traits.tokens / 2;
  const int turns = (steps + traits.turn - 1) / traits.turn, tiles = (p.most_tiles + traits.rows - 1) / traits.rows;
  const int work = turns * traits.turn * tiles * traits.rows * (traits.warps / 4);
  const float rate = costs.product[traits.bits - 1] * costs.tokens[own];
  const float idle = static_cast<float>(blocks) / static_cast<float>(p.grid) - 1.0f;
  const float bytes = static_cast<float>(p.tiles) * static_cast<float>(p.steps * (256 * traits.bits + 32));
  const float doubled = static_cast<float>((traits.warps == 8 ? 3 : 4) - p.warps_k_shift);
  const float memory = bytes / costs.memory * (1.0f + costs.idle * idle) * (1.0f + costs.groups * doubled);
  const float products = static_cast<float>(work) * rate;
  const float most = std::max(products, memory), least = std::min(products, memory);
  const int passes = (p.most_tiles + p.pass_tiles - 1) / p.pass_tiles;
  return costs.start[own] + most + costs.both * least * least / most +
         kXUs * static_cast<float>((steps << p.warps_k_shift) * traits.tokens) +
         costs.sums * static_cast<float>(p.most_tiles) + costs.pass * static_cast<float>(passes - 1) +
         costs.cluster[p.cluster_shift];
}

// Whether K is so long that clusters of 4 and 8 blocks are thought of: x of all of it takes a block's time, and its
// memory. Why not always: nothing gains with fewer k, and each is one more split to look at. Why not of floats that are
// no bytes: not timed.
inline bool has_many_steps(const Traits& traits, const Problem& p) { return p.steps >= 40 && !traits.is_float; }
// The most row groups of a block. Why fewer of more bits, of clusters and of many k: 19456 x 2560, W8 by 8 of whole
// multiprocessors 14.6 us, by 4 13.7, 57344 x 8192 W1 24.8 and 24.5; but 55296 x 5120, two rows, W1 18.4 and 20.3,
// 12288 x 2048 W4 by halves 5.1 and 5.4.
inline int most_groups(const Traits& traits, const Problem& p, int cluster_shift) {
  if (cluster_shift > 1 || p.steps > 40) return 4;
  return traits.bits <= 3 || (traits.bits == 4 && traits.warps == 8) ? 8 : 4;
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
  const int bits = traits.bits;
  // Why late: clusters of a next launch that begins early take the places of this one's, two blocks on a
  // multiprocessor. 3584 x 14336, two rows, W1 by (8, 6) 7.3 us, by this 5.5; 2560 x 9728 5.9 and 4.6.
  if (traits.warps == 8 && p.cluster_shift > 1) return {2, 8};
  if (traits.warps > 8) return {!traits.is_float && (bits == 3 || bits == 5 || bits == 6) ? 2 : 1, 0};
  if (megabytes(p, bits) <= 10) return {4, 4};
  if (bits == 3 || p.steps >= 128) return {8, 6};
  return {bits == 4 || (bits < 3 && p.m > 2) ? 1 : 2, 0};
}

// A problem as it is spread, what it takes of a block's shared memory (0: nothing fits), and what that costs.
struct Spread {
  Problem p;
  int bytes;
  float price;  // us, about
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
      const int groups = traits.warps >> warps_k_shift;
      if (forced.parts ? forced.parts != 1 << warps_k_shift : groups > most_groups(traits, p, cluster_shift)) continue;
      Problem found = p;
      const int need = split(traits, found, cluster_shift, warps_k_shift, launch);
      if (!need) continue;
      const float price = cost(traits, found, launch.clusters[0]);
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
