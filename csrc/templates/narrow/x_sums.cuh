// Sums of x, which zeros of codes are taken away by: products with ones, of which every column is the sum.
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

constexpr int kSumBytes = kSumLanes * 8;  // of a sum of 8 tokens: [lane][2 tokens]

// Bytes of 64 k of x in a stage.
template <class Stage, class Problem>
__device__ __forceinline__ int x_box_of(const Problem& p) {
  if constexpr (Stage::kOneRow) return p.x_box;
  return Stage::kXBox;
}

// Where 16 bytes of a token lie in 64 k of x: piece ^ token % 8 of its 128, swizzled; of x of one row as they come, for
// every token.
__device__ __forceinline__ int place_of_x(int token, int piece, bool one_row) {
  return one_row ? piece * 16 : token * 128 + (piece ^ token % 8) * 16;
}

// Those of 8 tokens in a step, times a factor: of 128 k; where Stage::kFine of each 16 k, or of each 32 k if `pairs`.
// x: their 128 k in a stage, x_box: bytes of 64 of them; to: [sum][kSumBytes]; both in shared memory.
template <class Act, class Stage>
__device__ __forceinline__ void add_up_column(uint32_t x, int x_box, uint32_t to, int lane, float factor, bool pairs) {
  constexpr uint32_t kOne = std::is_same<Act, __half>::value ? 0x3C003C00u : 0x3F803F80u;
  const uint32_t row = x + place_of_x(lane % 8, lane / 8, Stage::kOneRow && x_box < Stage::kXBox);
  constexpr int kChains = Stage::kFine ? 4 : 2;
  float sum[kChains][4] = {};
  // Why all products before the first store: loads of x would wait for it, and it for a product.
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 32 k each
    uint32_t own[4];
    ptx::load_matrices(own, (row + i / 2 * x_box) ^ (i % 2 * 64));
    // The rows of a product are 8 tokens at 16 k, and again at the next 16.
    const uint32_t both[4] = {own[0], own[2], own[1], own[3]};
    ptx::mma<Act>(sum[i % kChains], both, kOne, kOne);
  }
  // Lanes 4g + t have sums of token g.
  if (lane % 4) return;
  const auto store = [&](int place, float of) {
    ptx::store_shared(to + lane + place * kSumBytes, __float_as_uint(factor * of));
  };
  if constexpr (!Stage::kFine) {
    store(0, (sum[0][0] + sum[0][2]) + (sum[1][0] + sum[1][2]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (pairs) {
        store(i, sum[i][0] + sum[i][2]);
      } else {
        store(2 * i, sum[i][0]);
        store(2 * i + 1, sum[i][2]);
      }
    }
  }
}

}  // namespace lowbit::narrow
