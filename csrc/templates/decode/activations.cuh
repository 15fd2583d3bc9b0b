// x of a block in shared memory, and the sums of x that offsets and zeros of the weight need.
//
//   x      [step][token][kRowBytes]: the steps of this block's slices, 0 beyond k
//   sums   [step][Tile::kTokens] floats: of 128 k, in units of Decoder::kOne
#pragma once
#include <type_traits>

#include "../dequant/float.cuh"
#include "../ptx/async.cuh"
#include "shape.cuh"

namespace lowbit::decode {

template <class Act>
__device__ __forceinline__ float sum_of_pair(uint32_t pair) {
  if constexpr (std::is_same<Act, __half>::value) {
    const float2 values = __half22float2(reinterpret_cast<const __half2&>(pair));
    return values.x + values.y;
  } else {
    return __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000u);
  }
}

// Eight values from k on; those at k >= end are 0.
__device__ __forceinline__ uint4 load_x_chunk(const uint8_t* from, int k, int end) {
  if (k + 8 <= end) return ptx::load_x(from);
  uint32_t tail[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = 0; k + i < end && i < 8; ++i) {
    const uint32_t value = ptx::load_x_16(from + 2 * i) << (i % 2 * 16);
#pragma unroll
    for (int word = 0; word < 4; ++word) tail[word] |= i / 2 == word ? value : 0;
  }
  return {tail[0], tail[1], tail[2], tail[3]};
}

// All threads of the block bring x to `x`, and its sums, if Sums, to `sums`; the caller synchronizes.
template <class Act, class Tile, bool Sums>
__device__ __forceinline__ void bring_x(const Position& at, uint32_t x, uint32_t sums, float unit) {
  const Problem& p = at.p;
  const int first = at.block_step(at.rank), rows = (at.block_step(at.rank + 1) - first) * p.m;
  const float tokens = 1.0f / static_cast<float>(p.m);
  // Half a warp brings a row of 128 k. Why eight rows at once: each is a trip to L2.
  constexpr int kBatch = 8, kHalves = 2 * Tile::kWarps;
#pragma unroll 1
  for (int start = threadIdx.x / 16; start < rows; start += kBatch * kHalves) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = start + i * kHalves, step = static_cast<int>((static_cast<float>(row) + 0.5f) * tokens);
      const int k = (first + step) * kStepK + at.lane % 16 * 8;
      if (row < rows) values[i] = load_x_chunk(p.x + 2 * ((row - step * p.m) * p.x_stride + k), k, p.k);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = start + i * kHalves, step = static_cast<int>((static_cast<float>(row) + 0.5f) * tokens);
      if (row >= rows) break;
      ptx::store_shared(x + row * kRowBytes + at.lane % 16 * 16, values[i]);
      if constexpr (Sums) {
        float sum = sum_of_pair<Act>(values[i].x) + sum_of_pair<Act>(values[i].y) +
                    (sum_of_pair<Act>(values[i].z) + sum_of_pair<Act>(values[i].w));
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) sum += __shfl_xor_sync(0xFFFFu << (at.lane & 16), sum, lanes, 16);
        if (at.lane % 16 == 0) ptx::store_shared(sums + (step * Tile::kTokens + row - step * p.m) * 4, sum * unit);
      }
    }
  }
}

}  // namespace lowbit::decode
