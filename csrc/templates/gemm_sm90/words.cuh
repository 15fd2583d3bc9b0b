// From a stage in shared memory to registers: the words of one lane, and what its decoder makes of scales and zeros.
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

// A ScaledDecoder's numbers for group `group` of a stage, of this lane's rows of a row tile.
template <class Stage, class Decoder>
__device__ __forceinline__ typename Decoder::Group load_group(const Problem& p, const Decoder& decoder, uint32_t codes,
                                                              int tile, int group, int lane) {
  const uint32_t from = codes + Stage::kCodes + (tile * p.stage_groups + group) * 32 + lane / 4 * 4;
  const float2 scales = unpack_pair(ptx::load_shared(from), p.bf16_scales);
  float2 zeros = {};
  if constexpr (Stage::kZeros) zeros = unpack_pair(ptx::load_shared(from + Stage::kScales), p.bf16_scales);
  return decoder.group(scales, zeros, p.zero_kind == ZeroKind::kMin);
}

}  // namespace lowbit::gemm_sm90
