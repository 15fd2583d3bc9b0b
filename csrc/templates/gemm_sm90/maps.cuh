// Descriptions of the tensors that the copy engine reads, and the numbers of a problem: plain arithmetic on the host.
#pragma once
#include <cuda.h>

#include <algorithm>

#include "../../args.h"
#include "../dequant/planes.cuh"
#include "../layout.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

using EncodeMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                               const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A 2-D tensor [outer][inner] whose rows lie `pitch` bytes apart, read in boxes of box_outer x box_inner.
struct Plane {
  const void* data;
  uint64_t inner, outer, pitch;
  uint32_t box_inner, box_outer;
};

inline bool describe(const Launch& launch, CUtensorMap& map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                     const Plane& plane) {
  const cuuint64_t sizes[2] = {plane.inner, plane.outer}, pitches[1] = {plane.pitch};
  const cuuint32_t box[2] = {plane.box_inner, plane.box_outer}, each[2] = {1, 1};
  const auto encode = reinterpret_cast<EncodeMap>(launch.encode_tensor_map);
  return encode(&map, type, 2, const_cast<void*>(plane.data), sizes, pitches, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Fills in the problem; false when a tensor is none that the copy engine can read.
template <class Weight, class Tile, bool Fine, bool Zeros>
inline bool pose(const MatmulArgs& args, const Launch& launch, Affine affine, Problem& p) {
  using Stage = gemm_sm90::Stage<Weight, Tile, Fine, Zeros>;
  constexpr int kBits = Weight::kBits, kSteps = Stage::kSteps;
  const layout::Packed packed(Layout::kNvidia, args.w.n, args.w.k, kBits);
  const int64_t steps = (args.w.k + kStepK - 1) / kStepK, group = args.w.group_size;
  const uint64_t groups = group < 0 ? 1 : (args.w.k + group - 1) / group, tiles = (args.w.n + 15) / 16;
  if (!Fine)
    for (p.group_steps = group < 0 ? 30 : 0; group > 0 && kStepK << p.group_steps < group;) ++p.group_steps;
  if (Fine)
    while (16 << p.group_fragments < group) ++p.group_fragments;
  p.stage_groups = Fine ? kSteps * 8 >> p.group_fragments : std::max(kSteps >> p.group_steps, 1);

  constexpr auto kWords = CU_TENSOR_MAP_DATA_TYPE_UINT64;  // of 8 bytes: a box may have 256 of them
  bool good = true;
  for (int width = 8; width >= 1; width /= 2) {
    if (!(kBits & width)) continue;
    const uint64_t row = packed.cols * 2 * width;
    const Plane plane{args.w.codes + packed.rows / 8 * packed.cols * layout::plane_low(kBits, width),
                      row / 8,
                      static_cast<uint64_t>(packed.rows / 16),
                      row,
                      static_cast<uint32_t>(kSteps * 32 * width),
                      Tile::kRowTiles};
    good &= describe(launch, p.codes[planes::plane_index(kBits, width)], kWords, CU_TENSOR_MAP_SWIZZLE_NONE, plane);
  }
  Plane scales{args.w.scales,  groups * 4, tiles, groups * 32, static_cast<uint32_t>(p.stage_groups * 4),
               Tile::kRowTiles};
  good &= describe(launch, p.scales, kWords, CU_TENSOR_MAP_SWIZZLE_NONE, scales);
  scales.data = args.w.zeros;
  if (Zeros) good &= describe(launch, p.zeros, kWords, CU_TENSOR_MAP_SWIZZLE_NONE, scales);
  p.n = static_cast<int>(args.w.n), p.m = static_cast<int>(args.x.m);
  p.token_tiles = (p.m + Tile::kTokens - 1) / Tile::kTokens;
  // Why: what lies beyond the last token comes slowly, although it is never read (docs/notes/gemm-sm90.md).
  p.tile_tokens = static_cast<int>(layout::round_up((p.m + p.token_tiles - 1) / p.token_tiles, 8 * Tile::kCluster));
  const int64_t row_stride = args.x.m > 1 ? args.x.row_stride : layout::round_up(args.w.k, 8);
  const Plane x{args.x.data,
                static_cast<uint64_t>(args.w.k),
                static_cast<uint64_t>(args.x.m),
                static_cast<uint64_t>(row_stride * 2),
                64,
                static_cast<uint32_t>(p.tile_tokens / Tile::kCluster)};
  good &= describe(launch, p.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_128B, x);

  constexpr int kRows = Tile::kRows * Tile::kCluster;
  p.row_blocks = (p.n + kRows - 1) / kRows;
  const int64_t tasks = int64_t{p.row_blocks} * p.token_tiles, stages = (steps + kSteps - 1) / kSteps;
  const int most = launch.clusters[Tile::kCluster / 2];
  if (std::max(tasks, stages * most) > INT32_MAX) return false;
  p.deal = deal(static_cast<int>(tasks), static_cast<int>(stages), most, Tile::kWgmma);
  p.y = args.y.data, p.y_stride = args.y.row_stride;
  p.bias = args.y.bias, p.bias_type = args.y.bias_type;
  p.step = Weight::kFloat ? 1.0f : affine.step;
  p.zero_base = Weight::kFloat ? 0.0f : affine.offset / affine.step;
  p.zero_factor = 1.0f / p.step;
  p.bf16_scales = args.w.scale_type == ScaleType::kBFloat16;
  p.zero_kind = args.w.zero_kind;
  return good;
}

}  // namespace lowbit::gemm_sm90
