// Which place of a ring of stages comes next, and the phase that its barriers are in.
#pragma once
#include <cstdint>

namespace lowbit::narrow {

struct Place {
  int depth;  // stages
  uint32_t index = 0, parity = 0;
  __device__ explicit Place(int stages) : depth(stages) {}
  __device__ __forceinline__ void next() {
    if (static_cast<int>(++index) == depth) index = 0, parity ^= 1;
  }
};

}  // namespace lowbit::narrow
