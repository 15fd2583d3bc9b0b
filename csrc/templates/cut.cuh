// Work cut into parts that differ by one at most.
//
// Plain arithmetic that compiles for the host too, so that the tests can walk all workers without a GPU.
#pragma once
#include <cstdint>

#include "layout.cuh"

namespace lowbit {

// all / by for 0 <= all < 2^31 and inverse = inverse_of(by). Why not a division: it takes some 30 instructions, which
// are on the way to a kernel's first stage, and to its y.
LOWBIT_HOST_DEVICE constexpr uint32_t inverse_of(int by) { return by > 0 ? UINT32_MAX / by : 0; }
LOWBIT_HOST_DEVICE inline int quotient(int all, int by, uint32_t inverse) {
#ifdef __CUDA_ARCH__
  const int found = static_cast<int>(__umulhi(all, inverse));
#else
  const int found = static_cast<int>(uint64_t{static_cast<uint32_t>(all)} * inverse >> 32);
#endif
  return found + (all - found * by >= by);  // it is one too small at most
}

// Part i begins at i * each + min(i, more).
struct Cut {
  int each, more;
  uint32_t inverse = inverse_of(each), inverse_longer = inverse_of(each + 1);

  LOWBIT_HOST_DEVICE inline int operator()(int i) const {
#ifdef __CUDA_ARCH__
    return i * each + min(i, more);
#else
    return i * each + (i < more ? i : more);
#endif
  }
  // How long part i is.
  LOWBIT_HOST_DEVICE constexpr int length(int i) const { return each + (i < more); }
  // The part that holds `at`.
  LOWBIT_HOST_DEVICE inline int part_of(int at) const {
    const bool longer = at < more * (each + 1);
    return quotient(longer ? at : at - more, longer ? each + 1 : each, longer ? inverse_longer : inverse);
  }
};

}  // namespace lowbit
