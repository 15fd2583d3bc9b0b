// Sums of x of 128 k, which offsets and zeros of codes are taken away by: a product with ones, of which every row is
// the sum.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../ptx/async.cuh"
#include "../ptx/mma.cuh"

namespace lowbit::narrow {

constexpr int kSumLanes = 4;  // of a warp that have sums, of two tokens each

// Those of 8 tokens. x: their 128 k in a stage; to: 8 floats; both in shared memory. Sums are times `unit`.
template <class Act, class Stage>
__device__ __forceinline__ void add_up_column(uint32_t x, uint32_t to, int lane, float unit) {
  constexpr uint32_t kOne = std::is_same<Act, __half>::value ? 0x3C003C00u : 0x3F803F80u;
  const uint32_t one[4] = {kOne, kOne, kOne, kOne};
  const uint32_t row = x + lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16;  // swizzled: 16 bytes of a token
  float sum[2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 32 k each
    uint32_t b[4];
    ptx::load_matrices(b, (row + i / 2 * Stage::kXBox) ^ (i % 2 * 64));
    ptx::mma<Act>(sum[0], one, b[0], b[1]);
    ptx::mma<Act>(sum[1], one, b[2], b[3]);
  }
  if (lane < kSumLanes)
    ptx::store_shared(to + lane * 8, {unit * (sum[0][0] + sum[1][0]), unit * (sum[0][1] + sum[1][1])});
}

}  // namespace lowbit::narrow
