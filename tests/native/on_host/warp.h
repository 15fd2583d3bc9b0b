// Instructions of a warp, from the register ownership that the PTX ISA documents. None of them orders memory.
#pragma once
#include "on_host/block.h"

namespace emulated {

template <class Act>
float half_of(uint32_t pair, int j) {
  const uint16_t bits = pair >> (16 * j);
  Act value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
  const int warp = current / 32, lane = current % 32;
  exchange[warp][lane][0] = row;
  wait_for_lanes();
  for (int i = 0; i < 4; ++i)
    to[i] = load<uint32_t>(exchange[warp][8 * i + lane / 4][0] + lane % 4 * 4, lane % 4 ? 4 : 16);
  wait_for_lanes();
}

inline void store_turned(uint32_t row, const uint32_t (&from)[4]) {
  const int warp = current / 32, lane = current % 32;
  auto& own = exchange[warp][lane];
  std::copy(from, from + 4, own);
  own[4] = row;
  wait_for_lanes();
  // Of turned matrix i a lane writes columns 2t and 2t + 1 of row g: rows 2t and 2t + 1 of what came, column g.
  for (int i = 0; i < 4; ++i) {
    uint32_t pair = 0;
    for (int j = 0; j < 2; ++j)
      pair |= (exchange[warp][(lane % 4 * 2 + j) * 4 + lane / 8][i] >> 16 * (lane / 4 % 2) & 0xFFFF) << 16 * j;
    store(exchange[warp][8 * i + lane / 4][4] + lane % 4 * 4, pair, lane % 4 ? 4 : 16);
  }
  wait_for_lanes();
}

// The operands of this lane's part of a product, to the other lanes.
inline void show(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& own = exchange[current / 32][current % 32];
  std::copy(a, a + 4, own);
  own[4] = b0, own[5] = b1;
  wait_for_lanes();
}

template <class Act>
void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int warp = current / 32, lane = current % 32;
  show(a, b0, b1);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, token = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      sum[i] += half_of<Act>(exchange[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                half_of<Act>(exchange[warp][token * 4 + k % 8 / 2][4 + k / 8], k % 2);
  }
  wait_for_lanes();
}

// Unsigned bytes times signed ones: m16n8k32.
inline void mma_bytes(int (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int warp = current / 32, lane = current % 32;
  show(a, b0, b1);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k) {
      const uint32_t of_a = exchange[warp][row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
      const uint32_t of_b = exchange[warp][column * 4 + k % 16 / 4][4 + k / 16];
      sum[i] += static_cast<uint8_t>(of_a >> k % 4 * 8) * static_cast<int8_t>(of_b >> k % 4 * 8);
    }
  }
  wait_for_lanes();
}

template <class T>
T of_lane(T value, int lane) {
  static_assert(sizeof(T) == 4);
  const int warp = current / 32;
  std::memcpy(&exchange[warp][current % 32][7], &value, 4);
  wait_for_lanes();
  std::memcpy(&value, &exchange[warp][lane][7], 4);
  wait_for_lanes();
  return value;
}

inline uint32_t transpose(uint32_t pair) {
  const int warp = current / 32, lane = current % 32;
  exchange[warp][lane][6] = pair;
  wait_for_lanes();
  uint32_t turned = 0;
  for (int j = 0; j < 2; ++j)
    turned |= (exchange[warp][(lane % 4 * 2 + j) * 4 + lane / 8][6] >> (16 * (lane / 4 % 2)) & 0xFFFF) << (16 * j);
  wait_for_lanes();
  return turned;
}

}  // namespace emulated
