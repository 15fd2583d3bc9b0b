// From shared memory to registers: the words of one lane, and its scales.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../../args.h"
#include "../ptx/async.cuh"
#include "planes.cuh"

namespace lowbit {

// Of one plane at 128 k of a row tile, which begin at `from`.
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

// Of every plane at a step of a row tile; `codes`: those of a stage, [plane][row tile][step].
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

// Scales or zeros of rows g and g + 8 as floats, from their word.
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, bool bf16) {
  const float2 half = __half22float2(reinterpret_cast<const __half2&>(pair));
  return {bf16 ? __uint_as_float(pair << 16) : half.x, bf16 ? __uint_as_float(pair & 0xFFFF0000u) : half.y};
}

// Scales or zeros of this lane's rows of a group of a row tile, which begins at `from`; Stage::kFloatScales: whether
// they may be of fp32. Types: bf16_scales, and then fp32_scales.
template <class Stage, class Types>
__device__ __forceinline__ float2 load_pair(const Types& p, uint32_t from, int lane) {
  if constexpr (Stage::kFloatScales) {
    const uint2 words = ptx::load_one_or_two(from + lane / 4 * (p.fp32_scales ? 8 : 4), p.fp32_scales);
    const float2 small = unpack_pair(words.x, p.bf16_scales);
    return {p.fp32_scales ? __uint_as_float(words.x) : small.x, p.fp32_scales ? __uint_as_float(words.y) : small.y};
  } else {
    return unpack_pair(ptx::load_shared(from + lane / 4 * 4), p.bf16_scales);
  }
}

// Bytes of a group of a row tile.
template <class Stage, class Problem>
__device__ __forceinline__ int group_bytes(const Problem& p) {
  if constexpr (Stage::kFloatScales) {
    return p.group_bytes;
  } else {
    return 32;
  }
}

// A ScaledDecoder's numbers for group `group` of a stage, of the rows of a lane of a row tile. Codes of the stage begin
// at `codes`, then come scales [row tile][p.stage_groups][group_bytes], then zeros.
template <class Stage, class Problem, class Decoder>
__device__ __forceinline__ typename Decoder::Group load_group(const Problem& p, const Decoder& decoder, uint32_t codes,
                                                              int tile, int group, int lane) {
  const uint32_t from = codes + Stage::kCodes + (tile * p.stage_groups + group) * group_bytes<Stage>(p);
  const float2 scales = load_pair<Stage>(p, from, lane);
  float2 zeros = {};
  if constexpr (Stage::kZeros) zeros = load_pair<Stage>(p, from + Stage::kScales, lane);
  return decoder.group(scales, zeros, p.zero_kind == ZeroKind::kMin);
}

// The same of rows g and g + 8 for lane 8 i + g, each of a group of its own; the lanes of those rows get it by
// Decoder::of_lane. Why: lanes of four have the same two rows, and each would take 14 instructions for a group, 40 with
// zeros.
template <class Stage, class Problem, class Decoder>
__device__ __forceinline__ typename Decoder::Group load_own_group(const Problem& p, const Decoder& decoder,
                                                                  uint32_t codes, int tile, int group, int lane) {
  return load_group<Stage>(p, decoder, codes, tile, group, lane % 8 * 4);
}

}  // namespace lowbit
