// Descriptions of the tensors that the copy engine reads, and the numbers of a problem: plain arithmetic on the host.
#pragma once
#include <cuda.h>

#include <algorithm>

#include "../../args.h"
#include "../best_patch.cuh"
#include "../dequant/planes.cuh"
#include "../form.cuh"
#include "../layout.cuh"
#include "large.cuh"
#include "lines.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

using EncodeMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                               const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A tensor of two or three dimensions, the innermost first, whose rows lie so many bytes apart, read in boxes.
struct Plane {
  const void* data;
  int dimensions;
  uint64_t size[3], pitch[2];
  uint32_t box[3];
};

inline bool describe(const Launch& launch, CUtensorMap& map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                     const Plane& plane) {
  const cuuint64_t sizes[3] = {plane.size[0], plane.size[1], plane.size[2]};
  const cuuint64_t pitches[2] = {plane.pitch[0], plane.pitch[1]};
  const cuuint32_t each[3] = {1, 1, 1};
  const auto encode = reinterpret_cast<EncodeMap>(launch.encode_tensor_map);
  return encode(&map, type, plane.dimensions, const_cast<void*>(plane.data), sizes, pitches, plane.box, each,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Bytes for stages of a narrow tile; of others how many stages, or places of x, a ring has, and where sums meet.
struct Room {
  int bytes, depth, meet_depth;
};
template <class Weight, class Tile, class Form>
constexpr Room room_of() {
  if constexpr (Tile::kLarge) {
    using Map = LargeMap<Weight, Tile, Form>;
    return {0, Map::kXDepth, Map::kXDepth};
  } else {
    using Map = gemm_sm90::Map<Stage<Weight, Tile, Form>>;
    return {Map::kRoom, Map::kDepth, Map::kMeetDepth};
  }
}

// What of a kernel its problem depends on. Why not types: this is then compiled once, not for every kernel.
struct Traits {
  int bits;
  WeightKind kind;
  int tokens, row_tiles, cluster;  // of its tile
  bool wgmma, half;
  int parts_of_k;  // in a block of more than 16 tokens
  bool one_row;    // whether x of one row may come alone
  int steps;       // of 128 k, in a stage
  narrow::StageBytes parts;
  int most;  // stages in a ring
  Room room;
};

template <class Weight, class Tile, class Form>
constexpr Traits kTraits = {
    Weight::kBits,
    // Why a codebook's is no float: choice.cpp asks for its costs so, and their factor is over those of integers.
    {Weight::kFloat && !Weight::kCodebook, Weight::kCodebook, Form::kFine, Form::kWhole, Form::kZeros && !Form::kWhole},
    Tile::kTokens,
    Tile::kRowTiles,
    Tile::kCluster,
    Tile::kWgmma,
    Tile::kHalf,
    Tile::kParts,
    Stage<Weight, Tile, Form>::kOneRow,
    Stage<Weight, Tile, Form>::kSteps,
    Stage<Weight, Tile, Form>::kParts,
    kMostStages,
    room_of<Weight, Tile, Form>()};

// How tasks of a tile of more than 16 tokens are dealt out; no workers where it is forced and can't be. tasks: of one
// block's rows; pairs: of a worker's, where that is two blocks.
inline MeetingDeal deal_of(const Traits& traits, int tasks, int pairs, int stages, const Launch& launch) {
  const int* most = launch.clusters;
  const MostClusters clusters = {{0, most[0], most[1], most[4], most[2]}};
  const bool paired = traits.cluster == 2;
  const int meet = launch.forced.parts ? launch.forced.blocks : 0;
  const int most_meet = launch.same_sums ? 2 : kMostMeet;
  const Split& by = launch.forced;
  if (meet > most_meet || (meet && (by.warps < narrow::kMostWorkers || by.parts > 1 || by.two_each))) return {};
  if (meet > 1) return deal_to_clusters(tasks, stages, clusters.of[meet], meet);
  if (meet == 1) return MeetingDeal{deal(paired ? pairs : tasks, stages, clusters.of[traits.cluster], true)};
  return paired ? best_deal_of_pairs(pairs, tasks, stages, clusters, most_meet)
                : best_deal(tasks, stages, clusters, most_meet, kMeetSaves / traits.steps);
}

// Those of blocks that have half of a multiprocessor, or whose warpgroups share K: each has a task, or clusters of two
// or four share one each. No workers where the plan has others.
inline MeetingDeal deal_of_one_task(const Traits& traits, int64_t row_tiles, int tasks, int token_tiles, int64_t steps,
                                    int stages, const Launch& launch, Split& split) {
  split = narrow::split_for(
      launch,
      {row_tiles, steps, traits.tokens, traits.bits, traits.row_tiles, launch.clusters, ~0u, traits.kind, token_tiles},
      split);
  const int meet = split.blocks, warps = traits.half ? narrow::kMostWorkers / 2 : narrow::kMostWorkers;
  if (split.row_tiles != traits.row_tiles || split.parts != traits.parts_of_k || split.warps != warps) return {};
  if (split.two_each) return {};
  if ((meet != 1 && meet != 2 && meet != 4) || (traits.parts_of_k > 1 && meet > kMostMeetOfParts)) return {};
  if (tasks > launch.clusters[meet / 2] || (launch.same_sums && meet > 2)) return {};
  if (stages < traits.parts_of_k * meet) return {};  // each warpgroup has one
  return meet > 1 ? deal_to_clusters(tasks, stages, launch.clusters[meet / 2], meet)
                  : narrow::deal_whole(tasks, stages, launch.clusters[0], 1);
}

// How many blocks of those are launched: as many as the device holds at once. Those beyond the workers repeat what
// others do: see launched_blocks of decode/sharing.cuh for why.
inline int launched_blocks(Problem& p, const Launch& launch) {
  const int workers = p.deal.workers, all = launch.clusters[p.deal.meet / 2] * p.deal.meet;
  if (!launch.overlap) return workers;
  int most = 1;  // the largest power of two of workers, whole clusters of them
  while (2 * most <= workers) most *= 2;
  p.repeated = most - 1;
  return all;
}

// Fills in the problem; false when a tensor is none that the copy engine can read, or a forced split can't be.
inline bool pose(const Traits& traits, const MatmulArgs& args, const Launch& launch, Affine affine,
                 Posed<kMostMaps>& p) {
  const layout::Packed packed(Layout::kNvidia, args.w.n, args.w.k, traits.bits);
  const uint64_t groups = groups_of(args.w), tiles = (args.w.n + 15) / 16;
  const GroupLength group = group_length(args.w);
  p.group_steps = group.steps, p.group_fragments = group.fragments;
  p.fp32_scales = args.w.scale_type == ScaleType::kFloat32, p.group_bytes = p.fp32_scales ? 64 : 32;
  const uint64_t words = p.group_bytes / 8;
  const int64_t steps = packed.cols / kStepK;
  const bool narrow = !traits.wgmma;
  if (narrow) {
    // Scales of a stage are a box: 256 words of 8 bytes at most.
    const int most_groups = static_cast<int>(256 / words);
    const int most_steps = traits.kind.fine && group.fragments < 3 ? most_groups << group.fragments >> 3 : most_groups;
    WeightKind kind = traits.kind;
    if (kind.fine) kind.shorter = std::max(2 - group.fragments, 0);
    p.ring = narrow::stages_of(traits.parts, traits.steps, static_cast<int64_t>(tiles), steps, traits.tokens,
                               traits.bits, traits.row_tiles, launch, kind, groups > 1 ? group.steps : -1, most_steps,
                               traits.most, traits.room.bytes);
    if (p.ring.depth == 0) return false;
  }
  const Split split = p.ring.split;
  const int row_tiles = narrow ? split.row_tiles : traits.row_tiles, own_steps = traits.steps * split.parts;
  const auto box_tiles = static_cast<uint32_t>(row_tiles);
  p.stage_groups = std::max(traits.kind.fine ? own_steps * 8 >> group.fragments : own_steps >> group.steps, 1);

  p.n = static_cast<int>(args.w.n), p.m = static_cast<int>(args.x.m);
  const int token_tiles = (p.m + traits.tokens - 1) / traits.tokens;

  // Why first: kernels of other kinds of blocks are asked before, and refuse most products.
  const int rows = 16 * row_tiles, row_blocks = (p.n + rows - 1) / rows;
  const int pairs = (row_blocks + traits.cluster - 1) / traits.cluster, most = launch.clusters[0];
  const int64_t tasks = int64_t{row_blocks} * token_tiles;
  const int64_t stages = layout::round_up((steps + own_steps - 1) / own_steps, split.blocks);
  if (std::max(tasks, stages * most) > INT32_MAX) return false;
  const int all = static_cast<int>(tasks), each = static_cast<int>(stages);
  const bool halves = traits.wgmma && traits.half, one_task = halves || traits.parts_of_k > 1;
  p.deal = one_task       ? deal_of_one_task(traits, static_cast<int64_t>(tiles), all, token_tiles, steps, each, launch,
                                             p.ring.split)
           : !narrow      ? deal_of(traits, all, pairs * token_tiles, each, launch)
           : p.ring.whole ? MeetingDeal{deal(all, each, most, false)}
                          : narrow::deal_whole(all, each, most << split.two_each, split.blocks);
  if (p.deal.workers == 0) return false;
  p.late = p.deal.workers >> split.two_each;
  if (!narrow) p.ring.depth = p.deal.meet > 1 || traits.parts_of_k > 1 ? traits.room.meet_depth : traits.room.depth;
  if (halves) p.ring.split.early = std::min(p.ring.split.early, p.ring.depth);
  const int blocks = p.deal.blocks_of(traits.cluster);

  constexpr auto kWords = CU_TENSOR_MAP_DATA_TYPE_UINT64;  // of 8 bytes: a box may have 256 of them
  bool good = true;
  for (int width = 8; width >= 1; width /= 2) {
    if (!(traits.bits & width)) continue;
    const uint64_t row = packed.cols * 2 * width;
    if (row / 8 > INT32_MAX) return false;  // coordinates of a box are 32 bits wide
    const uint64_t rows = packed.rows / 16;
    const auto step = static_cast<uint32_t>(32 * width);
    Plane plane{args.w.codes + packed.rows / 8 * packed.cols * layout::plane_low(traits.bits, width),
                2,
                {row / 8, rows},
                {row},
                {traits.steps * step, box_tiles}};
    if (narrow) {
      // A box is no longer than 256 words. What lies side by side in one divides a row: what is beyond it becomes 0.
      const int together = steps % traits.steps ? 1 : traits.steps;
      p.box_steps = own_steps / together;
      plane = {plane.data,
               3,
               {together * step, row / 8 / (together * step), rows},
               {together * step * 8, row},
               {together * step, static_cast<uint32_t>(p.box_steps), box_tiles}};
    }
    good &= describe(launch, p.maps[first_plane(traits.kind.zeros()) + planes::plane_index(traits.bits, width)], kWords,
                     CU_TENSOR_MAP_SWIZZLE_NONE, plane);
  }
  Plane scales{args.w.scales,
               2,
               {groups * words, tiles},
               {groups * p.group_bytes},
               {static_cast<uint32_t>(p.stage_groups * words), box_tiles}};
  good &= describe(launch, p.maps[kMapOfScales], kWords, CU_TENSOR_MAP_SWIZZLE_NONE, scales);
  if (args.w.zeros) scales.data = args.w.zeros;  // else zeros are there all the same, and count nothing
  if (traits.kind.zeros()) good &= describe(launch, p.maps[kMapOfZeros], kWords, CU_TENSOR_MAP_SWIZZLE_NONE, scales);
  // Why: what lies beyond the last token comes slowly, although it is never read (docs/notes/gemm-sm90.md).
  const bool one_row = traits.one_row && p.m == 1 && args.w.k % 64 == 0;
  p.tile_tokens = one_row ? 1 : static_cast<int>(layout::round_up((p.m + token_tiles - 1) / token_tiles, 8 * blocks));
  p.x_box = (one_row ? 1 : traits.tokens) * 128;
  const int row_tasks = blocks > 1 ? pairs : row_blocks;
  const auto stage_k = static_cast<float>(own_steps * kStepK);
  const StageReads reads = {static_cast<float>(rows * blocks * traits.bits) / 8 * stage_k,
                            static_cast<float>(p.tile_tokens) * 2 * stage_k};
  p.patches = {row_tasks, token_tiles, best_patch(p.deal, row_tasks, token_tiles, reads)};
  const int64_t row_stride = args.x.m > 1 ? args.x.row_stride : layout::round_up(args.w.k, 8);
  const uint64_t k = args.w.k, m = args.x.m, pitch = row_stride * 2;
  const auto tokens = static_cast<uint32_t>(p.tile_tokens / blocks);
  Plane x{args.x.data, 2, {k, m}, {pitch}, {64, tokens}};
  // All of a stage at once. Why: boxes of a few tokens come slowly.
  p.deep_x = narrow && k % 64 == 0 && (one_row || p.tile_tokens == traits.tokens);
  if (p.deep_x) x = {x.data, 3, {64, m, k / 64}, {pitch, 128}, {64, tokens, static_cast<uint32_t>(2 * own_steps)}};
  // Why no swizzle: lanes then read one row at a place that does not depend on where in a stage it lies.
  good &= describe(launch, p.maps[kMapOfX], CU_TENSOR_MAP_DATA_TYPE_UINT16,
                   one_row ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, x);

  p.y = args.y.data, p.y_stride = args.y.row_stride, p.lines = has_lines(args);
  p.bias = args.y.bias, p.bias_type = args.y.bias_type, p.row_scales = args.w.row_scales;
  p.step = traits.kind.is_float ? 1.0f : affine.step;
  p.zero_base = traits.kind.is_float ? 0.0f : affine.offset / affine.step;
  p.zero_on_code = args.w.zero_kind == ZeroKind::kZero ? 1.0f / p.step : 0.0f;
  p.zero_on_value = args.w.zero_kind == ZeroKind::kMin ? 1.0f / p.step : 0.0f;
  p.bf16_scales = args.w.scale_type == ScaleType::kBFloat16;
  p.zero_kind = args.w.zero_kind, p.codebook = args.w.codebook;
  return good;
}

}  // namespace lowbit::gemm_sm90
