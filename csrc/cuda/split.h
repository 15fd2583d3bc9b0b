// How the blocks of gemm_sm90's tiles of up to 16 tokens share a product (templates/narrow/split.cuh): rules from what
// was measured on an H200, plain arithmetic on sizes.
#pragma once
#include <cstdint>

#include "../args.h"
#include "../templates/narrow/split.cuh"

namespace lowbit::cuda {

// ---- blocks of 16 warps, which have a multiprocessor each: nanoseconds

// What a block takes for a row tile x 128 k where all of its warps are busy, of n8 and n16, by bits: products of 57344
// x 8192 with 1 to 3 bits, the others by their instructions.
constexpr int kTileNs[2][8] = {{22, 25, 30, 27, 33, 36, 40, 27}, {32, 33, 36, 34, 41, 45, 49, 34}};
constexpr int kBytesPerNs = 31;  // of weights from memory, for a multiprocessor
constexpr int kXNs = 20;         // x of 128 k
constexpr int kAddNs = 2600;     // a second kernel that adds up parts

// As many warps as take the time of these. Why: each of four schedulers has a quarter of them.
constexpr int64_t busy_warps(int warps) { return (warps + 3) / 4 * 4; }

// What blocks take that each walk `own` times 128 k with so many warps and parts of K.
constexpr int64_t block_ns(int64_t own, int warps, int parts, const SplitQuestion& q) {
  const int64_t busy = own * busy_warps(warps) * kTileNs[q.tokens > 8][q.bits - 1];
  const int64_t memory = q.tiles * q.steps * (256 * q.bits + 32) / (int64_t{kBytesPerNs} * q.clusters[0]);
  return (busy > memory ? busy : memory) + own * parts * kXNs;
}

// Whole tasks: those that a block has one after the other, all of K.
constexpr int64_t rounds_of(const Split& split, const SplitQuestion& q) {
  const int64_t together = int64_t{q.clusters[0]} * split.row_tiles;
  return split.blocks == 2 ? 1 : (q.tiles + together - 1) / together;
}
// Why not with fewer warps: they wait for their own results. 37888 x 3584, n16, W6 30.5 us in parts, by 4 warps 45.6.
constexpr bool has_rounds(const Split& split) {
  return split.warps == narrow::kMostWorkers && split.row_tiles >= 8 && split.row_tiles < split.warps;
}
constexpr int64_t own_steps(const Split& split, const SplitQuestion& q) {
  const int64_t slices = split.parts * split.blocks;
  return rounds_of(split, q) * ((q.steps + slices - 1) / slices);
}

// A row tile a warp; what is left of whole tasks is dealt out in parts.
constexpr int64_t dealt_steps(const SplitQuestion& q) {
  const int64_t tasks = (q.tiles + q.warps - 1) / q.warps, most = q.clusters[0];
  return (tasks * q.steps + most - 1) / most;
}
constexpr bool dealt_in_parts(const SplitQuestion& q) { return (q.tiles + q.warps - 1) / q.warps % q.clusters[0] != 0; }
constexpr int64_t dealt_ns(const SplitQuestion& q) {
  return block_ns(dealt_steps(q), q.warps, 1, q) + (dealt_in_parts(q) ? kAddNs : 0);
}

// ---- blocks of 8 warps, which have half of one: row tiles x 128 k

// Warps that are not there cost half of those that are; x of 128 k costs 1.2, with 16 tokens and less than 7 bits 2.4.
constexpr int64_t half_cost(const Split& split, const SplitQuestion& q) {
  const int64_t own = own_steps(split, q), there = split.row_tiles * split.parts;
  return own * ((there + split.warps + 1) / 2) + own * split.parts * (q.tokens > 8 && q.bits < 7 ? 12 : 6) / 5;
}

// How early such a block asks for weights, and lets the next one begin: that takes 1 us, and until its wait is over 2
// more. Measured on an H200, the best of three numbers of stages and four of eighths at 4096 x 4096 to 8192 x 8192 with
// 1, 3, 4 and 8 bits: this is 0.2% slower on average, 1.5% at worst (sweep_splits_20261123_exact.json).
constexpr Split half_of(Split split, const SplitQuestion& q) {
  const int64_t work = q.tiles * q.steps;
  split.early = 3, split.next_after = q.bits >= 7 && q.steps > 64 ? 8 : 6;
  if (q.bits == 1) {
    if (q.tokens > 8 || work <= 8 * 1024) split.early = 1;
  } else if (q.bits <= 4 && work <= 8 * 1024) {
    split.early = 2, split.next_after = 1;
  } else if (q.bits <= 4 && q.tokens <= 8 && q.steps <= 32) {
    split.next_after = 4;
  }
  return split;
}

// Whether blocks of 8 warps are slower than those of 16 where groups are short. With 16 tokens their stages are of 128
// k each, not 256: the end of a product that the next one hides pays for that where warps are few steps at work, all of
// them. Measured on an H200, us, groups of 32, int4 and uint4 with 16 tokens, the best split of 8 and of 16 warps: 4096
// x 4096 5.2 and 5.9, 5.8 and 6.4, 8192 x 3584 7.2 and 8.0, 8.2 and 8.7, but 4608 x 3584 6.8 and 6.3, 7.8 and 6.9, 8192
// x 8192 14.0 and 13.5, 17.1 and 14.9, 4096 x 14336 12.6 and 12.6, 15.0 and 13.6; int8 4608 x 3584 7.2 and 7.8.
constexpr bool too_fine(const Split& split, const SplitQuestion& q) {
  if (!q.fine || q.tokens <= 8 || q.bits == 8) return false;
  return split.row_tiles * split.parts < split.warps || own_steps(split, q) > 16;
}

// How the blocks of gemm_sm90's tiles of up to 16 tokens share a product: the cheapest split by which all tasks run at
// once, or, of 16 warps, in rounds of whole tasks, or dealt out in parts. Blocks of 8 warps come first (gemm_sm90.cuh)
// and have no split where those of 16 are faster: with very many k, and where memory is the limit. Measured on an H200,
// us, the best split of 8 and of 16 warps: 8192 x 8192, n8 W1 7.2 and 8.1, W4 10.2 and 11.2, W8 19.1 and 18.7, n16 W1
// 9.0 and 10.2, W4 11.1 and 12.0; 4096 x 14336, n8 W8 16.4 and 16.1, n16 W1 8.4 and 9.4, W4 10.5 and 11.0; 5120 x
// 27648 W1 19.7 and 15.1.
constexpr Split split_of(const SplitQuestion& q) {
  const bool half = q.warps < narrow::kMostWorkers;
  Split best{q.warps, 1, 1, narrow::early_stages(q.bits), q.warps, 0};
  if (q.clusters[0] < 1) return half ? Split{} : best;
  int64_t least = half ? INT64_MAX : dealt_ns(q);
  if (half) {
    if (q.bits * q.tiles * q.steps >= (q.tokens > 8 && q.bits >= 7 ? 6 : 7) << 15 || q.steps > 128) return {};
    best = {};
  }
  for (int blocks = 2; blocks >= 1; --blocks)
    for (int row_tiles = 1; row_tiles <= q.warps; ++row_tiles)
      for (int parts = q.warps / row_tiles; parts >= 1; --parts) {
        const Split split{row_tiles, parts, blocks, narrow::early_stages(q.bits), q.warps, 0};
        if (!narrow::possible(split, q) || (rounds_of(split, q) > 1 && !has_rounds(split))) continue;
        const int64_t cost = half ? half_cost(split, q) : block_ns(own_steps(split, q), row_tiles * parts, parts, q);
        if (cost < least) best = half ? half_of(split, q) : split, least = cost;
        break;
      }
  if (half && best.row_tiles > 0 && too_fine(best, q)) return {};
  return best;
}

// What a product is by the split that it runs with: blocks of 8 warps come first (gemm_sm90.cuh); work: in steps of 16
// row tiles.
struct NarrowWork {
  int warps;
  float work;
  bool in_parts;
};
constexpr NarrowWork narrow_work(int64_t tiles, int64_t steps, int tokens, int bits, bool fine, const int* clusters) {
  for (int warps = 8;; warps = 16) {
    const SplitQuestion q{tiles, steps, tokens, bits, warps, clusters, ~0u, fine};
    const Split split = split_of(q);
    if (split.row_tiles == 0) continue;
    if (warps < narrow::kMostWorkers) return {warps, static_cast<float>(half_cost(split, q)) / 16, false};
    const bool dealt = split.row_tiles == warps && split.parts * split.blocks == 1;
    const int64_t busy = busy_warps(split.row_tiles * split.parts);
    return {warps, static_cast<float>((dealt ? dealt_steps(q) : own_steps(split, q)) * busy) / 16,
            dealt && dealt_in_parts(q)};
  }
}

}  // namespace lowbit::cuda
