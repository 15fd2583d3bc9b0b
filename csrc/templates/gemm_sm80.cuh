// Family `gemm_sm80`: y = x * W^T by mma.sync and cp.async, for compute capability 8.0 and newer.
//
//   W  packed codes in layout nvidia, 16-bit scales and zeros [N/16][G][16] (lowbit/pack/layout.py)
//   x  fp16 or bf16 [m, k], rows 16-byte aligned;  y  [m, n] of the same type;  fp32 sums
//
// A task is 256 rows of W times a tile of tokens, over all of K, which is walked in stages. Workers are
// blocks, one a multiprocessor: whole tasks are dealt out to them, and the stages of those left over are shared evenly
// (deal.cuh). A worker stores y of a task that it has all of; of others it leaves the sums of its part in memory, and
// add_parts makes y of them. Stages are copied to a ring in shared memory (gemm_sm80/feed.cuh): up to 32 tokens by
// warps of their own (gemm_sm80/narrow.cuh), with more by those that multiply them (gemm_sm80/worker.cuh). More tokens
// than a tile has are more tasks. Weights do not depend on the kernel before: on 9.0 and newer the first of them are
// asked for before griddepcontrol.wait.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>

#include "form.cuh"
#include "gemm_sm80/feed.cuh"
#include "gemm_sm80/narrow.cuh"
#include "gemm_sm80/parts.cuh"
#include "gemm_sm80/shape.cuh"
#include "gemm_sm80/worker.cuh"
#include "launch.cuh"

namespace lowbit::gemm_sm80 {

template <class Weight, class Act, class Tile, class Form>
__global__ void __launch_bounds__(Tile::kThreads, 1) multiply(const __grid_constant__ Problem p) {
  using Worker = gemm_sm80::Worker<Weight, Act, Tile, Form>;
  using Stage = typename Worker::Stage;
  extern __shared__ __align__(128) uint8_t memory[];

  // ---- setup
  ptx::launch_dependents();
  const uint32_t base = ptx::shared_address(memory);
  const int depth = p.large ? Stage::kLarge : Stage::kSmall;
  const uint32_t end = base + depth * Stage::kPlace;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (uint32_t place = base; place < end; place += Stage::kPlace) {
      ptx::arrivals_init(place + Stage::kFull, Tile::kThreads);
      ptx::arrivals_init(place + Stage::kEmpty, Tile::kWarps);
    }
  }
  __syncthreads();
  // Why a shuffle: the compiler then knows that a warp goes one way.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Parts parts(p.deal, blockIdx.x);
  const int stages = parts.stages;
  const Feed<Weight, Tile, Form> feed(p);
  Cursor at(p, parts);  // the next stage to ask for

  // ---- weights: they do not depend on the kernel before
  const int early = min(Stage::kEarly, min(depth - 1, stages));
  {
    Cursor first = at;
#pragma unroll 1
    for (int i = 0; i < early; ++i, first.next(p, blockIdx.x)) feed.ask_for_weights(first, base + i * Stage::kPlace);
  }
  ptx::wait_for_previous_kernel();

  // ---- all of the first stages
  const int fill = min(depth - 1, stages);
#pragma unroll 1
  for (int i = 0; i < fill; ++i) {
    const uint32_t place = base + i * Stage::kPlace;
    if (i >= early) feed.ask_for_weights(at, place);
    feed.ask_for_x(at, place);
    ptx::arrive_with_copies(place + Stage::kFull);
    at.next(p, blockIdx.x);
  }

  // ---- stage by stage, part by part
  // Why so few numbers live from part to part: with 64 and 128 tokens every register is taken.
  const Worker worker(p, warp, lane);
  uint32_t place = base, parity = 0;  // where the stage lies, and the phase of its barriers
  int missing = stages - depth + 1;   // stages not asked for yet
  for (int turn = 0; turn < Parts(p.deal, ptx::block_again()).count; ++turn) {
    const Part part = Parts(p.deal, ptx::block_again())[turn];
    typename Worker::Sums sums = {};
#pragma unroll 1
    for (int left = part.end - part.begin; left > 0; --left) {
      ptx::wait_arrivals(place + Stage::kFull, parity);
      worker.run_half(place, 0, sums);
      // Why between the halves: all warps have read the stage before by now, and none waits for the slowest.
      if (missing-- > 0) {
        const bool first = place == base;
        const uint32_t used = (first ? end : place) - Stage::kPlace;
        ptx::wait_arrivals(used + Stage::kEmpty, parity ^ first);
        feed.ask_for_weights(at, used);
        feed.ask_for_x(at, used);
        ptx::arrive_with_copies(used + Stage::kFull);
        at.next(p, blockIdx.x);
      }
      worker.run_half(place, 1, sums);
      __syncwarp();
      if (lane == 0) ptx::arrive(place + Stage::kEmpty);
      if ((place += Stage::kPlace) == end) place = base, parity ^= 1;
    }
    worker.finish(turn, sums);
  }
}

// What of a kernel its problem depends on, and the kernels. Why no types: what takes them is then compiled once.
struct Kernels {
  void (*multiply)(Problem);
  void (*add)(Problem);
  int bits;
  bool is_float, fine;
  bool narrow;
  bool fits_small;  // it is for devices with a small ring too
  int steps;        // of 128 k, in a stage
  int tokens, threads, add_blocks, part_bytes;
  float factor[2];  // of finished sums, by row half, but for the step between codes where narrow
};

template <class Weight, class Act, class Tile, class Form>
inline Kernels kernels() {
  Kernels found{nullptr,
                Shared<Act, gemm_sm80::Tile<Tile::kTokens>>::add_kernel(),
                Weight::kBits,
                Weight::kFloat,
                Form::kFine,
                Tile::kNarrow,
                Stage<Weight, Tile, Form>::kSmall >= 2,
                Stage<Weight, Tile, Form>::kSteps,
                Tile::kTokens,
                Tile::kThreads,
                kAddBlocks<Tile, kAddThreads>,
                kPart<Tile> * 4,
                {1.0f, 1.0f}};
  if constexpr (Tile::kNarrow) {
    found.multiply = multiply_narrow<Weight, Act, Tile, Form>;
    for (int h = 0; h < 2; ++h) found.factor[h] = NarrowWorker<Weight, Act, Tile, Form>::unit(h);
  } else {
    found.multiply = multiply<Weight, Act, Tile, Form>;
  }
  return found;
}

// Fills in the problem; false when the tile can't hold it on this device.
inline bool pose(const Kernels& kernels, const MatmulArgs& args, const Launch& launch, Affine affine, Problem& p) {
  const layout::Packed packed(Layout::kNvidia, args.w.n, args.w.k, kernels.bits);
  const GroupLength group = group_length(args.w);
  p.group_steps = group.steps, p.group_fragments = group.fragments;
  p.stage_groups = std::max(kernels.fine ? kernels.steps * 8 >> group.fragments : kernels.steps >> group.steps, 1);
  p.groups = static_cast<int>(groups_of(args.w));
  for (int width = 8; width >= 1; width /= 2)
    if (kernels.bits & width)
      p.planes[planes::plane_index(kernels.bits, width)] =
          args.w.codes + packed.rows / 8 * packed.cols * layout::plane_low(kernels.bits, width);
  p.scales = static_cast<const uint8_t*>(args.w.scales), p.zeros = static_cast<const uint8_t*>(args.w.zeros);
  p.x = static_cast<const uint8_t*>(args.x.data);
  p.x_pieces = static_cast<uint32_t>(args.x.row_stride / 8);
  p.n = static_cast<int>(args.w.n), p.m = static_cast<int>(args.x.m), p.k = static_cast<int>(args.w.k);
  p.tiles = (p.n + 15) / 16;
  const int row_blocks = (p.tiles + kRowTiles - 1) / kRowTiles,
            token_tiles = (p.m + kernels.tokens - 1) / kernels.tokens;
  p.large = is_large(launch.capability);
  p.tile_tokens = static_cast<int>(layout::round_up((p.m + token_tiles - 1) / token_tiles, 8));
  const int64_t tasks = int64_t{row_blocks} * token_tiles, steps = packed.cols / kStepK,
                stages = (steps + kernels.steps - 1) / kernels.steps;
  if (std::max(tasks, stages * launch.clusters[0]) > INT32_MAX) return false;
  p.patches = {row_blocks, token_tiles, patch_of(token_tiles)};
  if (!p.large && !kernels.fits_small) return false;
  p.steps = static_cast<int>(steps);
  p.deal = deal(static_cast<int>(tasks), static_cast<int>(stages), launch.clusters[0], !kernels.narrow);
  p.y = args.y.data, p.y_stride = args.y.row_stride;
  p.bias = args.y.bias, p.bias_type = args.y.bias_type, p.row_scales = args.w.row_scales;
  p.step = kernels.is_float ? 1.0f : affine.step;
  p.zero_base = kernels.is_float ? 0.0f : affine.offset / affine.step;
  const bool is_min = args.w.zero_kind == ZeroKind::kMin;
  p.zero_on_code = is_min ? 0.0f : 1.0f / p.step, p.zero_on_value = is_min ? 1.0f / p.step : 0.0f;
  for (int h = 0; h < 2; ++h) p.factor[h] = kernels.factor[h] * (kernels.narrow ? p.step : 1.0f);
  p.bf16_scales = args.w.scale_type == ScaleType::kBFloat16;
  p.zero_kind = args.w.zero_kind;
  return true;
}

inline int launch_kernels(const Kernels& kernels, const MatmulArgs& args, Launch launch, Affine affine,
                          Prepared& prepared) {
  Problem p{};
  if (!pose(kernels, args, launch, affine, p)) return cudaErrorInvalidValue;
  const auto* function = reinterpret_cast<const void*>(kernels.multiply);
  const int shared = p.large ? kSharedLarge : kSharedSmall;
  if (const cudaError_t error = prepare(function, shared, launch.device, prepared)) return error;
  launch.overlap &= prepared.may_overlap(launch.device);
  const bool in_parts = p.deal.in_parts();
  if (in_parts)
    p.parts = static_cast<float*>(launch.scratch(launch.owner, int64_t{p.deal.sharers} * 2 * kernels.part_bytes));
  if (const cudaError_t error = start(kernels.multiply, p, p.deal.workers, kernels.threads, shared, 1, launch))
    return error;
  if (!in_parts) return cudaSuccess;
  return start(kernels.add, p, p.deal.left() * kernels.add_blocks, kAddThreads, 0, 1, launch);
}

// args: checked by the caller; x rows 16-byte aligned, codes in layout nvidia, 16-bit scales. Returns a cudaError_t:
// cudaErrorInvalidValue when this tile can't hold the problem on this device.
template <class Weight, class Act, class Tile>
inline int launch(const MatmulArgs& args, const Launch& launch, Affine affine) {
  if (launch.capability < 80 || args.x.m < 1 || args.x.m >= kSizeLimit) return cudaErrorInvalidValue;
  if (args.w.scale_type == ScaleType::kFloat32) return cudaErrorInvalidValue;
  return with_form<Weight, Tile::kNarrow, false>(args.w, is_fine(args.w), [&](auto form) {
    using Form = decltype(form);
    static Prepared prepared;
    return launch_kernels(kernels<Weight, Act, TileFor<Tile, Form>, Form>(), args, launch, affine, prepared);
  });
}

}  // namespace lowbit::gemm_sm80
