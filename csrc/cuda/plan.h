// Which tile of products is tried first: a cost for each, plain arithmetic on sizes, from times measured on an H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../args.h"
#include "../templates/columns.cuh"
#include "../templates/decode/spread.cuh"
#include "../templates/form.cuh"
#include "split.h"
#include "tile_costs.h"

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
  bool even_scales;  // there are no zeros, and scales are even (args.h)
  bool fp32_scales;
  int capability;
  const int* clusters;

  constexpr bool fine() const { return group_size > 0 && group_size < 128; }
  // Zeros that kernels with more than 16 tokens cannot make part of a value's number (form.cuh).
  constexpr bool any_zeros() const { return zero_kind != ZeroKind::kNone && (fine() || is_float || !whole_zeros); }
  // Whether tiles of gemm_sm90 with so many tokens, more than 16, round weights to the type of x.
  constexpr bool rounded(int tokens) const {
    return fine() || any_zeros() ||
           (!is_float && !codebook && (even_scales ? fuses_values : rounds_values)(bits, tokens, !bf16_x));
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

constexpr float kNever = 1e30f;  // the tile does not hold the product

// The share of a step of 256 columns that shrinks with the columns that are multiplied. Measured on an H200, us, 8192 x
// 8192 with 208, 224 and 256 rows: int4 48.9, 50.8 and 54.9, int8 52.7, 56.1 and 60.1.
constexpr float kByColumns = 0.65f;
constexpr float columns_share(const Question& q, int tokens) {
  const float there = static_cast<float>(columns_of_each(tokens, q.m)) / static_cast<float>(tokens);
  return 1 - kByColumns * (1 - there);
}

constexpr float memory_us(const Question& q) {
  return static_cast<float>(q.n) * static_cast<float>(q.k) * (q.bits + 0.125f) / 8 / kBytesPerUs;
}

// The kind that kernels of up to 16 tokens are for (with_form).
constexpr WeightKind narrow_kind(const Question& q) {
  const bool zeros = q.zero_kind != ZeroKind::kNone;
  const bool whole = zeros && q.whole_zeros && !q.is_float && (!q.fine() || has_fine_whole(q.bits));
  const bool any = zeros && !whole, fine = q.fine() || q.fp32_scales || (q.is_float && any);
  return {q.is_float, q.codebook, fine, whole, any, !q.fine() || q.group_size > 32 ? 0 : q.group_size > 16 ? 1 : 2};
}

constexpr float narrow_us(const Question& q, int tokens) {
  if (q.clusters[0] < 1) return kLast;
  return narrow_us((q.n + 15) / 16, (q.k + 127) / 128, tokens, q.bits, narrow_kind(q), q.clusters);
}

constexpr float gemm_us(const Question& q, const TileCost& cost) {
  const WideTasks w{(q.n + 15) / 16,
                    (q.m + cost.tokens - 1) / cost.tokens,
                    (q.k + 127) / 128,
                    q.bits,
                    {q.is_float, q.codebook, q.fine() || q.any_zeros(), false, q.any_zeros()},
                    q.clusters,
                    memory_us(q),
                    columns_share(q, cost.tokens),
                    q.bf16_x,
                    q.even_scales};
  return std::min(whole_us(w, cost), block_time(w, cost.tokens).us);
}

// Whether a tile's time is known, about.
constexpr bool is_timed(Family family, const Question& q) { return q.capability == 90 && family != Family::kGemmSm80; }

// What tiles of family decode are for.
constexpr decode::WeightForm decode_form(const Question& q) {
  const int units = !q.fine() ? 1 : q.group_size >= 32 ? 4 : 8;
  return {q.bits, q.is_float, q.zero_kind != ZeroKind::kNone, units};
}

// Microseconds, about, by a tile of family decode; kLast where no block holds x. Of 657 products of 1, 2 and 4 rows (30
// shapes, int1 to int8, nvidia-h200/sweep_splits_20261128_decode*.json, _passes*.json, 20261129_two_each.json) the tile
// and split with the least cost, n8 among them, are 1.0% slower than the fastest on average, 12% at worst; of 1130 of
// 1 to 16 rows of 34 other weights (sweep_splits_20261128_kinds*.json, _large_kinds.json,
// 20261129_two_each_of_kinds.json), by these and n8 and n16, 0.9 and 19%. Where what is chosen was timed.
inline float decode_us(int tokens, const Question& q) {
  const int pairs = q.clusters[1], clusters[] = {q.clusters[0], pairs, pairs * 15 / 32, pairs * 15 / 64};  // an H200's
  if (clusters[0] < 1) return kLast;
  decode::Sharing p{};
  p.m = static_cast<int>(q.m), p.tiles = static_cast<int>((q.n + 15) / 16),
  p.steps = static_cast<int>((q.k + 127) / 128);
  const decode::Spread found = decode::spread_by(tokens, decode_form(q), p, {clusters, true, true}).spread;
  return found.bytes ? found.price : kLast;
}

// What n8 takes more than its cost says with rows that decode holds, us: 0.12 to 0.19 on average of the same products,
// of 3 us as of 40.
constexpr float kN8OfFew = 0.15f;

// What a tile of more than 16 tokens counts with up to 16 rows, so that n8 or n16 is chosen. With 16 rows, 20 shapes,
// int2, int4 and int8, n16 by its fastest split was the faster one everywhere, by 2 to 39%, but costs of the two are
// not that near to times (nvidia-h200/tiles_20261127_small_layers.json, sweep_splits_20261127_n8_n16.json).
constexpr float kFewRows = 1.25f;

// Microseconds, about, that a tile takes; from kLast on it is one to try after others, at kNever none to try. The tile
// is for the device, and bits are 1 to 8.
inline float tile_us(Family family, int tokens, const Question& q) {
  if (!has_kernel(family, tokens, q)) return kNever;
  const bool holds = q.m <= tokens;
  // Of equal tiles that of the later family. Where nothing was measured: the smallest that holds all, else the largest.
  const float rank = (holds ? tokens : 1000 - tokens) + 0.5f - 0.1f * static_cast<float>(family);
  if (q.capability != 90) return holds || repeats(family, tokens) ? rank : kNever;
  if (family == Family::kGemmSm80) return 2 * kLast + rank * 1e3f;
  if (family == Family::kDecode) {
    return holds ? decode_us(tokens, q) : kNever;
  }
  if (!holds && !repeats(family, tokens)) return kNever;
  if (rounds_few(tokens, q)) return kLast + rank * 1e3f;
  if (tokens <= 16) return narrow_us(q, tokens) + (q.m <= 4 ? kN8OfFew : 0.0f);
  for (const TileCost& cost : kTileCosts)
    if (cost.tokens == tokens) return gemm_us(q, cost) * (q.m <= 16 ? kFewRows : 1.0f);
  return kLast;
}

}  // namespace lowbit::cuda
