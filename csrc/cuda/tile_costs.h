// Times of gemm_sm90's tiles of more than 16 tokens, in all kinds of blocks that they come in: costs measured on an
// H200, plain arithmetic on sizes.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../args.h"
#include "../templates/deal.cuh"
#include "../templates/wide_blocks.cuh"
#include "split.h"

namespace lowbit::cuda {

constexpr float kLast = 1e9f;  // costs from here on only rank tiles

// What family gemm_sm90 takes of time: us = start + work + ends. Work is the steps of 128 k of the busiest worker
// (deal.cuh) times `step`, but no less than what workers have on average times `hot`, because the device slows down at
// its limit of power where all of them work, and no less than memory takes. A step is one of 256 rows of W with 256
// tokens, else 128. Ends: `meet` where sums of two blocks meet, `more` for each block more, `parts` where a second
// kernel adds them up, `turn` for each whole task of a worker but the first. Fitted by benchmarks/fit_tile_costs.py to
// products on an H200: 915 of int1 to int8 with even scales (17 shapes, 24 to 2048 rows, from 96 on each tile after 40
// to 60 ms of itself; nvidia-h200/tiles_20261130*.json, table_20261130.json, plan_before_20261130.json), of which the
// tile and blocks with the least are 0.4% slower than the fastest ones on average, within 5% in 98%, 11% at worst; and
// 2996 of before, of exact values, with uneven scales, of other weights and short groups (33 shapes;
// tiles_*20261127*.json, tiles_20261125.json, tiles_20261129_floats.json), 0.5% slower, within 5% in 97%, 19% at worst.
struct TileCost {
  int tokens, rows, workers;  // workers: index into clusters
  float start, meet, more, parts, turn;
  float step[8];  // by bits, from 1
};
constexpr TileCost kTileCosts[] = {
    {32, 128, 0, 2.29f, 0.58f, 0.00f, 2.29f, 0.65f, {0.28f, 0.28f, 0.33f, 0.32f, 0.39f, 0.40f, 0.43f, 0.38f}},
    {48, 128, 0, 2.53f, 0.62f, 0.09f, 2.83f, 1.24f, {0.33f, 0.34f, 0.36f, 0.35f, 0.45f, 0.45f, 0.53f, 0.41f}},
    {64, 128, 0, 1.97f, 1.16f, 0.08f, 3.16f, 0.69f, {0.45f, 0.45f, 0.51f, 0.47f, 0.57f, 0.57f, 0.63f, 0.53f}},
    {96, 128, 0, 1.23f, 1.72f, 0.35f, 4.78f, 0.98f, {0.60f, 0.59f, 0.67f, 0.62f, 0.71f, 0.69f, 0.73f, 0.68f}},
    {128, 128, 0, 1.80f, 1.60f, 0.57f, 5.68f, 0.92f, {0.71f, 0.70f, 0.75f, 0.74f, 0.80f, 0.78f, 0.83f, 0.83f}},
    {144, 128, 0, 1.55f, 2.21f, 0.84f, 6.23f, 0.97f, {0.85f, 0.83f, 0.96f, 0.86f, 0.90f, 0.93f, 0.93f, 0.94f}},
    {160, 128, 0, 1.79f, 1.87f, 1.10f, 6.44f, 1.03f, {0.92f, 0.87f, 0.97f, 0.94f, 0.97f, 1.01f, 1.02f, 1.02f}},
    {192, 128, 0, 0.43f, 3.73f, 1.20f, 8.41f, 0.10f, {1.08f, 1.05f, 1.12f, 1.10f, 1.16f, 1.24f, 1.17f, 1.17f}},
    {208, 128, 0, 1.13f, 2.40f, 1.38f, 7.22f, 1.21f, {1.17f, 1.14f, 1.21f, 1.20f, 1.25f, 1.29f, 1.29f, 1.26f}},
    {256, 256, 1, 0.92f, 4.74f, 0.67f, 10.58f, 0.01f, {1.45f, 1.38f, 1.49f, 1.48f, 1.60f, 1.60f, 1.62f, 1.59f}},
};

// `hot` of these tiles, by bits, from 1. Of 32 to 96 tokens and 2 bits not as fitted, 0.25, 0.28, 0.33, 0.50: what was
// timed is chosen as well by these, and from 2048 rows on, where such tiles were not timed, n256 is.
struct HotSteps {
  int tokens;
  float step[8];
};
constexpr HotSteps kHotSteps[] = {
    {32, {0.27f, 0.28f, 0.31f, 0.32f, 0.35f, 0.46f, 0.50f, 0.42f}},
    {48, {0.36f, 0.34f, 0.40f, 0.39f, 0.48f, 0.53f, 0.50f, 0.46f}},
    {64, {0.44f, 0.42f, 0.48f, 0.51f, 0.56f, 0.60f, 0.65f, 0.59f}},
    {96, {0.61f, 0.55f, 0.63f, 0.66f, 0.74f, 0.78f, 0.84f, 0.76f}},
    {128, {0.79f, 0.72f, 0.80f, 0.83f, 0.86f, 0.88f, 0.96f, 0.90f}},
    {144, {0.90f, 0.88f, 0.99f, 0.93f, 0.98f, 1.01f, 1.07f, 1.03f}},
    {160, {0.99f, 0.94f, 1.10f, 1.01f, 1.08f, 1.11f, 1.15f, 1.13f}},
    {192, {1.15f, 1.08f, 1.23f, 1.18f, 1.27f, 1.28f, 1.31f, 1.27f}},
    {208, {1.25f, 1.19f, 1.30f, 1.30f, 1.41f, 1.41f, 1.40f, 1.42f}},
    {256, {1.52f, 1.43f, 1.55f, 1.53f, 1.63f, 1.64f, 1.67f, 1.64f}},
};
// Why looked for: a place in kTileCosts is none here, since each unit that includes this has an array of its own, while
// an inline function is that of one of them.
constexpr float hot_step(int tokens, int bits) {
  for (const HotSteps& hot : kHotSteps)
    if (hot.tokens == tokens) return hot.step[bits - 1];
  return 0.0f;
}
constexpr bool all_hot() {
  for (const TileCost& cost : kTileCosts)
    if (hot_step(cost.tokens, 1) == 0) return false;
  return true;
}
static_assert(all_hot(), "a tile has no time at the limit of power");

// A product by a tile of more than 16 tokens. kind: kernels of fine groups serve zeros that are no part of a value's
// number, also of longer ones, so that both are set. columns: the share of a tile's that are multiplied; bf16: of x;
// even: whether there are no zeros and scales are even.
struct WideTasks {
  int64_t row_tiles, token_tiles, steps;
  int bits;
  WeightKind kind;
  const int* clusters;
  float memory, columns;
  bool bf16 = false, even = false;

  constexpr int64_t row_blocks(int of_tiles) const { return (row_tiles + of_tiles - 1) / of_tiles; }
};

// What a step takes of other weights beside integers in groups of 128 and more: floats of such, integers and floats in
// short groups, zeros that are no part of a value's number; floats beside bf16. By tiles of 32, 48, 64, 96 and 128, 144
// to 208, 256 tokens; by halves of 32 and 64; by 64 rows of 32 and of more. Floats beside fp16:
// nvidia-h200/tiles_20261129_floats.json (432 products, 0.2% lost).
constexpr float kKindWork[6][10] = {
    {1.04f, 1.00f, 0.95f, 0.93f, 1.00f, 0.93f, 1.30f, 1.08f, 1.04f, 0.99f},  // float
    {1.22f, 1.00f, 1.02f, 0.92f, 1.00f, 0.94f, 1.27f, 1.00f, 1.18f, 1.01f},  // fine
    {1.28f, 1.00f, 1.04f, 0.94f, 1.00f, 0.91f, 1.45f, 1.00f, 1.28f, 1.07f},  // fine float
    {1.46f, 1.12f, 1.16f, 1.02f, 1.08f, 1.02f, 1.59f, 1.11f, 1.37f, 1.16f},  // zeros
    {1.30f, 1.00f, 1.13f, 1.03f, 1.00f, 1.00f, 1.28f, 1.15f, 1.22f, 1.12f},  // float, bf16
    {1.45f, 1.00f, 1.18f, 1.05f, 1.00f, 0.96f, 1.59f, 1.00f, 1.37f, 1.18f},  // fine float, bf16
};

// block_tiles: row tiles of a block that has one task, 0 of others.
constexpr float kind_work(const WeightKind& kind, bool bf16, int tokens, int block_tiles) {
  const int of_float = bf16 ? 4 + kind.fine : 2 * kind.fine, of_integer = kind.fine ? 1 : -1;
  const int row = kind.any_zeros ? 3 : kind.is_float ? of_float : of_integer;
  const int of_whole = tokens == 32    ? 0
                       : tokens == 48  ? 1
                       : tokens == 64  ? 2
                       : tokens <= 128 ? 3
                       : tokens < 256  ? 4
                                       : 5;
  const int of_block = (block_tiles == 4 ? 8 : 6) + (tokens != 32), column = block_tiles == 0 ? of_whole : of_block;
  // Values of a codebook are looked up. Measured, us, groups of 64, beside int4: n64 27.8 and 22.4, n256 57.5 and 54.
  const float codebook = !kind.codebook ? 1.0f : tokens < 256 ? 1.25f : 1.07f;
  return codebook * (row < 0 ? 1.0f : kKindWork[row][column]);
}

// What a step takes where values are rounded and costs were fitted to exact ones (nvidia-h200/rounds_20261129.json);
// where they are fused (fused_20261129*.json, pairs_20261130*.json). By tiles of 32, 48, 64, 96, 128 tokens, and more;
// by bits, from 1.
constexpr float kRoundedWork[2][6][8] = {{{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f},
                                          {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f},
                                          {1.0f, 1.0f, 0.97f, 0.986f, 0.945f, 0.957f, 0.971f, 1.0f},
                                          {1.0f, 1.0f, 0.946f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f},
                                          {1.0f, 0.961f, 0.975f, 0.987f, 0.972f, 1.0f, 1.0f, 0.964f},
                                          {1.0f, 1.0f, 1.0f, 1.0f, 0.984f, 0.983f, 1.0f, 1.0f}},
                                         {{1.0f, 1.0f, 0.965f, 1.0f, 0.93f, 1.0f, 1.0f, 1.0f},
                                          {0.83f, 0.91f, 0.92f, 0.97f, 0.935f, 0.955f, 0.975f, 0.97f},
                                          {0.885f, 0.855f, 0.865f, 0.905f, 0.87f, 0.92f, 0.90f, 0.965f},
                                          {0.91f, 0.89f, 0.85f, 0.905f, 0.87f, 0.935f, 0.965f, 0.94f},
                                          {1.0f, 0.95f, 0.955f, 0.97f, 0.935f, 0.98f, 0.965f, 0.935f},
                                          {1.0f, 1.0f, 1.0f, 1.0f, 0.975f, 0.975f, 0.99f, 1.0f}}};
constexpr float rounded_work(const WideTasks& w, int tokens) {
  const bool other = w.kind.is_float || w.kind.codebook || w.kind.fine || w.kind.any_zeros;  // fitted as it is
  if (other || !(w.even ? fuses_values : rounds_values)(w.bits, tokens, !w.bf16)) return 1.0f;
  const int tile = tokens == 32 ? 0 : tokens == 48 ? 1 : tokens == 64 ? 2 : tokens == 96 ? 3 : tokens == 128 ? 4 : 5;
  return kRoundedWork[w.even][tile][w.bits - 1];
}

constexpr float whole_us(const WideTasks& w, const TileCost& cost) {
  const bool paired = cost.rows == 256;
  const int64_t rows = w.row_blocks(8), tasks = rows * w.token_tiles, pairs = (rows + 1) / 2 * w.token_tiles;
  const int most = w.clusters[0];
  if (most < 1 || w.clusters[cost.workers] < 1 || std::max(tasks, w.steps * most) > INT32_MAX) return kLast;
  // Clusters of 3 and 4 as of an H200: the last part of a GPU may be too small for one.
  const int two = w.clusters[1];
  const MostClusters clusters = {{0, most, two, two * 3 / 5, two * 15 / 32}};
  const int all = static_cast<int>(tasks), each = static_cast<int>(w.steps);
  const MeetingDeal dealt = paired ? best_deal_of_pairs(static_cast<int>(pairs), all, each, clusters, kMostMeet)
                                   : best_deal(all, each, clusters, kMostMeet, kMeetSaves);
  const bool in_pairs = paired && dealt.meet == 1;
  const float longest = static_cast<float>(dealt.longest());
  const float average = static_cast<float>(in_pairs ? pairs : tasks) * static_cast<float>(w.steps) /
                        static_cast<float>(in_pairs ? two : most);
  const float step = cost.step[w.bits - 1] * rounded_work(w, cost.tokens);
  const float hot = hot_step(cost.tokens, w.bits);
  const float work = std::max(longest * step, average * hot) * w.columns * kind_work(w.kind, w.bf16, cost.tokens, 0);
  const int64_t turns = (tasks - 1) / most;
  const float ends = (dealt.in_parts() ? cost.parts : 0.0f) + cost.turn * static_cast<float>(turns) +
                     (dealt.meet > 1 ? cost.meet + cost.more * static_cast<float>(dealt.meet - 2) : 0.0f);
  return cost.start + std::max(work, w.memory) + ends;
}

// The same of blocks that have one task each or their part of it (templates/wide_blocks.cuh): us = start + work. start:
// by blocks whose sums meet, one, two or four. Why not halves with many steps: a ring of half of a multiprocessor is
// short. Measured on an H200, us, 64 rows, int4, by whole ones and by halves: 8192 x 8192 18.0 and 19.0, 4096 x 14336
// 17.5 and 18.9. Why not 64 rows: x that comes twice costs energy, and the device is at its limit of power in long
// products; each side after 90 ms of itself, 96 rows, int8, 8192 x 28672 beside what it took before +20%, cuBLAS +5%.
struct BlockCost {
  int tokens, row_tiles, most_blocks, most_steps;  // row_tiles: 8 of halves, 4 of blocks whose warpgroups share K
  float start[3];
  float idle;     // the share of a step that multiprocessors without a block would save the others, which share a cache
  float step[8];  // by bits, from 1
};
constexpr BlockCost kBlockCosts[] = {
    {32, 8, 4, 32, {1.90f, 2.26f, 2.14f}, 0.01f, {0.27f, 0.28f, 0.32f, 0.29f, 0.40f, 0.39f, 0.45f, 0.45f}},
    {64, 8, 4, 24, {1.82f, 2.78f, 2.74f}, 0.00f, {0.41f, 0.41f, 0.49f, 0.47f, 0.50f, 0.50f, 0.55f, 0.55f}},
    {32, 4, 2, 48, {1.95f, 2.60f, 0.00f}, 0.50f, {0.19f, 0.20f, 0.23f, 0.22f, 0.26f, 0.25f, 0.28f, 0.23f}},
    {48, 4, 2, 48, {1.93f, 2.67f, 0.00f}, 0.38f, {0.22f, 0.22f, 0.25f, 0.24f, 0.29f, 0.28f, 0.30f, 0.26f}},
    {64, 4, 2, 48, {2.11f, 2.84f, 0.00f}, 0.35f, {0.25f, 0.26f, 0.29f, 0.27f, 0.31f, 0.31f, 0.34f, 0.29f}},
    {96, 4, 2, 48, {2.51f, 3.33f, 0.00f}, 0.29f, {0.30f, 0.31f, 0.33f, 0.31f, 0.35f, 0.35f, 0.37f, 0.35f}},
};

constexpr bool has_blocks(const BlockCost& cost, int bits, const WeightKind& kind) {
  return cost.row_tiles == 4 ? shares_rows(cost.tokens, kind.codebook, kind.fine)
                             : has_halves(cost.tokens, bits, kind.is_float, kind.codebook, kind.fine);
}

// The time by the fastest kind of blocks; blocks: how many of them add up their sums, 0 where no kind holds it.
struct BlockTime {
  float us;
  int blocks, row_tiles;
};
constexpr BlockTime block_time(const WideTasks& w, int tokens) {
  BlockTime best{kLast, 0, 0};
  for (const BlockCost& cost : kBlockCosts) {
    if (cost.tokens != tokens || !has_blocks(cost, w.bits, w.kind)) continue;
    const int parts = 8 / cost.row_tiles;  // of K, in a block
    for (int i = 0; 1 << i <= cost.most_blocks; ++i) {
      const int blocks = 1 << i;  // clusters of four as of an H200
      const int64_t most = i == 2 ? w.clusters[1] * 15 / 32 : w.clusters[i];
      const int64_t steps = (w.steps + blocks - 1) / blocks, tasks = w.row_blocks(cost.row_tiles) * w.token_tiles;
      if (tasks > most || w.steps < 2 * blocks * parts || steps > cost.most_steps) continue;
      const float idle = 1 - static_cast<float>(tasks * blocks) / static_cast<float>(w.clusters[0]);
      const float step = cost.step[w.bits - 1] * (1 - cost.idle * idle) * w.columns *
                         kind_work(w.kind, w.bf16, tokens, cost.row_tiles) * rounded_work(w, tokens);
      const float us = cost.start[i] + std::max(static_cast<float>(steps) * step, w.memory);
      if (us < best.us) best = {us, blocks, cost.row_tiles};
    }
  }
  return best;
}

// What kernels that may share K are told: of up to 16 tokens by split.h, of more which blocks they take, and no split
// where whole ones are faster. Kernels do not say what type x has, nor whether scales are even: floats beside bf16 get
// the blocks of those beside fp16, and integers those of even scales, which most weights have.
constexpr Split plan_split(const SplitQuestion& q) {
  if (q.tokens <= 16) return split_of(q);
  const float bytes = static_cast<float>(q.tiles) * static_cast<float>(q.steps * (256 * q.bits + 32));
  const WideTasks w{q.tiles,    q.token_tiles,       q.steps, q.bits, q.kind,
                    q.clusters, bytes / kBytesPerUs, 1.0f,    false,  true};
  for (const TileCost& cost : kTileCosts) {
    if (cost.tokens != q.tokens) continue;
    const BlockTime found = block_time(w, q.tokens);
    if (found.blocks == 0 || found.us >= whole_us(w, cost)) return {};
    // When the next block begins hardly counts: of five pairs of stages and eighths this one is 0.6% slower than the
    // best on average, 7% at worst (710 products).
    return found.row_tiles == 8 ? Split{8, 1, found.blocks, 2, 8, 4, 0} : Split{4, 2, found.blocks, 1, 16, 0, 0};
  }
  return {};
}

}  // namespace lowbit::cuda
