// Descriptions of the tensors that the copy engine reads, and the numbers of a problem: plain arithmetic on the host.
#pragma once
#include <cuda.h>

#include <algorithm>

#include "../../args.h"
#include "../dequant/planes.cuh"
#include "../form.cuh"
#include "../layout.cuh"
#include "lines.cuh"
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

// What of a kernel its problem depends on. Why not types: this is then compiled once, not for every kernel.
struct Traits {
  int bits;
  bool is_float, fine, zeros;
  int tokens, row_tiles, cluster;  // of its tile
  bool wgmma;
  int steps;  // of 128 k, in a stage
};

template <class Weight, class Tile, class Form>
constexpr Traits kTraits = {Weight::kBits,  Weight::kFloat, Form::kFine,
                            Form::kZeros,   Tile::kTokens,  Tile::kRowTiles,
                            Tile::kCluster, Tile::kWgmma,   Stage<Weight, Tile, Form>::kSteps};

// Fills in the problem; false when a tensor is none that the copy engine can read.
inline bool pose(const Traits& traits, const MatmulArgs& args, const Launch& launch, Affine affine,
                 Posed<kMostMaps>& p) {
  const layout::Packed packed(Layout::kNvidia, args.w.n, args.w.k, traits.bits);
  const uint64_t groups = groups_of(args.w), tiles = (args.w.n + 15) / 16;
  const auto box_tiles = static_cast<uint32_t>(traits.row_tiles);
  const GroupLength group = group_length(args.w);
  p.group_steps = group.steps, p.group_fragments = group.fragments;
  p.stage_groups = std::max(traits.fine ? traits.steps * 8 >> group.fragments : traits.steps >> group.steps, 1);

  constexpr auto kWords = CU_TENSOR_MAP_DATA_TYPE_UINT64;  // of 8 bytes: a box may have 256 of them
  bool good = true;
  for (int width = 8; width >= 1; width /= 2) {
    if (!(traits.bits & width)) continue;
    const uint64_t row = packed.cols * 2 * width;
    const Plane plane{args.w.codes + packed.rows / 8 * packed.cols * layout::plane_low(traits.bits, width),
                      row / 8,
                      static_cast<uint64_t>(packed.rows / 16),
                      row,
                      static_cast<uint32_t>(traits.steps * 32 * width),
                      box_tiles};
    good &= describe(launch, p.maps[first_plane(traits.zeros) + planes::plane_index(traits.bits, width)], kWords,
                     CU_TENSOR_MAP_SWIZZLE_NONE, plane);
  }
  p.fp32_scales = args.w.scale_type == ScaleType::kFloat32, p.group_bytes = p.fp32_scales ? 64 : 32;
  const uint64_t words = p.group_bytes / 8;
  Plane scales{
      args.w.scales, groups * words, tiles, groups * p.group_bytes, static_cast<uint32_t>(p.stage_groups * words),
      box_tiles};
  good &= describe(launch, p.maps[kMapOfScales], kWords, CU_TENSOR_MAP_SWIZZLE_NONE, scales);
  scales.data = args.w.zeros;
  if (traits.zeros) good &= describe(launch, p.maps[kMapOfZeros], kWords, CU_TENSOR_MAP_SWIZZLE_NONE, scales);
  p.n = static_cast<int>(args.w.n), p.m = static_cast<int>(args.x.m);
  p.token_tiles = (p.m + traits.tokens - 1) / traits.tokens;
  // Why: what lies beyond the last token comes slowly, although it is never read (docs/notes/gemm-sm90.md).
  p.tile_tokens = static_cast<int>(layout::round_up((p.m + p.token_tiles - 1) / p.token_tiles, 8 * traits.cluster));
  const int64_t row_stride = args.x.m > 1 ? args.x.row_stride : layout::round_up(args.w.k, 8);
  const Plane x{args.x.data,
                static_cast<uint64_t>(args.w.k),
                static_cast<uint64_t>(args.x.m),
                static_cast<uint64_t>(row_stride * 2),
                64,
                static_cast<uint32_t>(p.tile_tokens / traits.cluster)};
  good &= describe(launch, p.maps[kMapOfX], CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_128B, x);

  const int rows = 16 * traits.row_tiles * traits.cluster, most = launch.clusters[traits.cluster / 2];
  p.row_blocks = (p.n + rows - 1) / rows;
  const int64_t tasks = int64_t{p.row_blocks} * p.token_tiles;
  const int64_t stages = (packed.cols / kStepK + traits.steps - 1) / traits.steps;
  if (std::max(tasks, stages * most) > INT32_MAX) return false;
  p.deal = deal(static_cast<int>(tasks), static_cast<int>(stages), most, traits.wgmma);
  p.y = args.y.data, p.y_stride = args.y.row_stride, p.lines = has_lines(args);
  p.bias = args.y.bias, p.bias_type = args.y.bias_type, p.row_scales = args.w.row_scales;
  p.step = traits.is_float ? 1.0f : affine.step;
  p.zero_base = traits.is_float ? 0.0f : affine.offset / affine.step;
  const bool is_min = args.w.zero_kind == ZeroKind::kMin;
  p.zero_on_code = is_min ? 0.0f : 1.0f / p.step, p.zero_on_value = is_min ? 1.0f / p.step : 0.0f;
  p.bf16_scales = args.w.scale_type == ScaleType::kBFloat16;
  p.zero_kind = args.w.zero_kind, p.codebook = args.w.codebook;
  return good;
}

}  // namespace lowbit::gemm_sm90
