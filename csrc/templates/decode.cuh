// Family `decode`: y = x * W^T for up to 4 tokens, bound by reading W once.
//
//   W  packed codes in layout nvidia, 16-bit scales and zeros [N/16][G][16] (lowbit/pack/layout.py)
//   x  fp16 or bf16 [m, k], rows 16-byte aligned;  y  [m, n] of the same type;  fp32 sums
//
// A warp multiplies row tiles of W, 16 rows each, by x, 128 k at a time (a step); its codes come through a ring of its
// own in shared memory, and x of the block stays there (decode/resident.cuh). There are two workers: integers times x
// as 8-bit digits (byte_worker.cuh), and floats and scales finer than 128 k times x in its own type (chunk_worker.cuh).
// Weights do not depend on the kernel before: the first of them are fetched before griddepcontrol.wait.
//
// Blocks take half of a multiprocessor, so that the next launch starts early beside them, or all of it, where twice as
// many warps are worth more than that.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../args.h"
#include "decode/resident.cuh"
#include "decode/shape.cuh"
#include "decode/spread.cuh"
#include "launch.cuh"
#include "layout.cuh"
#include "types.cuh"

namespace lowbit::decode {

// Whether a kernel is built. Why no larger blocks for scales finer than 128 k: they were no faster.
template <class Tile, bool Fine>
constexpr bool kBuilt = Tile::kKind == Kind::kHalf || !Fine;

// Launches one kernel; cudaErrorInvalidValue when its blocks can't hold x, or it is not built.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int launch_resident(Problem p, Launch launch) {
  if constexpr (kBuilt<Tile, Fine>) {
    static Prepared prepared;
    const auto function = resident<Weight, Act, Tile, Fine, Zeros>;
    if (const cudaError_t error =
            prepare(reinterpret_cast<const void*>(function), Tile::kSharedBytes, launch.device, prepared))
      return error;
    launch.overlap &= prepared.may_overlap(launch.device);
    if (!spread<Weight, Act, Tile, Fine, Zeros>(p, launch)) return cudaErrorInvalidValue;
    // Why all shared memory: two blocks of one launch on a multiprocessor would leave another one idle.
    return start(function, p, p.grid, Tile::kThreads, Tile::kSharedBytes, 1 << p.cluster_shift, launch);
  }
  return cudaErrorInvalidValue;
}

// Whether a product rather takes whole multiprocessors: the larger blocks gain more than it costs that the next launch
// can't start early. Measured on an H200.
template <class Tile>
inline bool prefers_whole(const Problem& p, int bits) {
  const int64_t steps = static_cast<int64_t>(p.tiles) * p.steps, megabytes = 256 * bits * steps >> 20;
  return steps > 48 * 1024 || megabytes > (Tile::kTokens <= 2 ? 20 : 31);
}

// Tries the kernels that may hold the problem, the fastest first.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int launch_kernel(const Problem& p, const Launch& launch) {
  const bool whole = prefers_whole<Tile>(p, Weight::kBits);
  int error = cudaErrorInvalidValue;
  for (const bool other : {false, true})
    if (error == cudaErrorInvalidValue)
      error = whole != other
                  ? launch_resident<Weight, Act, decode::Tile<Tile::kTokens, Kind::kWhole>, Fine, Zeros>(p, launch)
                  : launch_resident<Weight, Act, decode::Tile<Tile::kTokens, Kind::kHalf>, Fine, Zeros>(p, launch);
  return error;
}

// args: checked by the caller; m <= Tile::kTokens, x rows 16-byte aligned, codes in layout nvidia, 16-bit scales.
// Returns a cudaError_t: cudaErrorInvalidValue when this tile can't hold the problem.
template <class Weight, class Act, class Tile>
inline int launch(const MatmulArgs& args, const Launch& launch, Affine affine) {
  const layout::Packed packed(Layout::kNvidia, args.w.n, args.w.k, Weight::kBits);
  const bool whole_row = args.w.group_size < 0;
  if (args.x.m < 1 || args.x.m > Tile::kTokens || args.w.scale_type == ScaleType::kFloat32)
    return cudaErrorInvalidValue;

  Problem p{};
  p.codes = args.w.codes;
  p.scales = static_cast<const uint8_t*>(args.w.scales);
  p.zeros = static_cast<const uint8_t*>(args.w.zeros);
  p.x = static_cast<const uint8_t*>(args.x.data);
  p.y = args.y.data;
  p.bias = args.y.bias;
  p.x_stride = args.x.row_stride;
  p.y_stride = args.y.row_stride;
  p.plane_stride = packed.rows / 8 * packed.cols;
  p.n = static_cast<int>(args.w.n), p.k = static_cast<int>(args.w.k), p.m = static_cast<int>(args.x.m);
  p.columns = static_cast<int>(packed.cols);
  p.tiles = (p.n + 15) / 16;
  p.steps = (p.k + kStepK - 1) / kStepK;
  p.group_shift = 31;
  if (!whole_row)
    for (p.group_shift = 4; (1 << p.group_shift) < args.w.group_size;) ++p.group_shift;
  p.group_steps = std::max(p.group_shift - 7, 0);
  p.groups = whole_row ? 1 : static_cast<int>((args.w.k + args.w.group_size - 1) / args.w.group_size);
  p.step = Weight::kFloat ? 1.0f : affine.step;
  p.zero_base = Weight::kFloat ? 0.0f : affine.offset / affine.step;
  p.zero_factor = 1.0f / p.step;
  p.bf16_scales = args.w.scale_type == ScaleType::kBFloat16;
  p.zero_kind = args.w.zero_kind;
  p.bias_type = args.y.bias_type;
  const bool fine = p.group_shift < 7;
  if (p.zero_kind == ZeroKind::kNone)
    return fine ? launch_kernel<Weight, Act, Tile, true, false>(p, launch)
                : launch_kernel<Weight, Act, Tile, false, false>(p, launch);
  return fine ? launch_kernel<Weight, Act, Tile, true, true>(p, launch)
              : launch_kernel<Weight, Act, Tile, false, true>(p, launch);
}

}  // namespace lowbit::decode
