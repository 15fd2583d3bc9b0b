// Family `decode`: y = x * W^T for up to 16 tokens, bound by reading W once.
//
//   W  packed codes in layout nvidia, 16-bit scales and zeros [N/16][G][16] (lowbit/pack/layout.py)
//   x  fp16 or bf16 [m, k], rows 16-byte aligned;  y  [m, n] of the same type;  fp32 sums
//
// Work: K is cut into slices, one a warp: warp % warps_k of a block, times the blocks of a cluster. The warps of one
// slice each, over all slices, are a row group, which walks its own row tiles; x of the block's slices stays in shared
// memory.
//
//     cluster of 2, warps_k = 4:            k ->
//                     block 0                          block 1
//     row group 0   | warp 0 | warp 1 | .. | warp 3 | warp 0 | .. | warp 3 |     its tiles, one after the other
//     row group 1   | warp 4 | warp 5 | .. | warp 7 | warp 4 | .. | warp 7 |
//
// A warp streams its slice of each tile through its own ring in shared memory; nobody waits for anybody until the sums
// of a pass (some tiles) meet. The ring is filled before griddepcontrol.wait: weights stream in while the kernel before
// this one drains.
//
// A product has 8 columns for tokens. Those that tokens leave free hold further steps of 128 k: with one token, column
// c is that token at step c of a chunk of 8 and 0 elsewhere. So the sums of 8 groups stand side by side, and their
// scales are applied at once.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../args.h"
#include "decode/activations.cuh"
#include "decode/feed.cuh"
#include "decode/meeting.cuh"
#include "decode/shape.cuh"
#include "decode/worker.cuh"
#include "layout.cuh"
#include "types.cuh"

namespace lowbit::decode {

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
__global__ void __launch_bounds__(Tile::kThreads, 2) kernel(const __grid_constant__ Problem p) {
  using Worker = decode::Worker<Weight, Act, Tile, Fine, Zeros>;
  using Map = decode::Map<Weight, Tile, Fine, Zeros>;
  using Ring = decode::Ring<Weight, Tile, Fine, Zeros>;
  extern __shared__ __align__(128) uint8_t memory[];

  // ---- setup
  ptx::launch_dependents();
  if (p.cluster_shift) ptx::cluster_arrive_early();
  // Every warp writes the zeros that it reads.
  if (threadIdx.x % 32 < 16) reinterpret_cast<uint4*>(memory)[threadIdx.x % 32] = {0, 0, 0, 0};
  const Position at(p, Tile::kWarps);
  const uint32_t shared = ptx::shared_address(memory);
  const uint32_t x = shared + Map::kX, ones = x + p.x_bytes, meeting = ones + p.ones_bytes;

  // ---- weights: they do not depend on the kernel before. All of the ring but its last stage
  decode::Feed<Weight, Tile, Fine, Zeros> feed(at, shared + Map::kRings + at.warp * Ring::kBytes);
#pragma unroll 1
  for (int i = 0; i + 1 < Ring::kDepth; ++i) feed.fetch();

  // ---- x
  ptx::wait_for_previous_kernel();
  bring_x<Act, Tile, Worker::kOnes && !Fine>(at, x, ones, 1.0f / Worker::Decoder::kUnit);
  __syncthreads();
  if (p.cluster_shift) ptx::cluster_wait();  // blocks store into each other's memory only when all of them run

  // ---- passes
  Worker worker(at, shared + Map::kZeros, x, ones);
  typename Worker::Place place{feed.ring + (Ring::kDepth - 1) * Ring::kStageBytes,
                               feed.ring + Ring::kDepth * Ring::kStageBytes};
#pragma unroll 1
  for (int pass = 0; pass * p.pass_tiles < p.most_tiles; ++pass) {
    // Why two places: one is read while the next is written.
    const uint32_t sums = meeting + (pass & 1) * p.meeting_bytes;
#pragma unroll 1
    for (int i = 0; i < p.pass_tiles; ++i) {
      if (at.first_tile + pass * p.pass_tiles + i >= at.end_tile) break;
      worker.run_tile(place, feed);
      hand_in<Tile>(at, sums, i, worker.total);
    }
    meet(p);
    store_pass<Act, typename Worker::Decoder, Tile, Fine>(at, sums, pass * p.pass_tiles);
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

// How the work is spread, in p; the bytes of shared memory, or 0 when it does not fit.
template <class Weight, class Tile, bool Fine, bool Zeros>
inline int spread(Problem& p, const Launch& launch) {
  using Map = decode::Map<Weight, Tile, Fine, Zeros>;
  // Clusters came with compute capability 9.0, like launches that overlap.
  const int most_cluster_shift = launch.overlap ? 3 : 0;
  for (p.cluster_shift = 0; p.cluster_shift <= most_cluster_shift; ++p.cluster_shift) {
    const int cluster = 1 << p.cluster_shift;
    for (p.warps_k_shift = std::max(0, 3 - p.cluster_shift); (cluster << p.warps_k_shift) > p.steps && p.warps_k_shift;)
      --p.warps_k_shift;
    const int splits = cluster << p.warps_k_shift, warps_n = Tile::kWarps >> p.warps_k_shift;
    const int row_groups = std::min(launch.sms / cluster * warps_n, (p.tiles + warps_n - 1) / warps_n * warps_n);
    p.grid = row_groups / warps_n * cluster;
    p.slices = {p.steps / splits, p.steps % splits};
    p.row_groups = {p.tiles / row_groups, p.tiles % row_groups};
    p.most_tiles = (p.tiles + row_groups - 1) / row_groups;
    p.x_bytes = ((p.slices.each << p.warps_k_shift) + std::min(p.slices.more, 1 << p.warps_k_shift)) * p.m * kRowBytes;
    p.ones_bytes =
        ((p.slices.each << p.warps_k_shift) + std::min(p.slices.more, 1 << p.warps_k_shift) + 8) * Tile::kTokens * 4;
    p.ones_bytes = (p.ones_bytes + 15) / 16 * 16;
    const int64_t fixed = Map::kX + static_cast<int64_t>(p.x_bytes) + p.ones_bytes;
    for (p.pass_tiles = std::min(8, p.most_tiles); p.pass_tiles >= 1; --p.pass_tiles) {
      p.meeting_bytes =
          (warps_n * p.pass_tiles + cluster - 1) / cluster * splits * (Tile::kTokens <= 2 ? 128 : Tile::kColumns * 512);
      if (fixed + 2 * p.meeting_bytes <= Tile::kSharedBytes) return static_cast<int>(fixed) + 2 * p.meeting_bytes;
    }
  }
  return 0;
}

// Tells the driver once per device how much shared memory the kernel takes; a cudaError_t.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline cudaError_t prepare(int device) {
  static std::atomic<uint64_t> prepared{0};
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && (prepared.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  const void* function = reinterpret_cast<const void*>(&kernel<Weight, Act, Tile, Fine, Zeros>);
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int launch_kernel(Problem& p, const Launch& launch) {
  const int shared = spread<Weight, Tile, Fine, Zeros>(p, launch);
  if (!shared) return cudaErrorInvalidValue;
  if (const cudaError_t error = prepare<Weight, Act, Tile, Fine, Zeros>(launch.device)) return error;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 1 << p.cluster_shift;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = p.grid;
  config.blockDim = Tile::kThreads;
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = attributes;
  config.numAttrs = p.cluster_shift ? 2 : 1;
  attributes[0].val.programmaticStreamSerializationAllowed = launch.overlap;
  return cudaLaunchKernelEx(&config, kernel<Weight, Act, Tile, Fine, Zeros>, p);
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
