// From a stage in shared memory to registers: the words of one lane.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../dequant/planes.cuh"
#include "../ptx/async.cuh"

namespace lowbit::decode {

// Of one plane at one step, which begins at `from`.
template <int Width>
__device__ __forceinline__ void load_plane(uint32_t from, int lane, uint32_t* words) {
  if constexpr (Width == 1) {
    ptx::load_shared(from + lane * 8, words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < Width / 2; ++i)
      ptx::load_shared(from + i * 512 + lane * 16, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
}

// Of every plane at one of the `Steps` steps of a row tile's stage.
template <int Steps, int Bits>
__device__ __forceinline__ void load_words(uint32_t stage, int step, int lane, planes::Words<Bits>& words) {
  uint32_t* to = words.word;
  const auto load = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if constexpr ((Bits & kWidth) != 0) {
      load_plane<kWidth>(stage + step * 256 * kWidth, lane, to);
      stage += Steps * 256 * kWidth, to += 2 * kWidth;
    }
  };
  load(std::integral_constant<int, 8>{});
  load(std::integral_constant<int, 4>{});
  load(std::integral_constant<int, 2>{});
  load(std::integral_constant<int, 1>{});
}

}  // namespace lowbit::decode
