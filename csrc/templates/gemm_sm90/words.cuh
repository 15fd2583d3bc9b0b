// From a stage in shared memory to registers: the words of one lane.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../dequant/load.cuh"
#include "../dequant/planes.cuh"
#include "shape.cuh"

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
      load_plane<kWidth>(from, lane, to);
      codes += Tile::kRowTiles * Stage::kSteps * kTile, to += 2 * kWidth;
    }
  };
  load(std::integral_constant<int, 8>{});
  load(std::integral_constant<int, 4>{});
  load(std::integral_constant<int, 2>{});
  load(std::integral_constant<int, 1>{});
}

}  // namespace lowbit::gemm_sm90
