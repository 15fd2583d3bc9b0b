// Numbers of fp16 or bf16, two in a word.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace lowbit {

// Both halves the same number.
template <class Act>
__device__ __forceinline__ uint32_t both_halves(float value) {
  if constexpr (std::is_same<Act, __half>::value) {
    const __half2 pair = __float2half2_rn(value);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __float2bfloat162_rn(value);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

template <class Act>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same<Act, __half>::value) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace lowbit
