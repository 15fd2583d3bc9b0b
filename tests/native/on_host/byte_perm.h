// Instructions on whole words, for a host.
#pragma once
#include <cstdint>

namespace emulated {

// Byte i of the result is byte (selector >> 4i) % 8 of b:a.
inline uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t made = 0;
  for (int i = 0; i < 4; ++i) made |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return made;
}

// The upper half of a product.
inline uint32_t multiply_high(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }

}  // namespace emulated
