// How the blocks of gemm_sm90's tiles of up to 16 tokens share a product (templates/narrow/split.cuh): the split that
// takes the least time, by costs measured on an H200. Plain arithmetic on sizes.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../args.h"
#include "../templates/narrow/split.cuh"

namespace lowbit::cuda {

// What the time of a split depends on.
struct SplitWork {
  int64_t steps;  // of 128 k that a warp walks
  int busy;       // warps of a scheduler that has the most: each of four has a quarter of a multiprocessor's
  int64_t turns;  // whole tasks of a block beyond the first, one after the other
  bool in_parts;  // whether a second kernel adds up sums of parts
};

constexpr int64_t ceil_div(int64_t all, int64_t by) { return (all + by - 1) / by; }

constexpr SplitWork work_of(const Split& split, const SplitQuestion& q) {
  const int own = narrow::stage_steps(q.tokens, q.bits, split.warps, q.kind.fine);
  const int64_t tasks = ceil_div(q.tiles, split.row_tiles), most = int64_t{q.clusters[0]} << split.two_each;
  SplitWork work{0, (split.row_tiles * split.parts + 3) / 4 << split.two_each, 0, false};
  if (narrow::is_dealt(split)) {
    work.steps = ceil_div(ceil_div(tasks * q.steps, most), own) * own;
    work.in_parts = tasks % most != 0;
    return work;
  }
  if (split.blocks == 1) work.turns = ceil_div(tasks, most) - 1;
  work.steps = (work.turns + 1) * ceil_div(ceil_div(q.steps, own * split.parts), split.blocks) * own;
  return work;
}

// Microseconds, about. Products are the steps of a warp times `step` for each warp of a scheduler, and for `waits`
// more, in which it waits for its own results. Of products and memory the lesser comes beside the greater, but for
// `both` of its share of it. Fitted by benchmarks/fit_split_costs.py to products on an H200 (fp16, group 128, int1 to
// int8, 37 shapes from 1024 x 3072 to 37888 x 3584; nvidia-h200/sweep_splits_20261128_n8_n16.json, of more than 16896
// rows _20261127_n8_n16): of 484 products the split with the least is 0.6% slower than the fastest one on average,
// within 5% in 98%, 10% at worst. kTwoCosts, of two blocks of half of a multiprocessor on each, beside these
// (20261129_two_each_n8_n16): with them 0.7%, 97%, 10% of 565 products.
struct SplitCosts {
  float start[2], waits[2], x[2];  // of n8, n16; x: of 128 k of it
  float step[2][8];                // by bits, from 1
  float both;
  float sums;         // of a row tile and 8 tokens, whenever twice as many parts of K meet
  float pair;         // of a cluster of two blocks, the less the longer a product takes
  float turn, parts;  // of a task beyond the first; of the second kernel
};
constexpr SplitCosts kHalfCosts = {{1.0f, 1.16f},
                                   {1.45f, 0.854f},
                                   {0.0104f, 0.0222f},
                                   {{0.0461f, 0.0531f, 0.0648f, 0.0597f, 0.0779f, 0.0958f, 0.109f, 0.0912f},
                                    {0.0734f, 0.0777f, 0.0891f, 0.0832f, 0.135f, 0.131f, 0.151f, 0.111f}},
                                   0.525f,
                                   0.00031f,
                                   0.147f,
                                   0.0f,
                                   0.0f};
constexpr SplitCosts kWholeCosts = {{1.07f, 1.24f},
                                    {0.295f, 0.39f},
                                    {0.0107f, 0.0136f},
                                    {{0.0739f, 0.0792f, 0.1f, 0.0915f, 0.135f, 0.139f, 0.161f, 0.158f},
                                     {0.1f, 0.101f, 0.113f, 0.107f, 0.153f, 0.153f, 0.177f, 0.155f}},
                                    1.32f,
                                    0.0255f,
                                    0.0526f,
                                    0.444f,
                                    2.58f};
constexpr SplitCosts kTwoCosts = {{0.672f, 0.697f},
                                  {0.764f, 0.522f},
                                  {0.00489f, 0.0227f},
                                  {{0.0698f, 0.0700f, 0.0836f, 0.0775f, 0.0936f, 0.120f, 0.141f, 0.114f},
                                   {0.0966f, 0.0903f, 0.101f, 0.0882f, 0.149f, 0.152f, 0.176f, 0.120f}},
                                  1.41f,
                                  0.00112f,
                                  1.06f,
                                  0.0f,
                                  0.0f};
constexpr float kBytesPerUs = 4.3e6f;  // of weights from memory

// Bytes of a row tile x 128 k: codes, scales of each group, zeros.
constexpr int step_bytes(int bits, const WeightKind& kind) {
  const int groups = kind.fine ? 2 << kind.shorter : 1;
  return 256 * bits + 32 * groups * (kind.zeros() ? 2 : 1);
}

// What a step takes more of other weights beside integers in groups of 128 k and more: whole zeros and others; short
// groups, with none, whole and other zeros; floats, and those in short groups. By blocks of half of a multiprocessor,
// of all of it, two of half of it on each (not thought of with other zeros), by n8 and n16. Why more, not times: scales
// and zeros take as many instructions whatever the width. Fitted by benchmarks/fit_kind_costs.py to products on an H200
// (34 weights, 18 shapes; nvidia-h200/sweep_splits_20261128_kinds*.json, 20261129_two_each_of_kinds.json): of 928
// products the split with the least is 0.9% slower than the fastest one on average, within 5% in 95%, 19% at worst; by
// the costs of integers, of 504 of them, 2.3%, 83%, 24%.
constexpr float kNarrowKinds[7][3][2] = {
    {{0.00387f, 0.00827f}, {0.00505f, 0.00426f}, {0.00730f, 0.0120f}},       // whole zeros
    {{0.000765f, -0.0264f}, {-0.00431f, -0.0176f}, {0.0187f, -0.0337f}},     // other zeros
    {{0.00983f, 0.0291f}, {0.0134f, 0.0182f}, {0.0106f, 0.0310f}},           // short groups
    {{0.0221f, 0.0501f}, {0.0262f, 0.0335f}, {0.0250f, 0.0472f}},            // and whole zeros
    {{0.0552f, 0.0100f}, {0.0338f, 0.0551f}, {0.0491f, 0.0100f}},            // and other zeros: no halves of 16 tokens
    {{-0.00246f, -0.00707f}, {0.00590f, 0.00489f}, {0.000929f, -0.00185f}},  // floats
    {{0.00700f, 0.0248f}, {0.0143f, 0.0240f}, {0.0105f, 0.0316f}},           // floats in short groups
};
constexpr float kShorterWork[2] = {1.93f, 1.43f};  // of n8, n16: times that, with groups of 32, and once more of 16
// Times that of a step of floats of 3 to 8 bits, by blocks of each kind. Seven bits: as six, not timed.
constexpr float kFloatWork[6][3] = {{1.26f, 1.15f, 1.27f}, {1.35f, 1.23f, 1.35f}, {1.03f, 0.892f, 1.00f},
                                    {1.30f, 1.18f, 1.24f}, {1.30f, 1.18f, 1.24f}, {1.15f, 0.963f, 1.17f}};
// What x takes where zeros are no whole numbers, of n8 and n16: helping warps add it up, for each part of K.
constexpr float kAnyZerosX[2] = {2.69f, 5.91f};
// Values of a codebook are looked up, in a table that a block makes first: times that of such a step of an integer, as
// kNarrowKinds, and microseconds more at the start, of n8 and n16. Fitted to 56 products (14 shapes, groups of 64 and
// 128; nvidia-h200/sweep_splits_20261201_codebooks.json): of these the split with the least is 2.3% slower than the
// fastest one on average, by 1.25 for all of them 3.7%.
constexpr float kCodebookWork[3][2] = {{1.83f, 1.57f}, {1.57f, 1.46f}, {1.87f, 1.80f}};
constexpr float kCodebookStart[2] = {0.177f, 0.363f};

// The row of kNarrowKinds, -1 of weights that cost what such integers do. Floats with zeros: as integers with them.
constexpr int narrow_row(const WeightKind& kind) {
  const int zeros = kind.any_zeros ? 2 : kind.whole_zeros ? 1 : 0;
  return kind.is_float && !zeros ? 5 + kind.fine : kind.fine ? 2 + zeros : zeros - 1;
}

// blocks: as in kNarrowKinds; step: of the integer as wide.
constexpr float narrow_step(const WeightKind& kind, int bits, int blocks, int own, float step) {
  const int row = narrow_row(kind);
  float more = row < 0 ? 0.0f : kNarrowKinds[row][blocks][own];
  for (int i = 0; i < kind.shorter; ++i) more *= kShorterWork[own];
  const float books = kind.codebook ? kCodebookWork[blocks][own] : 1.0f;
  return (step * (kind.is_float ? kFloatWork[bits - 3][blocks] : 1.0f) + more) * books;
}

// Pairs of blocks whose warps each have rows of their own, on halves of multiprocessors that are nearly all taken: with
// 5 to 8 bits and many k single blocks, or two on each, of as many slices of K are faster. Measured on an H200
// (nvidia-h200/full_pairs_20261129.json, two_each_fill_20261130.json), us, before and so, 8192 x 8192: uint8 with 8
// rows 19.7 and 18.0, float8_e4m3 with 1 to 8 19.1 to 19.3 and 18.0 to 18.3, int5 12.6 and 12.0, int7 16.7 and 16.2;
// with 16 rows int8 18.8 and 18.4, int6 15.4 and 14.6; 7168 x 8192, 8 bits with 8 rows 1.7 to 3.4% less. Why nearly
// all: 6656 x 8192, float8_e4m3 1.4% more, 7168 x 8192 with 16 rows 0.6 to 1.4%, with 8 and 6, 7 bits 1 to 3%. Why many
// k: 8192 x 3584, int8 with 16 rows, would take 6% more. Why not 5 and 7 bits with 16 rows: nothing, and -3 to +4%.
constexpr float kFullPairs = 1.05f;
constexpr bool is_full_of_pairs(const Split& split, const SplitQuestion& q) {
  const bool pairs = split.warps < narrow::kMostWorkers && split.row_tiles == split.warps && split.blocks == 2;
  if (!pairs || split.two_each || q.kind.fine || q.steps < 56) return false;
  if (q.tokens > 8 ? q.bits != 6 && q.bits != 8 : q.bits < 5) return false;
  const int64_t taken = ceil_div(q.tiles, split.row_tiles), most = narrow::at_once(split, q);
  return q.tokens == 8 && q.bits == 8 ? taken * 6 >= most * 5 : taken * 16 >= most * 15;
}

constexpr float split_us(const Split& split, const SplitQuestion& q) {
  const int blocks = split.warps == narrow::kMostWorkers ? 1 : 2 * split.two_each;
  const SplitCosts& costs = blocks == 1 ? kWholeCosts : blocks ? kTwoCosts : kHalfCosts;
  const SplitWork work = work_of(split, q);
  const int own = q.tokens > 8, columns = q.tokens / 8;
  const auto steps = static_cast<float>(work.steps);
  const float step = narrow_step(q.kind, q.bits, blocks, own, costs.step[own][q.bits - 1]);
  const float x = costs.x[own] * (q.kind.any_zeros ? kAnyZerosX[own] : 1.0f);
  const float products = steps * (static_cast<float>(work.busy) + costs.waits[own]) * step;
  const float bytes = static_cast<float>(q.tiles) * static_cast<float>(q.steps * step_bytes(q.bits, q.kind));
  const float memory = bytes / kBytesPerUs;
  const float most = std::max(products, memory), least = std::min(products, memory);
  int doubled = 0;
  for (int all = split.parts * split.blocks - 1; all > 0; all /= 2) ++doubled;  // three parts meet as four do
  const float start = costs.start[own] + (q.kind.codebook ? kCodebookStart[own] : 0.0f);
  return start + most * (is_full_of_pairs(split, q) ? kFullPairs : 1.0f) + costs.both * least / most +
         x * steps * static_cast<float>(split.parts) +
         costs.sums * static_cast<float>(doubled * split.row_tiles * columns) +
         (split.blocks > 1 ? costs.pair / (1 + most) : 0.0f) + costs.turn * static_cast<float>(work.turns) +
         (work.in_parts ? costs.parts : 0.0f);
}

// How early a block of half of a multiprocessor asks for weights, and lets the next one begin: when its own end is as
// far as the next block's weights need, some 40 to 65 KB of it. One whose weights its ring holds has asked for all of
// them soon; of a larger one the next block's weights would come before its own. Measured on an H200, the best of seven
// pairs of stages and eighths for 702 splits (31 shapes, int1 to int8; sweep_splits_20261128_n8_n16.json): this is 0.7%
// slower on average with 8 tokens, 1.1% with 16, 11% at worst; without the last step 8192 x 8192, int8 and 8 tokens
// by 4 x 2 x 1 takes 18.7 us, so 17.9 (_halves_early).
// Of two blocks each the one that begins second asks for one stage, the other one for two or all of them: of splits by
// 1, 2 and all (sweep_splits_20261129_two_each_n8_n16.json) this is 0.6% slower than the best on average, always two
// 1.1%, always all 0.9%.
constexpr Split half_of(Split split, const SplitQuestion& q) {
  const int64_t bytes = q.tiles * q.steps * (256 * q.bits + 32) / q.clusters[0];  // of a multiprocessor
  if (split.two_each) {
    const int few = q.tokens > 8 ? (bytes > 300'000 ? 5 : 6) : bytes > 260'000 ? 4 : 5;  // bits, the most
    split.early = q.bits > few || (q.bits == 4 && q.tokens == 8) ? kAllEarly : 2;
    return split;
  }
  split.early = bytes <= 66'000 ? 2 : 3;
  split.next_after = bytes <= 66'000 ? 3 : bytes <= 120'000 ? 5 : bytes <= 265'000 ? 6 : 7;
  return split;
}

// A split and its time.
struct TimedSplit {
  Split split;
  float us;
};
constexpr float kNoSplit = 1e30f;

// Why: they fall behind with very many k. Measured on an H200, us, 8192 x 28672, the best split of 8 and of 16 warps:
// n8 W2 24.3 and 22.4, n16 W4 35.3 and 33.2, W6 49.4 and 45.8.
constexpr int kMostStepsOfHalves = 128;

// Whether two blocks each are thought of. Why only where five of six blocks that there may be have rows: costs do not
// know what idle ones cost. 5120 x 8192, uint8, 8 rows by 160 blocks 14.7 us, by one of a multiprocessor 12.6; 10240 x
// 8192, int8, 16 rows by 214 24.6 and 23.3; 7168 x 8192 gains by 224. Of less work, where starts and ends count for
// more, 8 of 11 (two_each_fill_20261130.json): 6144 x 4096 by 192, 1 to 7 bits and 8 rows, -1 to -7%, 10240 x 2560 +3
// to -8%; but 8 bits +6%, 6144 x 8192 up to +6, 9216 x 4096 +5, blocks of one row tile, 3072 x 4096, +1 to +6%; with
// 16 rows some gain 8% and others lose 4. Why not beside sums of x: 4096 x 4096, uint4 in groups of 64 with minima, 8
// rows 5.8 us for 5.1.
constexpr bool may_have_two(const Split& split, const SplitQuestion& q) {
  const int64_t blocks = ceil_div(q.tiles, split.row_tiles) * split.blocks;
  const int64_t most = narrow::at_once(split, q) * split.blocks;
  const bool little = split.row_tiles > 1 && split.row_tiles * q.steps <= 64 && q.tokens == 8 && q.bits < 8;
  return !q.kind.any_zeros && (little ? blocks * 11 >= most * 8 : blocks * 6 >= most * 5);
}

// The fastest split by blocks of q.warps warps, of 8 one or two on a multiprocessor; no row tiles where none is
// possible. Looked at are those by which all tasks run at once, with as many parts of K as warps allow or half as many;
// or, of 16 warps, in turns of whole tasks, or dealt out in parts. Why no turns of fewer row tiles than 8: such warps
// wait for their own results. 37888 x 3584, n16, W6 30.5 us in parts, by 4 warps 45.6.
constexpr TimedSplit fastest_split(const SplitQuestion& q) {
  const bool half = q.warps < narrow::kMostWorkers;
  TimedSplit best{{}, kNoSplit};
  const auto look_at = [&](int row_tiles, int parts, int blocks, bool two_each = false) {
    const Split split{row_tiles, parts, blocks, narrow::early_stages(q.bits), q.warps, 0, two_each};
    if (!narrow::possible(split, q) || (two_each && !may_have_two(split, q))) return;
    const float us = split_us(split, q);
    if (us < best.us) best = {split, us};
  };
  if (q.clusters[0] < 1 || (half && (q.steps > kMostStepsOfHalves || !narrow::has_halves(q.tokens, q.kind))))
    return best;
  if (!half) {
    look_at(q.warps, 1, 1);
    for (int rows = q.warps / 2; rows < q.warps && q.tiles > int64_t{q.clusters[0]} * rows; ++rows) look_at(rows, 1, 1);
  }
  const auto look_at_each = [&](int blocks, bool two_each) {
    if (q.clusters[blocks - 1] < 1) return;
    const int64_t fewest = ceil_div(ceil_div(q.tiles, int64_t{q.clusters[blocks - 1]} << two_each), blocks) * blocks;
    for (int64_t rows = fewest; rows <= std::min<int64_t>(fewest + blocks, q.warps); rows += blocks) {
      int parts = q.warps / static_cast<int>(rows);
      while (parts > 1 && !(q.fits >> parts & 1)) --parts;
      look_at(static_cast<int>(rows), parts, blocks, two_each);
      // Why not: half of the warps of a whole multiprocessor would be idle. 8192 x 28672, n16, W6 49.0 us, 8 x 2 x
      // 2 45.7.
      const bool half_idle = !half && parts == 2 && blocks == 2;
      if (parts > 1 && !half_idle) look_at(static_cast<int>(rows), parts / 2, blocks, two_each);
    }
  };
  for (int blocks = 1; blocks <= 2; ++blocks) {
    look_at_each(blocks, false);
    if (half) look_at_each(blocks, true);
  }
  return best;
}

// The same by either kind of blocks, of kernels that may do what has_room says.
constexpr TimedSplit fastest_split_of(SplitQuestion q, int warps) {
  q.warps = warps, q.fits = 0;
  for (int parts = 1; parts <= warps; ++parts)
    q.fits |= static_cast<uint32_t>(narrow::has_room(parts, q.tokens, q.bits, warps, q.kind.fine)) << parts;
  return fastest_split(q);
}

// What the kernels of q.warps warps are told. Those of 8 are asked first (gemm_sm90.cuh), and have no split where those
// of 16 are faster.
constexpr Split split_of(const SplitQuestion& q) {
  const TimedSplit best = fastest_split(q);
  if (q.warps == narrow::kMostWorkers)
    return best.us < kNoSplit ? best.split : Split{q.warps, 1, 1, narrow::early_stages(q.bits), q.warps, 0, 0};
  return best.us < fastest_split_of(q, narrow::kMostWorkers).us ? half_of(best.split, q) : Split{};
}

// Microseconds, about, of a product by the faster kind of blocks.
constexpr float narrow_us(int64_t tiles, int64_t steps, int tokens, int bits, const WeightKind& kind,
                          const int* clusters) {
  const SplitQuestion q{tiles, steps, tokens, bits, 0, clusters, 0, kind};
  return std::min(fastest_split_of(q, narrow::kMostWorkers / 2).us, fastest_split_of(q, narrow::kMostWorkers).us);
}

}  // namespace lowbit::cuda
