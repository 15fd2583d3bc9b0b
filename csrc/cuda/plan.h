// Which tile of products is tried first: a cost for each, plain arithmetic on sizes, from times measured on an H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../templates/deal.cuh"

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
  bool fine;  // groups of less than 128 k, or zeros that are added after the scale
  int capability;
  const int* clusters;
};

constexpr float kLast = 1e9f;    // costs from here on only rank tiles
constexpr float kNever = 1e30f;  // the tile does not hold the product

// What family gemm_sm90 takes of time: us = start + longest * step + parts, but no less than memory does. `longest` is
// the number of steps of 128 k of the busiest worker (deal.cuh), a step of 256 rows of W up to 16 tokens and with 256,
// else 128; `parts` are added where tasks are in parts. Fitted to 1,100 products on an H200 (fp16, group 128, int1 to
// int8, 15 shapes of 4608 x 3584 to 57344 x 8192, 5 to 8192 rows of x); off by 5% (root of mean square).
struct TileCost {
  int tokens, rows, workers;  // workers: index into clusters
  float start, parts;
  float step[8];  // by bits, from 1
};
constexpr TileCost kTileCosts[] = {
    {8, 256, 0, 2.7f, 1.9f, {0.36f, 0.41f, 0.58f, 0.56f, 0.60f, 0.66f, 0.70f, 0.60f}},
    {16, 256, 0, 3.3f, 1.9f, {0.46f, 0.52f, 0.71f, 0.59f, 0.66f, 0.70f, 0.75f, 0.62f}},
    {32, 128, 0, 1.3f, 1.9f, {0.29f, 0.31f, 0.40f, 0.35f, 0.42f, 0.45f, 0.47f, 0.41f}},
    {48, 128, 0, 1.2f, 2.2f, {0.38f, 0.39f, 0.48f, 0.44f, 0.50f, 0.55f, 0.57f, 0.52f}},
    {64, 128, 0, 1.0f, 2.5f, {0.46f, 0.46f, 0.54f, 0.52f, 0.57f, 0.62f, 0.64f, 0.60f}},
    {96, 128, 0, 1.0f, 3.0f, {0.60f, 0.60f, 0.68f, 0.66f, 0.70f, 0.74f, 0.77f, 0.76f}},
    {128, 128, 0, 1.0f, 3.5f, {0.72f, 0.73f, 0.80f, 0.82f, 0.84f, 0.87f, 0.90f, 0.93f}},
    {256, 256, 1, 1.0f, 8.2f, {1.50f, 1.45f, 1.52f, 1.58f, 1.58f, 1.61f, 1.65f, 1.72f}},
};
constexpr float kBytesPerUs = 4.3e6f;  // of weights from memory

constexpr float gemm_us(const Question& q, const TileCost& cost) {
  const int64_t steps = (q.k + 127) / 128, blocks = (q.n + cost.rows - 1) / cost.rows;
  const int64_t tasks = blocks * ((q.m + cost.tokens - 1) / cost.tokens);
  const int most = q.clusters[cost.workers];
  if (most < 1 || std::max(tasks, steps * most) > INT32_MAX) return kLast;
  const Deal dealt = deal(static_cast<int>(tasks), static_cast<int>(steps), most, cost.tokens > 16);
  const float work = static_cast<float>(dealt.longest()) * cost.step[q.bits - 1];
  const float memory = static_cast<float>(q.n) * static_cast<float>(q.k) * (q.bits + 0.125f) / 8 / kBytesPerUs;
  return cost.start + std::max(work, memory) + (dealt.in_parts() ? cost.parts : 0.0f);
}

// Microseconds, about, that a tile takes; from kLast on it is one to try after others, at kNever none to try. The tile
// is for the device, and bits are 1 to 8.
constexpr float tile_us(Family family, int tokens, const Question& q) {
  const bool holds = q.m <= tokens;
  // Of equal tiles that of the later family. Where nothing was measured: the smallest that holds all, else the largest.
  const float rank = (holds ? tokens : 1000 - tokens) + 0.5f - 0.1f * static_cast<float>(family);
  if (q.capability != 90) return holds || repeats(family, tokens) ? rank : kNever;
  if (family == Family::kGemmSm80) return 2 * kLast + rank * 1e3f;
  if (family == Family::kDecode) {
    // Few row tiles have many k: tiles of up to 4 tokens keep all of x in shared memory, and split k too little to fill
    // the device. Measured: up to 25% at 4096 x 14336, 3584 x 14336 and 5120 x 27648 (docs/notes/decode.md).
    const bool few_rows = q.n <= 5120;
    if (!holds) return kNever;
    if (q.m > 2 && few_rows && q.k >= (q.bits <= 2 ? 12 : 24) * 1024) return kLast + rank * 1e3f;
    if (tokens == 1 && few_rows && q.k >= 24 * 1024) return kLast;  // 25.5 us, 23.1 by n2, at 5120 x 27648, 4 bits
    return 0.01f * tokens;
  }
  if (!holds && !repeats(family, tokens)) return kNever;
  // Why: up to 16 tokens no product rounds a weight, and there the larger tiles would.
  if (tokens > 16 && q.m <= 16 && q.fine) return kLast + rank * 1e3f;
  for (const TileCost& cost : kTileCosts)
    if (cost.tokens == tokens) return gemm_us(q, cost);
  return kLast;
}

}  // namespace lowbit::cuda
