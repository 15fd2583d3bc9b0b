// Four lanes, t = 0..3 of 4g + t, swap what they hold.
#pragma once
#include <cstdint>

namespace lowbit {

// Item i of lane t becomes item t of lane i: a 4 x 4 transposition in two rounds of exchanges.
__device__ __forceinline__ void quad_transpose(uint32_t (&item)[4], int t) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = t & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t given = upper ? item[i] : item[i + step];
      const uint32_t taken = __shfl_xor_sync(0xFFFFFFFFu, given, step);
      item[i] = upper ? taken : item[i];
      item[i + step] = upper ? item[i + step] : taken;
    }
  }
}

}  // namespace lowbit
