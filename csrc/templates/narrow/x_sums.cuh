// Sums of x, which offsets and zeros of codes are taken away by: products with ones, of which every row is the sum.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"

namespace lowbit::narrow {

constexpr int kSumLanes = 4;  // of a warp that have sums, of two tokens each

// How many sums of a token a step of 128 k has room for: a sum for each fragment of 16 k where groups may be that
// short.
template <class Stage>
constexpr int kSumsOfStep = Stage::kFine ? 8 : 1;

// Bytes of a sum of 8 tokens: [lane][2 tokens], with zeros; else what sums of products of either row half begin with,
// [lane][half][2 tokens]. Why: workers then have nothing to do with it.
template <class Stage>
constexpr int kSumBytes = kSumLanes * (Stage::kZeros ? 8 : 16);

// Those of 8 tokens in a step, times factor[half]: of 128 k; where Stage::kFine of each 16 k, or of each 32 k if
// `pairs`. x: their 128 k in a stage; to: [sum][kSumBytes]; both in shared memory.
template <class Act, class Stage>
__device__ __forceinline__ void add_up_column(uint32_t x, uint32_t to, int lane, const float (&factor)[2], bool pairs) {
  constexpr uint32_t kOne = std::is_same<Act, __half>::value ? 0x3C003C00u : 0x3F803F80u;
  const uint32_t one[4] = {kOne, kOne, kOne, kOne};
  const uint32_t row = x + lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16;  // swizzled: 16 bytes of a token
  constexpr int kParts = Stage::kFine ? 8 : 2;
  float sum[kParts][4] = {};
  // Why all products before the first store: loads of x would wait for it, and it for a product.
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 32 k each
    uint32_t b[4];
    ptx::load_matrices(b, (row + i / 2 * Stage::kXBox) ^ (i % 2 * 64));
    ptx::mma<Act>(sum[2 * i % kParts], one, b[0], b[1]);
    ptx::mma<Act>(sum[2 * i % kParts + 1], one, b[2], b[3]);
  }
  if (lane >= kSumLanes) return;
  const auto store = [&](int place, float first, float second) {
    const uint32_t here = to + place * kSumBytes<Stage> + lane * (kSumBytes<Stage> / kSumLanes);
    if constexpr (Stage::kZeros) {
      ptx::store_shared(here, {factor[0] * first, factor[0] * second});
    } else {
      ptx::store_shared(here, {factor[0] * first, factor[0] * second, factor[1] * first, factor[1] * second});
    }
  };
  const bool all = !Stage::kFine || pairs;
#pragma unroll
  for (int i = 0; i < kParts / 2; ++i) {
    const float (&low)[4] = sum[2 * i], (&high)[4] = sum[2 * i + 1];
    if (all) {
      store(i, low[0] + high[0], low[1] + high[1]);
    } else {
      store(2 * i, low[0], low[1]);
      store(2 * i + 1, high[0], high[1]);
    }
  }
}

}  // namespace lowbit::narrow
