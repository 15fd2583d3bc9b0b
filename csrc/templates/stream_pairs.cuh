// Pairs of codes of the canonical bit stream: what a lane of the packed form takes of an octet (8 codes, Bits bytes).
//
// A pair is two adjacent codes in 2 * Bits bits, the first one low. Lane t owns pair t of every octet of its rows.
// Compiles for the host too, so that the tests can run the packer's steps without a GPU.
#pragma once
#include <cstdint>

#include "lane_words.cuh"

namespace lowbit::stream {

// Pair t of an octet of a row, from the row's words.
template <int Bits>
LOWBIT_HOST_DEVICE inline uint32_t load_pair(const uint32_t* row, int octet, int t) {
  // Four octets are exactly Bits words.
  const unsigned bit = 8 * Bits * (octet % 4) + 2 * Bits * t, shift = bit % 32;
  const uint32_t* at = row + octet / 4 * Bits + bit / 32;
  if constexpr (32 % (2 * Bits) == 0) {
    return at[0] >> shift;  // bits above the pair are the caller's to ignore
  } else {
    return static_cast<uint32_t>((at[0] | static_cast<uint64_t>(at[1]) << 32) >> shift);
  }
}

// Two pairs, of octets 2f and 2f + 1 of a row, to the four bytes of LaneWords, and back. Bits above a pair are ignored.
template <int Bits>
LOWBIT_HOST_DEVICE inline uint32_t to_four(uint32_t even, uint32_t odd) {
  constexpr uint32_t kFirst = (1u << Bits) - 1, kSecond = kFirst << 16;
  return (even & kFirst) | (even << (16 - Bits) & kSecond) | ((odd & kFirst) | (odd << (16 - Bits) & kSecond)) << 8;
}

template <int Bits>
LOWBIT_HOST_DEVICE inline uint32_t pair_of(uint32_t four, int c) {
  constexpr uint32_t kFirst = (1u << Bits) - 1;
  four >>= 8 * c;
  return (four & kFirst) | (four >> (16 - Bits) & kFirst << Bits);
}

// The four pairs of an octet, in its dense form.
template <int Bits>
LOWBIT_HOST_DEVICE inline uint64_t join_pairs(const uint32_t (&pair)[4]) {
  uint64_t octet = 0;
  LOWBIT_UNROLL
  for (int t = 0; t < 4; ++t) octet |= static_cast<uint64_t>(pair[t]) << (2 * Bits * t);
  return octet;
}

}  // namespace lowbit::stream
