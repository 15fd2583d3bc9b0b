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
#include <type_traits>

#include "../args.h"
#include "decode/byte_worker.cuh"
#include "decode/chunk_worker.cuh"
#include "decode/meeting.cuh"
#include "decode/phases.cuh"
#include "decode/shape.cuh"
#include "layout.cuh"
#include "types.cuh"

namespace lowbit::decode {

// Integers multiply as bytes; floats, and scales finer than 128 k, in the type of x.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
using WorkerOf = std::conditional_t<Fine || Weight::kFloat, ChunkWorker<Weight, Act, Tile, Fine, Zeros>,
                                    ByteWorker<Weight, Act, Tile, Zeros>>;

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
__global__ void __launch_bounds__(Tile::kThreads, 2) kernel(const __grid_constant__ Problem p) {
  using Worker = WorkerOf<Weight, Act, Tile, Fine, Zeros>;
  using Ring = typename Worker::Ring;
  using Map = decode::Map<Ring, Tile>;
  extern __shared__ __align__(128) uint8_t memory[];

  // ---- setup
  ptx::launch_dependents();
  const uint32_t shared = ptx::shared_address(memory), met = shared + Map::kMet;
  if (p.cluster_shift) {
    if (threadIdx.x < 2) ptx::barrier_init(met + threadIdx.x * 8);
    __syncwarp();
    ptx::cluster_arrive_early();
  }
  // Every warp writes the zeros that it reads.
  if (threadIdx.x % 32 < 16) reinterpret_cast<uint4*>(memory)[threadIdx.x % 32] = {0, 0, 0, 0};
  const Position at(p, Tile::kWarps);
  const uint32_t x = shared + Map::kX, table = x + p.x_bytes, meeting = table + p.table_bytes;

  // ---- weights: they do not depend on the kernel before
  typename Worker::Feed feed(at, shared + Map::kRings + at.warp * Ring::kBytes);
  feed.fetch();  // Why one stage: x of the kernel before would stand in line behind more

  // ---- x
  ptx::wait_for_previous_kernel();
  Worker::bring_x(at, x, table, [&] {
#pragma unroll 1
    for (int i = 1; i + 1 < Ring::kDepth; ++i) feed.fetch();
  });
  __syncthreads();
  if (p.cluster_shift) ptx::cluster_wait();  // blocks store into each other's memory only when all of them run

  // ---- passes
  Worker worker(at, shared + Map::kZeros, x, table);
  auto place = Worker::start(feed.ring);
#pragma unroll 1
  for (int pass = 0; pass * p.pass_tiles < p.most_tiles; ++pass) {
    // Why two places: one is read while the next is written. No block is two passes ahead of another: to pass a meeting
    // it needs what each of them handed in after it had read the one before.
    const uint32_t sums = meeting + (pass & 1) * p.meeting_bytes;
    const uint32_t barrier = met + (pass & 1) * 8;
    if (p.cluster_shift && threadIdx.x == 0)
      ptx::barrier_expect(barrier, owned_tiles<Tile>(at) * (kSumBytes<Worker> << (p.cluster_shift + p.warps_k_shift)));
#pragma unroll 1
    for (int i = 0; i < p.pass_tiles; i += Ring::kRows) {
      if (at.first_tile + pass * p.pass_tiles + i < at.end_tile) worker.run_tile(place, feed);
#pragma unroll
      for (int r = 0; r < Ring::kRows; ++r) hand_in(worker, at, sums, barrier, i + r, r);
    }
    meet(p, barrier, pass / 2);
    store_pass<Act, Worker, Tile>(at, sums, pass * p.pass_tiles);
    if (p.cluster_shift) __syncthreads();  // all of the block has read before any of it hands in again
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

// Splits K over 2^cluster_shift blocks of 2^warps_k_shift warps each, in p; the bytes of shared memory that a block
// then takes, or 0 when that is more than there is.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int split(Problem& p, int cluster_shift, int warps_k_shift, const Launch& launch) {
  using Worker = WorkerOf<Weight, Act, Tile, Fine, Zeros>;
  using Map = decode::Map<typename Worker::Ring, Tile>;
  constexpr int kRows = Worker::Ring::kRows, kMostTiles = 8;
  const int cluster = 1 << cluster_shift, warps_k = 1 << warps_k_shift;
  const int splits = cluster * warps_k, warps_n = Tile::kWarps / warps_k;
  const int row_groups =
      std::min(launch.clusters[cluster_shift] * warps_n, (p.tiles + warps_n - 1) / warps_n * warps_n);
  p.cluster_shift = cluster_shift, p.warps_k_shift = warps_k_shift;
  p.grid = row_groups / warps_n * cluster;
  p.slices = {p.steps / splits, p.steps % splits};
  p.row_groups = {p.tiles / row_groups, p.tiles % row_groups};
  p.most_tiles = (p.tiles + row_groups - 1) / row_groups;
  const int block_steps = p.slices.each * warps_k + std::min(p.slices.more, warps_k);
  p.x_bytes = block_steps * p.m * kRowBytes;
  p.table_bytes = ((block_steps + 8) * Tile::kTokens * Worker::kTableBytes + 15) / 16 * 16;
  const int64_t fixed = Map::kX + static_cast<int64_t>(p.x_bytes) + p.table_bytes;
  for (p.pass_tiles = std::min(kMostTiles, (p.most_tiles + kRows - 1) / kRows * kRows); p.pass_tiles >= kRows;
       p.pass_tiles -= kRows) {
    const int owned = (warps_n * p.pass_tiles + cluster - 1) / cluster;
    p.meeting_bytes = owned * splits * kSumBytes<Worker>;
    if (fixed + 2 * p.meeting_bytes <= Tile::kSharedBytes) return static_cast<int>(fixed) + 2 * p.meeting_bytes;
  }
  return 0;
}

// What the busiest warp has to do, in steps of 128 k of one row tile. Measured on an H200: two tiles side by side
// take 1.7 times as long as one, also where the second is missing; a tile's sums cost 1 step with 2 tokens, 2.5 with 4,
// 5 with 8; every doubling of the row groups of a block, which then reads more places at once, costs 12%.
template <int Rows, int Tokens>
inline float cost(const Problem& p, int warps_n) {
  const int steps = p.slices.each + (p.slices.more > 0);
  const float tiles = Rows == 1 ? static_cast<float>(p.most_tiles) : 1.7f * ((p.most_tiles + 1) / 2);
  float spread_out = 1.0f;
  for (; warps_n > 1; warps_n /= 2) spread_out += 0.12f;
  const float sums = Tokens <= 2 ? 1.0f : Tokens * 0.625f;
  return tiles * steps * spread_out + sums * p.most_tiles + 4.0f * ((p.most_tiles + p.pass_tiles - 1) / p.pass_tiles);
}

// How the work is spread, in p: the smallest cluster that holds x, and the cheapest split in it. The bytes of shared
// memory, or 0 when nothing fits.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int spread(Problem& p, const Launch& launch) {
  constexpr int kRows = WorkerOf<Weight, Act, Tile, Fine, Zeros>::Ring::kRows;
  // Clusters came with compute capability 9.0, like launches that overlap.
  const int most_cluster_shift = launch.overlap ? 1 : 0;
  for (int cluster_shift = 0; cluster_shift <= most_cluster_shift; ++cluster_shift) {
    if (!launch.clusters[cluster_shift]) continue;
    Problem best{};
    float best_price = 0.0f;
    int bytes = 0;
    for (int warps_k_shift = 0; (1 << warps_k_shift) <= Tile::kWarps; ++warps_k_shift) {
      Problem found = p;
      const int need = split<Weight, Act, Tile, Fine, Zeros>(found, cluster_shift, warps_k_shift, launch);
      if (!need) continue;
      const float price = cost<kRows, Tile::kTokens>(found, Tile::kWarps >> warps_k_shift);
      if (bytes && price >= best_price) continue;
      best = found, bytes = need, best_price = price;
    }
    if (!bytes) continue;
    p = best;
    return bytes;
  }
  return 0;
}

// How a kernel that walks K in phases spreads its work, in p. In steps of 128 k of two row tiles, measured on an H200:
// two row tiles of a warp cost 2 whatever K is, a phase 2.2 where x does not stay and 0.3 where it does, a part of K
// 0.25 in the second kernel, a megabyte of sums 0.3.
template <class Worker, class Tile>
inline void spread_phases(Problem& p, const Launch& launch) {
  using Map = PhaseMap<typename Worker::Ring, Tile>;
  constexpr int kRows = Worker::Ring::kRows, kSteps = Map::kPhaseSteps;
  p.phase_steps = kSteps;
  const int blocks = launch.clusters[0];
  float best_price = 0.0f;
  for (int parts = 1; parts <= std::min(p.steps, 32); ++parts)
    for (int shift = 0; kSteps >> shift; ++shift) {
      const int warps_n = Tile::kWarps >> shift;
      const int row_groups = std::min(blocks / parts * warps_n, (p.tiles + warps_n - 1) / warps_n * warps_n);
      const int most_tiles = (p.tiles + row_groups - 1) / row_groups, bands = (most_tiles + kRows - 1) / kRows;
      const int part_steps = (p.steps + parts - 1) / parts, phases = (part_steps + kSteps - 1) / kSteps;
      const float work = static_cast<float>(bands) * ((part_steps + (1 << shift) - 1) >> shift);
      const float megabytes = 16e-6f * static_cast<float>(parts << shift) * p.tiles * Worker::kItems;
      const float price = work + (phases > 2 ? 2.2f * bands * phases : 2.0f * bands + 0.3f * phases) +
                          0.25f * (parts << shift) + 0.3f * megabytes;
      if (best_price && price >= best_price) continue;
      best_price = price;
      p.warps_k_shift = shift;
      p.parts_k = parts;
      p.phases = phases;
      p.slices = {p.steps / parts, p.steps % parts};
      p.row_groups = {p.tiles / row_groups, p.tiles % row_groups};
      p.most_tiles = most_tiles;
      p.grid = row_groups / warps_n * parts;
    }
}

// Tells the driver once per device how much shared memory a kernel takes; a cudaError_t.
template <class Tile>
inline cudaError_t prepare(const void* function, int device, std::atomic<uint64_t>& prepared) {
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && (prepared.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

inline cudaError_t start(void (*function)(Problem), const Problem& p, int grid, int threads, int shared, int cluster,
                         const Launch& launch) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = attributes;
  config.numAttrs = !launch.overlap ? 0 : cluster > 1 ? 2 : 1;  // clusters only where launches overlap
  return cudaLaunchKernelEx(&config, function, p);
}

// The kernel for few tokens; cudaErrorInvalidValue when x does not fit.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int launch_few(Problem p, const Launch& launch) {
  static std::atomic<uint64_t> prepared{0};
  const auto function = kernel<Weight, Act, Tile, Fine, Zeros>;
  if (!spread<Weight, Act, Tile, Fine, Zeros>(p, launch)) return cudaErrorInvalidValue;
  if (const cudaError_t error = prepare<Tile>(reinterpret_cast<const void*>(function), launch.device, prepared))
    return error;
  // Why all shared memory: two blocks of one launch on a multiprocessor would leave another one idle.
  return start(function, p, p.grid, Tile::kThreads, Tile::kSharedBytes, 1 << p.cluster_shift, launch);
}

// The two kernels for many tokens.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int launch_many(Problem p, const Launch& launch) {
  using Worker = ManyWorkerOf<Weight, Act, Tile, Fine, Zeros>;
  static std::atomic<uint64_t> prepared{0};
  const auto function = phases<Weight, Act, Tile, Fine, Zeros>;
  if (const cudaError_t error = prepare<Tile>(reinterpret_cast<const void*>(function), launch.device, prepared))
    return error;
  spread_phases<Worker, Tile>(p, launch);
  const int64_t items = static_cast<int64_t>(p.tiles) * Worker::kItems;
  p.parts = static_cast<float*>(launch.scratch(launch.owner, (items << p.warps_k_shift) * p.parts_k * 16));
  if (const cudaError_t error = start(function, p, p.grid, Tile::kThreads, Tile::kSharedBytes, 1, launch)) return error;
  return start(add_parts<Weight, Act, Tile, Fine, Zeros>, p, static_cast<int>((items + 127) / 128), 128, 0, 1, launch);
}

// Bytes of weight up to which 8 tokens go the way of few, where x fits: measured on an H200.
constexpr int64_t kSmallBytes = int64_t{16} << 20;

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
inline int launch_kernel(const Problem& p, const Launch& launch) {
  if constexpr (!Tile::kMany) {
    return launch_few<Weight, Act, Tile, Fine, Zeros>(p, launch);
  } else {
    if constexpr (Tile::kTokens == 8 && !Fine && !Weight::kFloat)
      if (int64_t{256} * Weight::kBits * p.tiles * p.steps <= kSmallBytes) {
        const int error = launch_few<Weight, Act, decode::Tile<8, false>, Fine, Zeros>(p, launch);
        if (error != cudaErrorInvalidValue) return error;
      }
    return launch_many<Weight, Act, Tile, Fine, Zeros>(p, launch);
  }
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
