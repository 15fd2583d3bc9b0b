// Where the sums of a pass meet: what every slice of K found for a tile comes to one block, which stores y.
//
// Tile i of row group r of a block belongs to the block of rank (r * pass_tiles + i) % cluster, which finds in its
// shared memory [owned tile][slice][column of 8][lane][4] floats: what each lane summed, unreduced. With up to 2 tokens
// the lanes of a row meet before: [owned tile][slice][g][4].
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "shape.cuh"

namespace lowbit::decode {

__device__ __forceinline__ float load_bias(const void* bias, FloatType type, int n) {
  if (type == FloatType::kFloat32) return static_cast<const float*>(bias)[n];
  if (type == FloatType::kFloat16) return __half2float(static_cast<const __half*>(bias)[n]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[n]);
}

// Bytes of a tile's sums from one slice.
template <class Tile>
constexpr int kSumBytes = (Tile::kTokens <= 2 ? 8 : Tile::kColumns * 32) * 16;

// How many tiles of a pass this block owns.
template <class Tile>
__device__ __forceinline__ int owned_tiles(const Position& at) {
  const int slots = (Tile::kWarps >> at.p.warps_k_shift) * at.p.pass_tiles;
  return (slots - at.rank + (1 << at.p.cluster_shift) - 1) >> at.p.cluster_shift;
}

// A warp's sums of tile i of the pass; every warp hands in something for every i, so that owners know what to wait for.
template <class Tile>
__device__ __forceinline__ void hand_in(const Position& at, uint32_t place, uint32_t met, int i,
                                        const float (&total)[Tile::kColumns][4]) {
  const Problem& p = at.p;
  constexpr int kTokens = Tile::kTokens;
  const int slot = (at.warp >> p.warps_k_shift) * p.pass_tiles + i;
  const int owned = ((slot >> p.cluster_shift) << (p.cluster_shift + p.warps_k_shift)) + at.slice;
  const uint32_t owner = slot & ((1 << p.cluster_shift) - 1);
  place += owned * kSumBytes<Tile>;
  const auto store = [&](int item, float4 values) {
    if (p.cluster_shift) {
      ptx::store_in_cluster(place + item * 16, met, owner, values);
    } else {
      ptx::store_shared(place + item * 16, make_uint4(__float_as_uint(values.x), __float_as_uint(values.y),
                                                      __float_as_uint(values.z), __float_as_uint(values.w)));
    }
  };
  if constexpr (kTokens <= 2) {
    float values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = total[0][j];
      if (kTokens == 1) values[j] = j % 2 ? 0.0f : total[0][j] + total[0][j + 1];
      if (kTokens == 1 && j % 2) continue;
      values[j] += __shfl_xor_sync(~0u, values[j], 1);
      values[j] += __shfl_xor_sync(~0u, values[j], 2);
    }
    if (at.lane % 4 == 0) store(at.lane / 4, {values[0], values[1], values[2], values[3]});
  } else {
#pragma unroll
    for (int column = 0; column < Tile::kColumns; ++column)
      store(column * 32 + at.lane, {total[column][0], total[column][1], total[column][2], total[column][3]});
  }
}

// Waits for all that was handed in; round: how often the barrier was used before.
__device__ __forceinline__ void meet(const Problem& p, uint32_t met, int round) {
  if (p.cluster_shift) {
    ptx::barrier_wait(met, round & 1);
  } else {
    __syncthreads();
  }
}

// Stores this block's tiles of the pass whose first tile is `first` of each row group. A thread adds up what one lane
// of every slice handed in: rows g and g + 8 of two tokens.
template <class Act, class Decoder, class Tile>
__device__ __forceinline__ void store_pass(const Position& at, uint32_t place, int first) {
  const Problem& p = at.p;
  constexpr int kTokens = Tile::kTokens;
  constexpr int kItems = kTokens <= 2 ? 8 : Tile::kColumns * 32;  // of a tile
  const int splits = 1 << (p.cluster_shift + p.warps_k_shift);
  const int owned = owned_tiles<Tile>(at);
#pragma unroll 1
  for (int i = threadIdx.x; i < owned * kItems; i += Tile::kThreads) {
    const int own = i / kItems, item = i % kItems;
    float value[4] = {};
#pragma unroll 8
    for (int s = 0; s < splits; ++s) {
      uint32_t words[4];
      ptx::load_shared(place + ((own * splits + s) * kItems + item) * 16, words[0], words[1], words[2], words[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] += __uint_as_float(words[j]);
    }
    if constexpr (kTokens == 4)  // two phases
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] += __shfl_xor_sync(~0u, value[j], 2);

    const int slot = (own << p.cluster_shift) + at.rank, group = slot / p.pass_tiles;
    const int row_group = at.first_row_group + group;
    const int tile = p.row_groups(row_group) + first + slot - group * p.pass_tiles;
    if (tile >= p.row_groups(row_group + 1)) continue;
    const int g = kTokens <= 2 ? item : item % 32 / 4;
    const int token = kTokens <= 2 ? 0 : kTokens == 4 ? item % 2 * 2 : item / 32 * 8 + item % 4 * 2;
    if (kTokens == 4 && item % 4 >= 2) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = tile * 16 + g + 8 * h;
      if (n >= p.n) continue;
      constexpr float kUnit[2] = {Decoder::kUnit / (1 << Decoder::exponent(0, 0)),
                                  Decoder::kUnit / (1 << Decoder::exponent(0, 1))};
      const float unit = p.step * kUnit[h], bias = p.bias ? load_bias(p.bias, p.bias_type, n) : 0.0f;
      Act* to = static_cast<Act*>(p.y) + token * p.y_stride + n;
      if (token < p.m) to[0] = static_cast<Act>(fmaf(value[2 * h], unit, bias));
      if (token + 1 < p.m) to[p.y_stride] = static_cast<Act>(fmaf(value[2 * h + 1], unit, bias));
    }
  }
}

}  // namespace lowbit::decode
