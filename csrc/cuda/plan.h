// Which tile of products is tried first: a cost for each, plain arithmetic on sizes, from times measured on an H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../args.h"
#include "../templates/columns.cuh"
#include "../templates/deal.cuh"
#include "../templates/form.cuh"
#include "../templates/wide_halves.cuh"
#include "split.h"

namespace lowbit::cuda {

// Families of kernels that multiply a packed weight; of tiles of as many tokens, that of the later one is tried first.
enum class Family { kDecode, kGemmSm80, kGemmSm90 };

// Whether a tile is for devices of a compute capability, 90 for 9.0: those of gemm_sm90 by what they need.
constexpr bool is_for(Family family, int tokens, int capability) {
  if (family != Family::kGemmSm90) return capability >= 80;
  return tokens > 16 ? capability == 90 : capability >= 90 && capability < 120;
}

// Whether a tile takes more rows of x than it has tokens.
constexpr bool repeats(Family family, int tokens) {
  return family == Family::kGemmSm80 || (family == Family::kGemmSm90 && tokens > 16);
}

// A product x [m, k] times a weight [n, k] of `bits` bits, on a device of `capability` that runs clusters[0] blocks and
// clusters[1] pairs of them at once.
struct Question {
  int64_t m, n, k;
  int bits;
  bool is_float;
  bool codebook;
  bool bf16_x;
  int64_t group_size;  // -1: the whole row
  ZeroKind zero_kind;
  bool whole_zeros;
  bool fp32_scales;
  int capability;
  const int* clusters;

  constexpr bool fine() const { return group_size > 0 && group_size < 128; }
  // Zeros that kernels with more than 16 tokens cannot make part of a value's number (form.cuh).
  constexpr bool any_zeros() const { return zero_kind != ZeroKind::kNone && (fine() || is_float || !whole_zeros); }
  // Whether tiles of gemm_sm90 with so many tokens, more than 16, round weights to the type of x.
  constexpr bool rounded(int tokens) const {
    return fine() || any_zeros() || (!is_float && rounds_values(bits, tokens, !bf16_x));
  }
};

// Whether a tile has a kernel for the weight: decode none for floats with zeros, decode and tiles of gemm_sm90 that are
// no powers of two (48, 96, 144...) none for fine groups, but n1 of decode for integers in groups of 32 and 64 and
// floats of 4 bits in any, and the latter none for zeros other than whole ones. Codebooks without zeros, and scales of
// fp32, are for gemm_sm90 alone, the latter as Stage::kFloatScales and kRoundsValues say (gemm_sm90/shape.cuh).
constexpr bool has_kernel(Family family, int tokens, const Question& q) {
  const bool only_sm90 = q.codebook || q.fp32_scales, scales_values = q.fine() || q.any_zeros();
  if (family == Family::kDecode) {
    const bool groups = !q.fine() || (tokens == 1 && (q.is_float ? q.bits == 4 : q.group_size >= 32));
    return !only_sm90 && groups && (!q.is_float || q.zero_kind == ZeroKind::kNone);
  }
  if (family == Family::kGemmSm80) return !only_sm90;
  if (q.codebook && q.zero_kind != ZeroKind::kNone) return false;
  if (q.fp32_scales && q.group_size == 16) return false;
  if (q.fp32_scales && tokens > 16 && !q.codebook && (q.rounded(tokens) || (!q.is_float && q.bits < 5))) return false;
  return (tokens & (tokens - 1)) == 0 || !scales_values;
}

// Whether a tile of more than 16 tokens would round weights of a product of few rows. Up to 16 rows no product does.
constexpr bool rounds_few(int tokens, const Question& q) { return tokens > 16 && q.m <= 16 && q.rounded(tokens); }

constexpr float kLast = 1e9f;    // costs from here on only rank tiles
constexpr float kNever = 1e30f;  // the tile does not hold the product

// What family gemm_sm90 takes of time: us = start + work + ends. Work is the steps of 128 k of the busiest worker
// (deal.cuh) times `step`, but no less than what workers have on average and `hot` more, because the device slows down
// at its limit of power where all of them work, and no less than memory takes. A step is one of 256 rows of W with
// 256 tokens, else 128. Ends: `meet` where sums of two blocks meet, `more` for each block more, `parts` where a second
// kernel adds them up, `turn` for each whole task of a worker but the first. Fitted by benchmarks/fit_tile_costs.py to
// products on an H200 (fp16, group 128, 39 shapes from 1024 x 3072 to 28672 x 4096, 24 to 1000 rows: int2, int4 and
// int8, nine shapes of the others, six up to 2048 rows; nvidia-h200/tiles_20261127*.json, tiles_20261125.json): of 1502
// products the tile with the least is 0.4% slower than the fastest one on average, within 5% in 97%, 12% at worst.
struct TileCost {
  int tokens, rows, workers;  // workers: index into clusters
  float start, meet, more, parts, turn, hot;
  float step[8];  // by bits, from 1
};
constexpr TileCost kTileCosts[] = {
    {32, 128, 0, 2.15f, 0.60f, 0.00f, 2.25f, 0.40f, 0.10f, {0.28f, 0.28f, 0.33f, 0.32f, 0.39f, 0.41f, 0.45f, 0.37f}},
    {48, 128, 0, 2.16f, 0.72f, 0.00f, 3.05f, 0.87f, 0.02f, {0.34f, 0.36f, 0.41f, 0.38f, 0.47f, 0.48f, 0.54f, 0.46f}},
    {64, 128, 0, 2.33f, 0.85f, 0.11f, 2.99f, 0.82f, 0.10f, {0.42f, 0.43f, 0.50f, 0.46f, 0.53f, 0.55f, 0.59f, 0.52f}},
    {96, 128, 0, 2.02f, 1.42f, 0.30f, 3.88f, 1.03f, 0.10f, {0.56f, 0.57f, 0.63f, 0.59f, 0.65f, 0.66f, 0.68f, 0.66f}},
    {128, 128, 0, 1.95f, 1.83f, 0.58f, 5.06f, 1.40f, 0.12f, {0.67f, 0.66f, 0.73f, 0.73f, 0.79f, 0.83f, 0.85f, 0.80f}},
    {144, 128, 0, 2.54f, 2.42f, 0.43f, 5.06f, 1.06f, 0.09f, {0.78f, 0.78f, 0.88f, 0.83f, 0.92f, 0.96f, 0.96f, 0.91f}},
    {160, 128, 0, 2.01f, 2.68f, 0.67f, 5.22f, 0.90f, 0.10f, {0.92f, 0.84f, 0.94f, 0.91f, 0.99f, 1.06f, 1.02f, 0.99f}},
    {192, 128, 0, 0.69f, 4.21f, 1.04f, 8.41f, 1.18f, 0.07f, {1.07f, 0.98f, 1.04f, 1.05f, 1.12f, 1.20f, 1.09f, 1.13f}},
    {208, 128, 0, 1.83f, 3.44f, 0.81f, 6.92f, 2.04f, 0.08f, {1.11f, 1.06f, 1.11f, 1.14f, 1.18f, 1.27f, 1.20f, 1.22f}},
    {256, 256, 1, 2.63f, 4.79f, 0.22f, 8.66f, 1.33f, 0.04f, {1.41f, 1.30f, 1.40f, 1.41f, 1.47f, 1.56f, 1.44f, 1.50f}},
};
constexpr float kBytesPerUs = 4.3e6f;  // of weights from memory

// What of a step of 256 columns takes less where fewer are multiplied. Measured on an H200, us, 8192 x 8192 with 208,
// 224 and 256 rows: int4 48.9, 50.8 and 54.9, int8 52.7, 56.1 and 60.1.
constexpr float kByColumns = 0.65f;
constexpr float columns_share(const Question& q, int tokens) {
  const float there = static_cast<float>(columns_of_each(tokens, q.m)) / static_cast<float>(tokens);
  return 1 - kByColumns * (1 - there);
}

constexpr float memory_us(const Question& q) {
  return static_cast<float>(q.n) * static_cast<float>(q.k) * (q.bits + 0.125f) / 8 / kBytesPerUs;
}

// What zeros and codebooks multiply work by. Zeros that are no whole numbers cost up to 16 tokens helping warps, and
// zeros of fine groups what finds them, which more tokens share. Measured at 8192 x 8192 in groups of 32, uint4 beside
// int4: n32 17.7 and 15.4 us, n64 21.1 and 18.7, n128 34.8 and 30.4, n256 58.2 and 54.5. Values of a codebook are
// looked up: n8 17.6 us and int4 13.7 with groups of 64, n64 27.8 and 22.4, n256 57.5 and 54.
constexpr float extra_work(const Question& q, int tokens) {
  const float zeros = q.zero_kind == ZeroKind::kNone ? 1.0f
                      : tokens <= 16                 ? (q.any_zeros() ? 1.2f : 1.05f)
                      : q.any_zeros()                ? 1.06f + 3.0f / tokens
                                                     : 1.0f;
  return zeros * (!q.codebook ? 1.0f : tokens < 256 ? 1.25f : 1.07f);
}

constexpr NarrowTime narrow_time(const Question& q, int tokens) {
  return narrow_time((q.n + 15) / 16, (q.k + 127) / 128, tokens, q.bits, q.fine(), q.clusters);
}

constexpr float narrow_us(const Question& q, int tokens) {
  return q.clusters[0] < 1 ? kLast : narrow_time(q, tokens).us * extra_work(q, tokens);
}

// A product by a tile of more than 16 tokens, as deal.cuh sees it. work: what a step takes more than of integers
// without zeros, and of all columns.
struct WideTasks {
  int64_t row_blocks, token_tiles, steps;
  int bits;
  const int* clusters;
  float memory, work;
};

constexpr float whole_us(const WideTasks& w, const TileCost& cost) {
  const bool paired = cost.rows == 256;
  const int64_t tasks = w.row_blocks * w.token_tiles, pairs = (w.row_blocks + 1) / 2 * w.token_tiles;
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
  const float work = std::max(longest, average * (1 + cost.hot)) * cost.step[w.bits - 1] * w.work;
  const int64_t turns = (tasks - 1) / most;
  const float ends = (dealt.in_parts() ? cost.parts : 0.0f) + cost.turn * static_cast<float>(turns) +
                     (dealt.meet > 1 ? cost.meet + cost.more * static_cast<float>(dealt.meet - 2) : 0.0f);
  return cost.start + std::max(work, w.memory) + ends;
}

// The same of kernels whose blocks have half of a multiprocessor (templates/wide_halves.cuh), each a task or its part
// of one: us = start + work. start: by blocks whose sums meet, one, two or four. Fitted beside the others, 26 shapes,
// int1 to int6 (nvidia-h200/tiles_halves_20261127.json). Why not with many steps: a ring of half of a multiprocessor is
// short. Measured on an H200, us, 64 rows, int4, by whole ones and by halves: 8192 x 8192 18.0 and 19.0, 4096 x 14336
// 17.5 and 18.9.
struct HalfCost {
  int tokens, most_steps;  // times 128 k of a block
  float start[3];
  float step[6];  // by bits, from 1
};
constexpr HalfCost kHalfTileCosts[] = {
    {32, 32, {1.96f, 2.47f, 2.20f}, {0.26f, 0.27f, 0.31f, 0.29f, 0.39f, 0.39f}},
    {64, 24, {1.60f, 2.68f, 2.52f}, {0.42f, 0.42f, 0.50f, 0.47f, 0.50f, 0.50f}},
};

// Of the fastest one; blocks: whose sums meet, 0 where none can be.
struct HalfTime {
  float us;
  int blocks;
};
constexpr HalfTime half_time(const WideTasks& w, int tokens) {
  HalfTime best{kLast, 0};
  for (const HalfCost& cost : kHalfTileCosts)
    for (int i = 0; cost.tokens == tokens && i < 3; ++i) {
      const int blocks = 1 << i;  // clusters of four as of an H200
      const int64_t most = i == 2 ? w.clusters[1] * 15 / 32 : w.clusters[i];
      const int64_t steps = (w.steps + blocks - 1) / blocks;
      if (w.row_blocks * w.token_tiles > most || w.steps < 2 * blocks || steps > cost.most_steps) continue;
      const float work = static_cast<float>(steps) * cost.step[w.bits - 1] * w.work;
      const float us = cost.start[i] + std::max(work, w.memory);
      if (us < best.us) best = {us, blocks};
    }
  return best;
}

constexpr float gemm_us(const Question& q, const TileCost& cost) {
  const WideTasks w{(q.n + 127) / 128,
                    (q.m + cost.tokens - 1) / cost.tokens,
                    (q.k + 127) / 128,
                    q.bits,
                    q.clusters,
                    memory_us(q),
                    columns_share(q, cost.tokens) * extra_work(q, cost.tokens)};
  const float whole = whole_us(w, cost);
  if (!has_halves(cost.tokens, q.bits, q.is_float, q.codebook, q.fine())) return whole;
  return std::min(whole, half_time(w, cost.tokens).us);
}

// What kernels that may share K are told: of up to 16 tokens split.h, of more those whose blocks have half of a
// multiprocessor, which have no split where whole ones are faster.
constexpr Split plan_split(const SplitQuestion& q) {
  if (q.tokens <= 16) return split_of(q);
  const float bytes = static_cast<float>(q.tiles) * static_cast<float>(q.steps * (256 * q.bits + 32));
  const WideTasks w{(q.tiles + 7) / 8, q.token_tiles, q.steps, q.bits, q.clusters, bytes / kBytesPerUs, 1.0f};
  for (const TileCost& cost : kTileCosts) {
    if (cost.tokens != q.tokens) continue;
    const HalfTime half = half_time(w, q.tokens);
    // When the next block begins hardly counts: of five pairs of stages and eighths this one is 0.6% slower than the
    // best on average, 7% at worst (710 products).
    if (half.blocks > 0 && half.us < whole_us(w, cost)) return {8, 1, half.blocks, 2, 8, 4};
  }
  return {};
}

// Whether blocks of n8 take half of a multiprocessor.
constexpr bool takes_half(const Question& q) { return narrow_time(q, 8).half; }

// Whether n8 takes an integer product of up to 4 rows that decode holds: 4 bits by halves of a multiprocessor where row
// tiles do not fill the device evenly, few row tiles of few bits, and where K is so long that clusters of 4 and 8
// blocks share row tiles unevenly (72 steps): of 256, those have 2.1 for each of their row groups, so 4; or few of
// them. Measured on an H200, us, n4 and n8 at 4 rows: 4608 x 3584 W4 4.7 and 4.4, 8192 x 8192 W4 10.3 and 10.0, but
// 4096 x 4096 4.1 and 4.4, 4096 x 2048 2.7 and 3.2; 1024 x 3072 W1 3.2 and 2.5, W2 2.9 and 2.5; 4096 x 14336 W1 7.3
// and 6.7, but 5120 x 17408 W2 10.6 and 12.6. With what follows, of 832 products of 1 to 4 rows, 26 shapes, the tile
// that is chosen is 1.1% slower than the fastest on average, 22% at worst
// (nvidia-h200/matmul_20261127_small_layers_tiles.json).
constexpr bool prefers_n8(const Question& q) {
  const int64_t steps = (q.k + 127) / 128, size = q.n * q.k;
  const bool even = q.n == 4096 || q.n > 8192 || (q.k <= 2048 && q.n > 1024);
  const bool by_half = q.bits == 4 && takes_half(q);
  const bool uneven = q.n % 4096 == 0 ? q.n < 8192 || (q.n == 8192 && q.bits >= 3) : q.n < 3072 && q.bits <= 5;
  if (q.m <= 2) return q.m == 2 && by_half && steps >= 100 && uneven;
  const bool few = q.bits == 1 ? size < 16'000'000 : q.bits <= 3 && q.n < 3072;
  return steps < 72 ? (by_half && !even) || few : uneven;
}

// Small weights. Why n4 for one and two rows: its end takes the least, and slices of few steps, of which n1 multiplies
// four at a time, are not rounded up. Measured on an H200, us, n1, n2 and n4 with one row: 2048 x 2048 W4 2.9, 2.6 and
// 2.3, W6 3.5, 2.8 and 2.5, 4096 x 2048 W3 3.2, 2.7 and 2.7, but W8 3.1, 3.1 and 4.0, and W1 2.7, 2.8 and 2.9.
constexpr bool small_for_n4(const Question& q) {
  const int64_t size = q.n * q.k;
  if (q.bits == 1 || q.m > 2) return false;
  return size <= 5'000'000 ? q.bits < 8 || q.m == 1 : size <= 9'000'000 && q.bits <= 6 && (q.m == 1 || q.is_float);
}

// The same for floats, us, decode and n8. With 8 bits few row tiles that have many k: all of x is in shared memory, and
// k is split too little to fill the device; 4096 x 4096 7.4 and 5.6, 8192 x 8192 19.1 and 19.1. Those of 3 and 4 bits
// are bytes that are looked up: float3 at four rows 7168 x 5120 8.4 and 7.5, but 12288 x 2048 5.5 and 6.7; float4
// 8192 x 8192 12.2 and 11.0, but 4096 x 4096 4.4 and 4.8, 57344 x 8192 60.4 and 67.8, 4096 x 2048 3.0 and 3.5.
constexpr bool floats_prefer_n8(const Question& q) {
  if (q.bits == 8) return takes_half(q) || (q.n <= 5120 && q.k >= 24 * 1024);
  if (q.bits == 3) return q.m > 2 && q.n <= 8192;
  if (q.n >= 4096 && q.n * q.k <= 9'000'000) return false;
  return q.n < 32 * 1024 && (q.m > 2 || q.k % 4096 || q.n < 2048 || q.n * q.k > 4096 * 4096);
}

// The same with groups of 32 and 64 and one row, us, n1 and n8: 8192 x 8192 groups of 32 12.9 and 12.9, of 64 13.0 and
// 11.7, 6144 x 4096 7.1 and 6.8, 7.2 and 6.5, but 4096 x 4096 4.6 and 5.2, 4.4 and 5.0, 57344 x 8192 66.6
// and 74.6, 65.0 and 69.1 (nvidia-h200/matmul_20261126_fine_one_row.json: ten shapes, nothing is lost of them).
constexpr bool fine_floats_prefer_n8(const Question& q) {
  return q.group_size >= 32 && q.n < (q.group_size == 32 ? 8 : 32) * 1024 && (q.k % 4096 || q.n * q.k > 4096 * 4096);
}

// What a tile of family decode that holds the product takes, beside the others: less than any of gemm_sm90 takes, or
// more where one of these is faster. Mostly the smallest tile is the fastest, of integers in short groups always: n1
// takes 0.60 to 0.98 of the time of n8 (nvidia-h200/matmul_20261126_fine_one_row.json: ten shapes, seven types). The
// exceptions are those below, with which 0.4% is lost on average, 9% at worst, to the fastest of n2, n4 and n8 for
// integers (benchmarks/results/nvidia-h200/tiles_of_few_rows_20261123_3.json: 15 shapes, 2 to 4 rows of x, fp16, group
// 128). A model of times was off by 8%, and chose no better.
constexpr float decode_rank(int tokens, const Question& q) {
  const float rank = 0.01f * static_cast<float>(tokens), last = kLast + rank * 1e5f;
  if (q.fine()) return q.is_float && fine_floats_prefer_n8(q) ? last : rank;
  if (q.is_float ? floats_prefer_n8(q) : prefers_n8(q)) return last;
  if (tokens == 4 && small_for_n4(q)) return 0.0f;
  // 40 and 20 steps: slices of five, or three, of which n1 multiplies eight, or four. n1 and n2, us: 5120 x 5120 W6 7.6
  // and 7.1, 6144 x 2560 W4 4.4 and 4.0, but W8 5.4 and 5.6.
  const bool empty = q.bits > 1 && q.n < 40 * 1024 && (q.k == 5120 || (q.k == 2560 && q.bits > 2 && q.bits < 8));
  if (tokens == 2 && q.m == 1 && empty) return 0.005f;
  if (q.k % 8192 == 0) return rank;
  // Few row tiles that have many k: n4 holds x of two rows in half of a multiprocessor, n2 in all of it. n2 and n4, us:
  // 4096 x 12288 W2 7.0 and 6.3, 4096 x 14336 W2 7.9 and 6.9. Some widths gain by n4's splits: 5120 x 17408, one row,
  // W5 17.2 and 16.2, two 16.9 and 16.2, but 4096 x 12288 W5 9.4 and 11.1, 5120 x 25600 23.4 and 25.2.
  const bool holds_x = q.m == 2 && q.bits <= 2 && q.n == 4096 && q.k >= 9 * 1024;
  const bool splits =
      q.m <= 2 && q.bits >= 3 + q.m && q.bits <= 7 && q.n <= 5120 && q.n % 4096 && q.k >= 12 * 1024 && q.k < 18 * 1024;
  return tokens == 4 && !q.is_float && (holds_x || splits) ? 0.0f : rank;
}

// What a tile of more than 16 tokens counts with up to 16 rows, so that n8 or n16 is chosen. With 16 rows, 20 shapes,
// int2, int4 and int8, n16 by its fastest split was the faster one everywhere, by 2 to 39%, but costs of the two are
// not that near to times (nvidia-h200/tiles_20261127_small_layers.json, sweep_splits_20261127_n8_n16.json).
constexpr float kFewRows = 1.25f;

// Microseconds, about, that a tile takes; from kLast on it is one to try after others, at kNever none to try. The tile
// is for the device, and bits are 1 to 8.
constexpr float tile_us(Family family, int tokens, const Question& q) {
  if (!has_kernel(family, tokens, q)) return kNever;
  const bool holds = q.m <= tokens;
  // Of equal tiles that of the later family. Where nothing was measured: the smallest that holds all, else the largest.
  const float rank = (holds ? tokens : 1000 - tokens) + 0.5f - 0.1f * static_cast<float>(family);
  if (q.capability != 90) return holds || repeats(family, tokens) ? rank : kNever;
  if (family == Family::kGemmSm80) return 2 * kLast + rank * 1e3f;
  if (family == Family::kDecode) {
    return holds ? decode_rank(tokens, q) : kNever;
  }
  if (!holds && !repeats(family, tokens)) return kNever;
  if (rounds_few(tokens, q)) return kLast + rank * 1e3f;
  if (tokens <= 16) return narrow_us(q, tokens);
  for (const TileCost& cost : kTileCosts)
    if (cost.tokens == tokens) return gemm_us(q, cost) * (q.m <= 16 ? kFewRows : 1.0f);
  return kLast;
}

}  // namespace lowbit::cuda
