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

// A warp's sums of tile i of the pass.
template <class Tile>
__device__ __forceinline__ void hand_in(const Position& at, uint32_t place, int i,
                                        const float (&total)[Tile::kColumns][4]) {
  const Problem& p = at.p;
  constexpr int kTokens = Tile::kTokens, kColumns = Tile::kColumns;
  const int slot = (at.warp >> p.warps_k_shift) * p.pass_tiles + i;
  const int owned = ((slot >> p.cluster_shift) << (p.cluster_shift + p.warps_k_shift)) + at.slice;
  const uint32_t owner = slot & ((1 << p.cluster_shift) - 1);
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
    if (at.lane % 4 == 0)
      ptx::store_in_cluster(place + (owned * 8 + at.lane / 4) * 16, owner, {values[0], values[1], values[2], values[3]},
                            p.cluster_shift);
  } else {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const float4 values = {total[column][0], total[column][1], total[column][2], total[column][3]};
      ptx::store_in_cluster(place + ((owned * kColumns + column) * 32 + at.lane) * 16, owner, values, p.cluster_shift);
    }
  }
}

// Waits for all that was handed in.
__device__ __forceinline__ void meet(const Problem& p) {
  if (p.cluster_shift) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

// Stores this block's tiles of the pass whose first tile is `first` of each row group.
// Four threads find one value: each a quarter of the slices.
template <class Act, class Decoder, class Tile, bool Fine>
__device__ __forceinline__ void store_pass(const Position& at, uint32_t place, int first) {
  const Problem& p = at.p;
  constexpr int kTokens = Tile::kTokens, kColumns = Tile::kColumns;
  const int splits = 1 << (p.cluster_shift + p.warps_k_shift);
  const int slots = (Tile::kWarps >> p.warps_k_shift) * p.pass_tiles;
  const int owned = (slots - at.rank + (1 << p.cluster_shift) - 1) >> p.cluster_shift;
  const int quarter = threadIdx.x % 4, row = threadIdx.x / 4 % 16;
#pragma unroll 1
  for (int i = threadIdx.x / 64; i < owned * p.m; i += Tile::kThreads / 64) {
    const int own = p.m == 1 ? i : i / p.m, token = i - own * p.m;
    const int slot = (own << p.cluster_shift) + at.rank;
    const int group = p.pass_tiles == 1 ? slot : slot / p.pass_tiles, row_group = at.first_row_group + group;
    const int tile = p.row_groups(row_group) + first + slot - group * p.pass_tiles, n = tile * 16 + row;
    float value = 0.0f;
#pragma unroll 2
    for (int s = quarter; s < splits; s += 4) {
      if constexpr (kTokens <= 2) {
        const uint32_t from = place + ((own * splits + s) * 8 + row % 8) * 16 + row / 8 * 8 + token * 4;
        value += __uint_as_float(ptx::load_shared(from));
      } else {
        const uint32_t from =
            place + (((own * splits + s) * kColumns + token / 8) * 32 + row % 8 * 4) * 16 + row / 8 * 8;
#pragma unroll
        for (int phase = 0; phase < (Fine ? 1 : Tile::kPhases); ++phase) {
          const int column = phase * kTokens + token % 8;
          value += __uint_as_float(ptx::load_shared(from + column / 2 * 16 + column % 2 * 4));
        }
      }
    }
    value += __shfl_xor_sync(~0u, value, 1);
    value += __shfl_xor_sync(~0u, value, 2);
    if (quarter || tile >= p.row_groups(row_group + 1) || n >= p.n) continue;
    constexpr float kUnit[2] = {Decoder::kUnit / (1 << Decoder::exponent(0, 0)),
                                Decoder::kUnit / (1 << Decoder::exponent(0, 1))};
    value *= p.step * (row < 8 ? kUnit[0] : kUnit[1]);
    if (p.bias) value += load_bias(p.bias, p.bias_type, n);
    static_cast<Act*>(p.y)[token * p.y_stride + n] = static_cast<Act>(value);
  }
}

}  // namespace lowbit::decode
