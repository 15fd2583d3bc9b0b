// Family `decode`: y = x * W^T for up to 4 tokens, bound by reading W once.
//
//   W  packed codes in layout nvidia, 16-bit scales and zeros [N/16][G][16] (lowbit/pack/layout.py)
//   x  fp16 or bf16 [m, k], rows 16-byte aligned;  y  [m, n] of the same type;  fp32 sums
//
// A warp multiplies row tiles of W, 16 rows each, by x, 128 k at a time (a step); its codes come through a ring of its
// own in shared memory, and x of the block stays there (decode/resident.cuh). There are two workers: bytes times x as
// 8-bit digits (byte_worker.cuh; integers, and floats of 3 and 4 bits, which are looked up), and floats of 8 bits times
// x in its own type (float_worker.cuh). Groups of at least 128, for one token also of 32 and 64 (integers) and of 16 to
// 64 (float4_e2m1), and floats without zeros: gemm_sm80 and gemm_sm90 take the rest. Weights do not depend on the
// kernel before: the first of them are fetched before griddepcontrol.wait.
//
// Blocks take half of a multiprocessor, so that the next launch starts early beside them; or all of it, where twice as
// many warps are worth more than that; or there are two of half of it on each, which have as many warps, and let the
// next launch start where the first of them ends (sharing.cuh).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../args.h"
#include "decode/resident.cuh"
#include "decode/shape.cuh"
#include "decode/spread.cuh"
#include "form.cuh"
#include "launch.cuh"
#include "layout.cuh"
#include "types.cuh"

namespace lowbit::decode {

template <class Weight, class Tile, class Form>
constexpr Traits kTraits = traits_of<Tile>({Weight::kBits, Weight::kFloat, Form::kZeros, Form::kUnits});

struct Kernel {
  void (*function)(Problem);
  const Traits& traits;
  Prepared& prepared;
};

template <class Weight, class Act, class Tile, class Form>
inline Kernel kernel_of() {
  static Prepared prepared;
  using Worker = WorkerOf<Weight, Act, Tile, Form>;
  using Ring = typename Worker::Ring;
  constexpr const Traits& kOwn = kTraits<Weight, Tile, Form>;
  static_assert(kOwn == Traits{kOwn.weight, Tile::kTokens, Tile::kWarps, Tile::kSharedBytes, Ring::kRows, Worker::kTurn,
                               Ring::kSteps, Ring::kDepth, Map<Ring, Tile>::kX, Worker::kTableBytes, kSumBytes<Worker>},
                "what a plan takes a kernel to be");
  return {resident<Weight, Act, Tile, Form>, kOwn, prepared};
}

// Prepares a kernel; whether its launches overlap, in `launch`.
inline cudaError_t prepare(const Kernel& kernel, Launch& launch) {
  const auto* function = reinterpret_cast<const void*>(kernel.function);
  const cudaError_t error = lowbit::prepare(function, kernel.traits.shared_bytes, launch.device, kernel.prepared);
  launch.overlap &= kernel.prepared.may_overlap(launch.device);
  return error;
}

constexpr Room room_of(const Launch& launch) {
  return {launch.clusters, launch.overlap, launch.follows, launch.forced};
}

// cudaErrorInvalidValue when its blocks can't hold x.
inline int launch_spread(const Kernel& kernel, Problem p, const Spread& found, const Launch& launch) {
  if (!found.bytes) return cudaErrorInvalidValue;
  static_cast<Sharing&>(p) = found.sharing;
  const int blocks = launched_blocks(kernel.traits, p, launch);
  // Why all shared memory: more blocks of one launch on a multiprocessor than it is meant to have would leave another
  // one idle.
  return start(kernel.function, p, blocks, 32 * kernel.traits.warps, kernel.traits.shared_bytes, 1 << p.cluster_shift,
               launch);
}

template <class Weight, class Act, class Tile, class Form>
inline int launch_kernel(const Problem& p, Launch launch) {
  const Kernel kernel = kernel_of<Weight, Act, Tile, Form>();
  if (const cudaError_t error = prepare(kernel, launch)) return error;
  return launch_spread(kernel, p, spread(kernel.traits, p, room_of(launch)), launch);
}

template <class Weight, class Act, class Tile, class Form>
inline int launch_either(const Problem& p, Launch launch) {
  const Kernel half = kernel_of<Weight, Act, decode::Tile<Tile::kTokens, Kind::kHalf>, Form>();
  const Kernel whole = kernel_of<Weight, Act, decode::Tile<Tile::kTokens, Kind::kWhole>, Form>();
  for (const Kernel* kernel : {&half, &whole})
    if (const cudaError_t error = prepare(*kernel, launch)) return error;
  const Found found = spread_either(half.traits, whole.traits, p, room_of(launch));
  return launch_spread(found.whole ? whole : half, p, found.spread, launch);
}

// The problem, but for how it is spread; affine: of integers.
template <class Weight>
inline Problem pose(const MatmulArgs& args, Affine affine) {
  if (Weight::kFloat) affine = bytes::Table<Weight>::kBytes;
  const layout::Packed packed(Layout::kNvidia, args.w.n, args.w.k, Weight::kBits);
  Problem p{};
  p.codes = args.w.codes;
  p.scales = static_cast<const uint8_t*>(args.w.scales);
  p.zeros = static_cast<const uint8_t*>(args.w.zeros);
  p.x = static_cast<const uint8_t*>(args.x.data);
  p.y = args.y.data;
  p.bias = args.y.bias;
  p.row_scales = args.w.row_scales;
  p.x_stride = args.x.row_stride;
  p.y_stride = args.y.row_stride;
  p.plane_stride = packed.rows / 8 * packed.cols;
  p.n = static_cast<int>(args.w.n), p.k = static_cast<int>(args.w.k), p.m = static_cast<int>(args.x.m);
  p.columns = static_cast<int>(packed.cols);
  p.tiles = (p.n + 15) / 16;
  p.steps = (p.k + kStepK - 1) / kStepK;
  const GroupLength group = group_length(args.w);
  p.group_shift = args.w.group_size < 0 ? 31 : group.fragments + 4, p.group_steps = group.steps;
  p.groups = static_cast<int>(groups_of(args.w));
  p.step = affine.step, p.zero_base = affine.offset / affine.step;
  const bool is_min = args.w.zero_kind == ZeroKind::kMin;
  p.zero_on_code = is_min ? 0.0f : 1.0f / p.step, p.zero_on_value = is_min ? 1.0f / p.step : 0.0f;
  p.bf16_scales = args.w.scale_type == ScaleType::kBFloat16;
  p.zero_kind = args.w.zero_kind;
  p.bias_type = args.y.bias_type;
  return p;
}

// Calls run(Groups) for the form that serves a weight, the one of the fewest units; cudaErrorInvalidValue where there
// is none.
template <class Weight, class Tile, class Run>
inline int with_groups(const MatmulArgs& args, const Run& run) {
  const auto with = [&](auto units) {
    constexpr int kUnits = decltype(units)::value;
    if (args.w.zero_kind == ZeroKind::kNone) return run(Groups<kUnits, ZeroForm::kNone>{});
    if constexpr (!Weight::kFloat) return run(Groups<kUnits, ZeroForm::kAny>{});
    return static_cast<int>(cudaErrorInvalidValue);
  };
  constexpr int kMost = kMostUnits<Weight, Tile>;
  if (!is_fine(args.w)) return with(std::integral_constant<int, 1>{});
  if constexpr (kMost >= 4)
    if (args.w.group_size >= 32) return with(std::integral_constant<int, 4>{});
  if constexpr (kMost >= 8)
    if (args.w.group_size >= 16) return with(std::integral_constant<int, 8>{});
  return cudaErrorInvalidValue;
}

// args: checked by the caller; m <= Tile::kTokens, x rows 16-byte aligned, codes in layout nvidia, 16-bit scales.
// Returns a cudaError_t: cudaErrorInvalidValue when this tile can't hold the problem.
template <class Weight, class Act, class Tile>
inline int launch(const MatmulArgs& args, const Launch& launch, Affine affine) {
  if (args.x.m < 1 || args.x.m > Tile::kTokens || args.w.scale_type == ScaleType::kFloat32)
    return cudaErrorInvalidValue;
  const Problem p = pose<Weight>(args, affine);
  return with_groups<Weight, Tile>(
      args, [&](auto groups) { return launch_either<Weight, Act, Tile, decltype(groups)>(p, launch); });
}

}  // namespace lowbit::decode
