// x of a block in shared memory, [step][token][kRowBytes]: the steps of its slices, 0 beyond k.
#pragma once
#include "../ptx/async.cuh"
#include "shape.cuh"

namespace lowbit::decode {

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

// What a lane does with x of its block: half a warp brings a row of 128 k.
template <class Tile>
struct Values {
  const Position& at;
  const uint32_t x;

  __device__ Values(const Position& position, uint32_t x_at, uint32_t /*table*/) : at(position), x(x_at) {}
  __device__ __forceinline__ void ask() const {}
  __device__ __forceinline__ void bring() const;
};

// The caller synchronizes.
template <class Tile>
__device__ __forceinline__ void Values<Tile>::bring() const {
  const Problem& p = at.p;
  const int first = at.block_step(at.rank), rows = (at.block_step(at.rank + 1) - first) * p.m;
  const float tokens = ptx::reciprocal(static_cast<float>(p.m));
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
      const int row = start + i * kHalves;
      if (row < rows) ptx::store_shared(x + row * kRowBytes + at.lane % 16 * 16, values[i]);
    }
  }
}

}  // namespace lowbit::decode
