// From a stage in shared memory to registers: the words of one lane, and scales.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../dequant/planes.cuh"
#include "../ptx/async.cuh"

namespace lowbit::gemm_sm90 {

// Of every plane at a step of a row tile; `codes`: those of the stage, [plane][row tile][step].
template <class Stage, class Tile>
__device__ __forceinline__ void load_words(uint32_t codes, int tile, int step, int lane,
                                           planes::Words<Stage::kBits>& words) {
  uint32_t* to = words.word;
  const auto load = [&](auto width) {
    constexpr int kWidth = decltype(width)::value, kTile = 256 * kWidth;
    if constexpr ((Stage::kBits & kWidth) != 0) {
      const uint32_t from = codes + (tile * Stage::kSteps + step) * kTile;
      if constexpr (kWidth == 1) {
        ptx::load_shared(from + lane * 8, to[0], to[1]);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i)
          ptx::load_shared(from + i * 512 + lane * 16, to[4 * i], to[4 * i + 1], to[4 * i + 2], to[4 * i + 3]);
      }
      codes += Tile::kRowTiles * Stage::kSteps * kTile, to += 2 * kWidth;
    }
  };
  load(std::integral_constant<int, 8>{});
  load(std::integral_constant<int, 4>{});
  load(std::integral_constant<int, 2>{});
  load(std::integral_constant<int, 1>{});
}

// Scales or zeros of rows g and g + 8 as floats, from their word.
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, bool bf16) {
  const float2 half = __half22float2(reinterpret_cast<const __half2&>(pair));
  return {bf16 ? __uint_as_float(pair << 16) : half.x, bf16 ? __uint_as_float(pair & 0xFFFF0000u) : half.y};
}

}  // namespace lowbit::gemm_sm90
