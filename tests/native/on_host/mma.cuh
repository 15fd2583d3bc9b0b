// In place of csrc/templates/ptx/mma.cuh.
#pragma once
#include "on_host/warp.h"

namespace lowbit::ptx {

template <class Act>
void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::mma<Act>(sum, a, b0, b1);
}
inline void mma_bytes(int (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::mma_bytes(sum, a, b0, b1);
}
inline uint32_t transpose(uint32_t pair) { return emulated::transpose(pair); }

}  // namespace lowbit::ptx
