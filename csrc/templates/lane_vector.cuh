// A lane's bytes in a tile of a packed weight, 8 or 16, as one access to memory: from and to words in registers.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace lowbit {

template <int Words>
__device__ __forceinline__ void load_vector(const uint8_t* from, uint32_t* to) {
  static_assert(Words == 2 || Words == 4, "8 or 16 bytes");
  if constexpr (Words == 2) {
    const uint2 vector = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = vector.x, to[1] = vector.y;
  } else {
    const uint4 vector = __ldg(reinterpret_cast<const uint4*>(from));
    to[0] = vector.x, to[1] = vector.y, to[2] = vector.z, to[3] = vector.w;
  }
}

template <int Words>
__device__ __forceinline__ void store_vector(uint8_t* to, const uint32_t* from) {
  static_assert(Words == 2 || Words == 4, "8 or 16 bytes");
  if constexpr (Words == 2)
    *reinterpret_cast<uint2*>(to) = {from[0], from[1]};
  else
    *reinterpret_cast<uint4*>(to) = {from[0], from[1], from[2], from[3]};
}

}  // namespace lowbit
