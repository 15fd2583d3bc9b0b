// How the blocks of gemm_sm90's tiles of up to 16 tokens share a product (templates/narrow/split.cuh): rules from what
// was measured on an H200, plain arithmetic on sizes.
#pragma once
#include <cstdint>

#include "../args.h"
#include "../templates/narrow/split.cuh"

namespace lowbit::cuda {

// What a second kernel that adds up parts costs, in row tiles x 128 k of a block: 2.4 us where one takes 0.02 to 0.03.
constexpr int64_t kAddCost = 100;

// What x of 128 k costs a block, in the same unit: it comes as W does, and helping warps add it up. By n16 of int4,
// 4096 x 14336 and 3584 x 14336: 16 x 1 x 1 in parts 14.5 and 13.4 us, 4 x 2 x 2 14.2 and 13.9. With 8 bits that is
// less than half of what codes take: 18.6 and 17.2 us, 4 x 4 x 2 17.9 and 16.7.
constexpr int64_t x_cost(int64_t steps, const SplitQuestion& q) {
  return steps * (q.tokens > 8 && q.bits < 7 ? 12 : 6) / 5;
}

// What a block takes, in row tiles x 128 k. Of 8 warps those that are not there cost half of those that are.
constexpr int64_t split_cost(const Split& split, const SplitQuestion& q) {
  const int64_t slices = split.parts * split.blocks, own = (q.steps + slices - 1) / slices;
  const int64_t there = split.row_tiles * split.parts;
  const int64_t busy = split.warps < narrow::kMostWorkers ? (there + split.warps + 1) / 2 : there;
  return own * busy + x_cost(own * split.parts, q);
}

// The same where tasks have a row tile a warp, and what is left of them is dealt out in parts.
constexpr int64_t dealt_cost(const SplitQuestion& q) {
  const int64_t tasks = (q.tiles + q.warps - 1) / q.warps, all = tasks * q.steps, most = q.clusters[0];
  return (all * q.warps + most - 1) / most + x_cost(all / most, q);
}
constexpr bool dealt_in_parts(const SplitQuestion& q) { return (q.tiles + q.warps - 1) / q.warps % q.clusters[0] != 0; }

// How early a block of half a multiprocessor asks for weights, and lets the next one begin: that takes 1 us, and until
// its wait is over 2 more. Measured on an H200, the best of three numbers of stages and four of eighths at 3584 x 14336
// to 8192 x 8192 with 1 to 8 bits; this is 1.2% slower on average, 4.3% at worst.
constexpr Split half_of(Split split, const SplitQuestion& q) {
  constexpr int kEarly16[8] = {2, 2, 2, 1, 3, 3, 2, 2};
  split.early = q.tokens > 8 ? kEarly16[q.bits - 1] : q.bits == 1 && q.steps <= 32 ? 1 : 3;
  split.next_after = 6;
  if (q.tokens <= 8 && q.bits <= 4 && q.steps <= 32) split.next_after = 4;
  if (q.tokens <= 8 && q.bits >= 7 && q.steps > 64) split.next_after = 8;
  return split;
}

// How the blocks of gemm_sm90's tiles of up to 16 tokens share a product: the cheapest split by which all tasks run at
// once; of 16 warps also 16 x 1 x 1, by which parts of tasks may be dealt out. Blocks of 8 warps come first
// (gemm_sm90.cuh) and have no split where those of 16 are faster: with 16 tokens and many k, and where memory is the
// limit. Measured on an H200, us, the best split of 16 and of 8 warps: 8192 x 8192, n8 W1 9.0 and 8.0, W4 11.3
// and 10.3, W8 19.1 and 19.3, n16 W1 12.6 and 10.5, W4 14.4 and 13.4; 4096 x 4096 4.4 and 3.7, 5.4 and 4.2, 6.6
// and 5.6, 5.6 and 4.9, 6.2 and 5.7; 4096 x 14336, n16, W1 12.4 and 11.9, W4 14.2 and 14.9, W8 17.3 and 17.9.
constexpr Split split_of(const SplitQuestion& q) {
  const bool half = q.warps < narrow::kMostWorkers;
  Split best{q.warps, 1, 1, narrow::early_stages(q.bits), q.warps, 0};
  if (q.clusters[0] < 1) return half ? Split{} : best;
  int64_t least = dealt_cost(q) + (dealt_in_parts(q) ? kAddCost : 0);
  if (half) {
    if (q.bits * q.tiles * q.steps >= 1 << 18 || q.steps > (q.tokens > 8 ? 80 : 128)) return {};
    best = {}, least = INT64_MAX;
  }
  for (int blocks = 2; blocks >= 1; --blocks)
    for (int row_tiles = 1; row_tiles <= q.warps; ++row_tiles)
      for (int parts = q.warps / row_tiles; parts >= 1; --parts) {
        const Split split{row_tiles, parts, blocks, narrow::early_stages(q.bits), q.warps, 0};
        if (!narrow::possible(split, q) || q.tiles > int64_t{q.clusters[0]} * row_tiles) continue;
        const int64_t cost = split_cost(split, q);
        if (cost < least) best = half ? half_of(split, q) : split, least = cost;
        break;
      }
  return best;
}

// What a product is by the split that it runs with: blocks of 8 warps come first (gemm_sm90.cuh), which have no kernels
// for fine groups; work: in steps of 16 row tiles.
struct NarrowWork {
  int warps;
  float work;
  bool in_parts;
};
constexpr NarrowWork narrow_work(int64_t tiles, int64_t steps, int tokens, int bits, bool fine, const int* clusters) {
  for (int warps = fine ? 16 : 8;; warps = 16) {
    const SplitQuestion q{tiles, steps, tokens, bits, warps, clusters, ~0u};
    const Split split = split_of(q);
    if (split.row_tiles == 0) continue;
    const bool dealt = split.row_tiles == narrow::kMostWorkers && split.parts * split.blocks == 1;
    return {warps, static_cast<float>(dealt ? dealt_cost(q) : split_cost(split, q)) / 16, dealt && dealt_in_parts(q)};
  }
}

}  // namespace lowbit::cuda
