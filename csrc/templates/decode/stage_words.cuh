// From a stage in shared memory to registers: the words of one lane.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../dequant/load.cuh"
#include "../dequant/planes.cuh"

namespace lowbit::decode {

// Of every plane at one of the `Steps` steps of a row tile's stage.
template <int Steps, int Bits>
__device__ __forceinline__ void load_words(uint32_t stage, int step, int lane, planes::Words<Bits>& words) {
  uint32_t* to = words.word;
  const auto load = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if constexpr ((Bits & kWidth) != 0) {
      load_plane<kWidth>(stage + step * 256 * kWidth + lane_place(kWidth, lane), to);
      stage += Steps * 256 * kWidth, to += 2 * kWidth;
    }
  };
  load(std::integral_constant<int, 8>{});
  load(std::integral_constant<int, 4>{});
  load(std::integral_constant<int, 2>{});
  load(std::integral_constant<int, 1>{});
}

}  // namespace lowbit::decode
