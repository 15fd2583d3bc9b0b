// From shared memory to registers: the words of one lane, and its scales.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../../args.h"
#include "../ptx/async.cuh"
#include "planes.cuh"

namespace lowbit {

// Where words of a lane lie in a plane of a width.
__host__ __device__ constexpr uint32_t lane_place(int width, int lane) { return lane * (width == 1 ? 8 : 16); }

// The same of the first step of a row tile, in a stage's plane of width 2^log.
template <class Stage>
__device__ __forceinline__ uint32_t words_place(int tile, int log, int lane) {
  return tile * Stage::kSteps * (256 << log) + lane_place(1 << log, lane);
}

// Of one plane at 128 k of a row tile; `from`: where the first of them lie.
template <int Width>
__device__ __forceinline__ void load_plane(uint32_t from, uint32_t* words) {
  if constexpr (Width == 1) {
    ptx::load_shared(from, words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < Width / 2; ++i)
      ptx::load_shared(from + i * 512, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
}

// Of every plane at a step of a row tile; `codes`: those of a stage, [plane][row tile][step]. places: where the lane's
// words lie in a plane, by the log2 of its width.
template <class Stage, class Tile, class Places>
__device__ __forceinline__ void load_words(uint32_t codes, int step, const Places& places,
                                           planes::Words<Stage::kBits>& words) {
  uint32_t* to = words.word;
  const auto load = [&](auto width) {
    constexpr int kWidth = decltype(width)::value, kTile = 256 * kWidth, kLog = kWidth / 2 - kWidth / 8;
    if constexpr ((Stage::kBits & kWidth) != 0) {
      load_plane<kWidth>(codes + step * kTile + places(kLog), to);
      codes += Tile::kRowTiles * Stage::kSteps * kTile, to += 2 * kWidth;
    }
  };
  load(std::integral_constant<int, 8>{});
  load(std::integral_constant<int, 4>{});
  load(std::integral_constant<int, 2>{});
  load(std::integral_constant<int, 1>{});
}
template <class Stage, class Tile>
__device__ __forceinline__ void load_words(uint32_t codes, int tile, int step, int lane,
                                           planes::Words<Stage::kBits>& words) {
  const auto place = [&](int log) { return words_place<Stage>(tile, log, lane); };
  load_words<Stage, Tile>(codes, step, place, words);
}

// Scales or zeros of rows g and g + 8 as floats, from their word.
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, bool bf16) {
  const float2 half = __half22float2(reinterpret_cast<const __half2&>(pair));
  return {bf16 ? __uint_as_float(pair << 16) : half.x, bf16 ? __uint_as_float(pair & 0xFFFF0000u) : half.y};
}

// Scales or zeros of a lane's rows of a group, which lie at `from`; Stage::kFloatScales: whether they may be of fp32.
// Types: bf16_scales, and then fp32_scales.
template <class Stage, class Types>
__device__ __forceinline__ float2 load_pair(const Types& p, uint32_t from) {
  if constexpr (Stage::kFloatScales) {
    const uint2 words = ptx::load_one_or_two(from, p.fp32_scales);
    const float2 small = unpack_pair(words.x, p.bf16_scales);
    return {p.fp32_scales ? __uint_as_float(words.x) : small.x, p.fp32_scales ? __uint_as_float(words.y) : small.y};
  } else {
    return unpack_pair(ptx::load_shared(from), p.bf16_scales);
  }
}
// The same of a group of a row tile, which begins at `from`.
template <class Stage, class Types>
__device__ __forceinline__ float2 load_pair(const Types& p, uint32_t from, int lane) {
  int bytes = 4;
  if constexpr (Stage::kFloatScales) bytes = p.fp32_scales ? 8 : 4;
  return load_pair<Stage>(p, from + lane / 4 * bytes);
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

// Where scales of group `group` of a stage lie, of the rows of a lane of a row tile, from where codes of the stage
// begin: behind these come scales [row tile][p.stage_groups][group_bytes], then zeros.
template <class Stage, class Problem>
__device__ __forceinline__ uint32_t scales_place(const Problem& p, int tile, int group, int lane) {
  const int bytes = group_bytes<Stage>(p);
  return Stage::kCodes + (tile * p.stage_groups + group) * bytes + lane / 4 * (bytes / 8);
}

// A decoder's numbers for a group, whose scales of a lane's rows lie at `from`.
template <class Stage, class Problem, class Decoder>
__device__ __forceinline__ typename Decoder::Group load_group(const Problem& p, const Decoder& decoder, uint32_t from) {
  if constexpr (Decoder::kTakesPairs) {
    return decoder.group(ptx::load_shared(from));
  } else {
    const float2 scales = load_pair<Stage>(p, from);
    float2 zeros = {};
    if constexpr (Stage::kZeros) zeros = load_pair<Stage>(p, from + Stage::kScales);
    return decoder.group(scales, zeros, p.zero_kind == ZeroKind::kMin);
  }
}
template <class Stage, class Problem, class Decoder>
__device__ __forceinline__ typename Decoder::Group load_group(const Problem& p, const Decoder& decoder, uint32_t codes,
                                                              int tile, int group, int lane) {
  return load_group<Stage>(p, decoder, codes + scales_place<Stage>(p, tile, group, lane));
}

// The same of rows g and g + 8 for lane 8 i + g, each of a group of its own; the lanes of those rows get it by
// Decoder::of_lane. Why: lanes of four have the same two rows, and each would take 14 instructions for a group, 40 with
// zeros.
template <class Stage, class Problem, class Decoder>
__device__ __forceinline__ typename Decoder::Group load_own_group(const Problem& p, const Decoder& decoder,
                                                                  uint32_t codes, int tile, int group, int lane) {
  return load_group<Stage>(p, decoder, codes, tile, group, lane % 8 * 4);
}

// What every step of a warp has need of, of its row tile, from where codes of a stage begin, or those of a plane: where
// a lane's words lie in planes of 1, 2, 4 and 8 bits, and scales of the stage's first group.
template <class Stage>
struct LanePlaces {
  uint32_t words[4], scales;

  // Why shuffles: the compiler would find them anew in every step.
  template <class Problem>
  __device__ LanePlaces(const Problem& p, int tile, int lane)
      : scales(__shfl_sync(~0u, scales_place<Stage>(p, tile, 0, lane), lane)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (Stage::kBits >> i & 1) words[i] = __shfl_sync(~0u, words_place<Stage>(tile, i, lane), lane);
    }
  }
};

}  // namespace lowbit
