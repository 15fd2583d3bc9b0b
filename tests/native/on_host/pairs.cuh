// In place of csrc/templates/ptx/pairs.cuh.
#pragma once
#include "on_host/warp.h"

namespace lowbit::ptx {

inline uint32_t select(uint32_t a, uint32_t b, uint32_t mask) { return (a & mask) | (b & ~mask); }
inline uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t more) { return (word & mask) | more; }

// As PTX says of prmt: bit 3 of a selector repeats the sign of the byte.
inline uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t which) {
  uint32_t made = emulated::byte_perm(low, high, which);
  for (int i = 0; i < 4; ++i)
    if (which >> (4 * i + 3) & 1) made = (made & ~(0xFFu << 8 * i)) | (made >> (8 * i + 7) & 1 ? 0xFFu << 8 * i : 0u);
  return made;
}

template <int Half>
uint32_t twice(uint32_t pair) {
  return (pair >> 16 * Half & 0xFFFF) * 0x10001;
}

constexpr uint32_t kMinusZeros = 0x80008000u;

// of(number of a, of b, of c) of each half, rounded once: doubles hold all digits of products and sums of such numbers.
template <class Act, class Of>
uint32_t each_half(uint32_t a, uint32_t b, uint32_t c, const Of& of) {
  uint32_t made = 0;
  for (int j = 0; j < 2; ++j) {
    const double one = emulated::half_of<Act>(a, j), two = emulated::half_of<Act>(b, j);
    const Act rounded(of(one, two, static_cast<double>(emulated::half_of<Act>(c, j))));
    made |= uint32_t{emulated::as<uint16_t>(rounded)} << (16 * j);
  }
  return made;
}
template <class Act>
uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  return each_half<Act>(a, b, c, [](double one, double two, double three) { return one * two + three; });
}
template <class Act>
uint32_t multiply(uint32_t a, uint32_t b) {
  return each_half<Act>(a, b, 0, [](double one, double two, double) { return one * two; });
}
}  // namespace lowbit::ptx
