// Work cut into parts that differ by one at most.
//
// Plain arithmetic that compiles for the host too, so that the tests can walk all workers without a GPU.
#pragma once
#include <cstdint>

#include "layout.cuh"

namespace lowbit {

// Part i begins at i * each + min(i, more).
struct Cut {
  int each, more;

  LOWBIT_HOST_DEVICE inline int operator()(int i) const {
#ifdef __CUDA_ARCH__
    return i * each + min(i, more);
#else
    return i * each + (i < more ? i : more);
#endif
  }
  // The part that holds `at`.
  LOWBIT_HOST_DEVICE constexpr int part_of(int at) const {
    const int longer = more * (each + 1);
    return at < longer ? at / (each + 1) : (at - more) / each;
  }
};

}  // namespace lowbit
