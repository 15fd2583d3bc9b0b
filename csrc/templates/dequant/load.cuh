// From shared memory to registers: the words of one lane, and its scales.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/async.cuh"

namespace lowbit {

// Of one plane at 128 k of a row tile, which begin at `from`.
template <int Width>
__device__ __forceinline__ void load_plane(uint32_t from, int lane, uint32_t* words) {
  if constexpr (Width == 1) {
    ptx::load_shared(from + lane * 8, words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < Width / 2; ++i)
      ptx::load_shared(from + i * 512 + lane * 16, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
}

// Scales or zeros of rows g and g + 8 as floats, from their word.
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, bool bf16) {
  const float2 half = __half22float2(reinterpret_cast<const __half2&>(pair));
  return {bf16 ? __uint_as_float(pair << 16) : half.x, bf16 ? __uint_as_float(pair & 0xFFFF0000u) : half.y};
}

}  // namespace lowbit
