// Family `gemm_sm90`: y = x * W^T for any number of tokens, on tensors that the copy engine brings (compute capability
// 9.0 to 11.x; tiles of more than 16 tokens on 9.0 alone).
//
//   W  packed codes in layout nvidia, scales and zeros [N/16][G][16] (lowbit/pack/layout.py) of 16 bits, of fp32 where
//      Stage::kFloatScales; codes mean numbers, or values of a codebook of 4 bits (dequant/codebook.cuh)
//   x  fp16 or bf16 [m, k], rows 16-byte aligned;  y  [m, n] of the same type;  fp32 sums
//
// A task is a block of rows of W times a tile of tokens, over all of K, which is walked in stages. Workers are blocks,
// one a multiprocessor, or pairs of them. Whole tasks are dealt out to them, and the stages of those left over are
// shared evenly (deal.cuh):
//
//     worker 0   | task 0  | task 3  | 6, first half  |
//     worker 1   | task 1  | task 4  | 6, rest | 7... |
//     worker 2   | task 2  | task 5  | 7, rest        |
//
// Up to 16 tokens tasks may have fewer rows, so that the device is full of whole ones: warps of a block, and two blocks
// of a cluster, then share K, and their sums meet in shared memory (narrow/split.cuh). Blocks of small products take
// half of a multiprocessor, and those of the next one begin beside them; or there are two of them on each.
//
// A worker stores y of a task that it has all of; of others it leaves the sums of its part in memory, and add_parts
// makes y of them. With more tokens, blocks of a cluster may have equal parts of a task left over instead: their sums
// meet in shared memory, and no second kernel follows (meeting.cuh). Some tiles also come in blocks of half of a
// multiprocessor, or of 64 rows, each with one task or its part of one (wide_blocks.cuh).
//
// Up to 16 tokens are multiplied by mma.sync (narrow.cuh), up to 128 by wgmma (wide.cuh), 16 rows a warp; one warp
// brings stages of W, its scales and x to a ring in shared memory. Tiles of 144 tokens and more have a kernel of their
// own (large.cuh). More tokens are more tasks. Weights do not depend on the kernel before: the first of them are asked
// for before griddepcontrol.wait.
#pragma once
#include <cuda_runtime.h>
#include <cmath>

#include "form.cuh"
#include "gemm_sm90/helpers.cuh"
#include "gemm_sm90/large.cuh"
#include "gemm_sm90/maps.cuh"
#include "gemm_sm90/narrow.cuh"
#include "gemm_sm90/parts.cuh"
#include "gemm_sm90/shape.cuh"
#include "gemm_sm90/wide.cuh"
#include "launch.cuh"
#include "wide_blocks.cuh"

namespace lowbit::gemm_sm90 {

template <class Weight, class Act, class Tile, class Form>
using WorkerOf = std::conditional_t<Tile::kWgmma, Wide<Weight, Act, Tile, Form>, Narrow<Weight, Act, Tile, Form>>;

// Whether this target has what a tile needs; elsewhere its kernel is empty, and never launched (prepare). Without nvcc
// it is a CPU that plays the device (tests).
template <class Tile>
constexpr bool kBuilt =
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
    true;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
    !Tile::kWgmma && !Tile::kHalf;
#else
    false;
#endif

// Warps of a block that help: one brings stages, and three more make what zeros need of x.
template <class Worker>
constexpr int kHelpers = 1 + (Worker::kSums ? kSummers : 0);

// The most registers of a thread: with up to 16 tokens, what leaves room for a block of add_parts beside one of
// multiply, which can start early then. Those of wgmma stay below theirs by as much.
// Flows: kFlows of the kernel.
template <class Worker, class Tile, class Form, bool Flows>
struct Bounds {
  // Why more, beside smaller blocks of add_parts: with 88 kernels of fine groups spill.
  static constexpr bool kMany = Tile::kTokens == 16 && Form::kFine;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr int kNarrow = 96;  // Why: with 88 one kernel spills there, n16 for 1 bit with zeros
#else
  // Why fewer with 1 bit: it took all of 96 and was slower, 8192 x 28672 by 5% with 16 tokens.
  static constexpr int kNarrow = kMany || (!Worker::kSums && (Worker::kBits > 1 || Form::kFine)) ? 96 : 88;
#endif
  // Why fewer: the compiler took 114 of n64 with 4 bits, which was 4% slower (57344 x 8192). Fine groups spill then,
  // and with zeros with 120 too; without turns ptxas runs products of 1 to 3 bits one after the other, and gives stages
  // of 4 bits back late.
  static constexpr bool kFewer = Tile::kTokens == 64 && Worker::kBits <= 4 && !(Form::kFine && Form::kZeros);
  static constexpr int kWide = !kFewer ? 168 : Form::kFine ? 120 : Flows ? 128 : 112;
  static constexpr int kHalf = Worker::kSums ? 80 : 96;
  static constexpr int kRegisters = Tile::kHalf ? kHalf : Tile::kWgmma ? kWide : kNarrow;
};

template <class Weight, class Act, class Tile, class Form>
using BoundsOf = Bounds<WorkerOf<Weight, Act, Tile, Form>, Tile, Form, kFlows<Weight, Act, Tile, Form>>;

// The number of this block among the workers. Why a shuffle: the compiler then knows that a warp goes one way.
template <class Tile>
__device__ __forceinline__ int block_of(const Problem& p) {
  const int own = blockIdx.x;
  if constexpr (!Tile::kWgmma || !Tile::kHalf) return own;
  return __shfl_sync(~0u, own >= p.deal.workers ? own & p.repeated : own, 0);
}

template <class Weight, class Act, class Tile, class Form, int Maps>
__global__ void __maxnreg__((BoundsOf<Weight, Act, Tile, Form>::kRegisters))
    multiply(const __grid_constant__ Posed<Maps> p) {
  if constexpr (kBuilt<Tile>) {
    using Worker = WorkerOf<Weight, Act, Tile, Form>;
    using Map = typename Worker::Map;
    extern __shared__ uint8_t memory[];

    // ---- setup
    if (!Tile::kHalf || p.ring.split.next_after == 0) ptx::launch_dependents();
    // Why a shuffle: the compiler would find the address anew in every step.
    const uint32_t base = __shfl_sync(~0u, (ptx::shared_address(memory) + 1023) & ~1023u, 0);
    // Why a shuffle: the compiler then knows that a warp goes one way.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, helper = warp - Tile::kWarps;
    const int block = block_of<Tile>(p);
    const Parts parts(p.deal, block);
    const Producer<Weight, Tile, Form> producer(p, parts, base);
    if (helper == 0) {
      // ---- weights: they do not depend on the kernel before, nor on the other warps of this one
      if (ptx::elect_one()) producer.start();
    } else if (helper < 0) {
      // ---- all other barriers, by all warps. Why: x is not asked for before they are made
      if (ptx::elect_one()) {
        const int arrivals = Tile::kWgmma ? Tile::kRowTiles : p.ring.split.row_tiles * p.ring.split.parts;
#pragma unroll 1
        for (int i = warp; i < producer.ring.depth(); i += Tile::kWarps) {
          if (i >= producer.makes()) ptx::arrivals_init(producer.ring.full(i), 1);
          if (Worker::kSums) ptx::arrivals_init(producer.ring.summed(i), 32 * kSummers);
          ptx::arrivals_init(producer.ring.empty(i), arrivals);
        }
        ptx::publish_barriers();
        if (warp == 0) {
          ptx::prefetch_map(p.maps[kMapOfX]);
          if constexpr (Tile::kWgmma) ptx::arrivals_init(base + Map::kSpare, 1);
          if constexpr (Tile::kParts > 1) ptx::arrivals_init(base + Map::kExchanged, 32 * Tile::kWarps);
          if (p.deal.meet > 1) {
            ptx::barrier_init(base + Map::kMet);
            ptx::barrier_expect(base + Map::kMet, Worker::meeting_bytes(p));
          }
        }
      }
    }
    __syncthreads();
    if (p.deal.meet > 1) ptx::cluster_arrive_early();
    if constexpr (Weight::kCodebook) {
      CodebookTable<Weight::kBits, Act>::make(base + Map::kTable, p.codebook, warp, Tile::kWarps + kHelpers<Worker>,
                                              lane);
      __syncthreads();
    }

    // Blocks store into each other's memory only when both run. Why here: they begin together, long before x is there.
    if (p.deal.meet > 1) ptx::cluster_wait();

    // ---- everything else
    if (helper == 0) {
      if (ptx::elect_one()) producer.go_on();
    } else {
      // Why only here: it may read the unit of the table.
      const Worker worker(p, base, warp, lane);
      ptx::wait_for_previous_kernel();
      if (helper < 0) {
        worker.run(parts);
      } else if constexpr (Worker::kSums) {
        add_up_x<Worker, Act, typename Worker::Stage, Tile>(p, parts.stages, base, helper - 1, lane);
      }
    }
  }
}

// The kernels of a product, and what the host has to know of them.
struct Kernels {
  const void* multiply;  // takes a Posed
  void (*add)(Problem);
  int threads, shared_bytes, add_threads, add_blocks;  // add_blocks: of a task
  int part_bytes;
  float factor[2];  // of finished sums, by row half, but for the step between codes where scaled_later
  bool scaled_later;
  bool fuses;  // kFuses
};

template <class Weight, class Act, class Tile, class Form>
inline Kernels kernels() {
  using Worker = WorkerOf<Weight, Act, Tile, Form>;
  constexpr int kAdds = add_threads<Tile>(Form::kFine), kMaps = gemm_sm90::kMaps<typename Worker::Stage>;
  Kernels found{nullptr,
                nullptr,
                Tile::kLarge ? kLargeThreads : 32 * (Tile::kWarps + kHelpers<Worker>),
                Tile::kShared,
                kAdds,
                kAddBlocks<Tile, kAdds>,
                kPart<Tile> * 4,
                {Worker::unit(0), Worker::unit(1)},
                !Tile::kWgmma,
                kFuses<Weight, Act, Tile, Form>};
  if constexpr (Tile::kLarge) {
    found.multiply = reinterpret_cast<const void*>(multiply_large<Weight, Act, Tile, Form, kMaps>);
  } else {
    found.multiply = reinterpret_cast<const void*>(multiply<Weight, Act, Tile, Form, kMaps>);
  }
  if constexpr (!Tile::kHalf && Tile::kParts == 1) found.add = Shared<Act, Tile>::add_kernel(Form::kFine);
  return found;
}

inline int launch_kernels(const Kernels& kernels, const Traits& traits, const MatmulArgs& args, const Launch& launch,
                          Affine affine, Prepared& prepared) {
  Posed<kMostMaps> p{};
  if (!pose(traits, args, launch, affine, p)) return cudaErrorInvalidValue;
  for (int h = 0; h < 2; ++h) p.factor[h] = kernels.factor[h] * (kernels.scaled_later ? p.step : 1.0f);
  if (kernels.fuses) p.fused_unit = std::ldexp(1.0f, args.w.even_unit), p.step /= p.fused_unit;
  const int shared_bytes = kernels.shared_bytes;
  if (const cudaError_t error = prepare(kernels.multiply, shared_bytes, launch.device, prepared)) return error;
  const bool in_parts = p.deal.in_parts();
  if (in_parts)
    p.parts = static_cast<float*>(launch.scratch(launch.owner, int64_t{p.deal.sharers} * 2 * kernels.part_bytes));
  const int own = p.deal.blocks_of(traits.cluster), cluster = own * p.deal.meet;
  const int blocks = traits.wgmma && traits.half ? launched_blocks(p, launch) : p.deal.workers * own;
  if (const cudaError_t error = start(kernels.multiply, &p, blocks, kernels.threads, shared_bytes, cluster, launch))
    return error;
  if (!in_parts) return cudaSuccess;
  return start<Problem>(kernels.add, p, p.deal.left() * kernels.add_blocks, kernels.add_threads, 0, 1, launch);
}

template <class Weight, class Act, class Tile, class Form>
inline int launch_tile(const MatmulArgs& args, const Launch& launch, Affine affine) {
  static Prepared prepared;
  return launch_kernels(kernels<Weight, Act, Tile, Form>(), kTraits<Weight, Tile, Form>, args, launch, affine,
                        prepared);
}

// Tiles that also come in half of a multiprocessor.
template <class Weight, class Tile, class Form>
constexpr bool kHalves =
    !Tile::kHalf &&
    (Tile::kWgmma ? has_halves(Tile::kTokens, Weight::kBits, Weight::kFloat, Weight::kCodebook, Form::kFine)
                  : narrow::has_halves(Tile::kTokens, kTraits<Weight, Tile, Form>.kind));

// args: checked by the caller; x rows 16-byte aligned, codes in layout nvidia; m <= Tile::kTokens where a tile
// multiplies by mma.sync. Returns a cudaError_t: cudaErrorInvalidValue when this tile can't hold the problem.
template <class Weight, class Act, class Tile>
inline int launch(const MatmulArgs& args, const Launch& launch, Affine affine) {
  const bool fits = Tile::kWgmma ? launch.capability == 90 : launch.capability >= 90 && launch.capability < 120;
  if (!fits || args.x.m < 1 || args.x.m >= kSizeLimit) return cudaErrorInvalidValue;
  if (Weight::kCodebook && args.w.zero_kind != ZeroKind::kNone) return cudaErrorInvalidValue;
  const bool fp32_scales = args.w.scale_type == ScaleType::kFloat32;
  if (fp32_scales && args.w.group_size == 16) return cudaErrorInvalidValue;
  if (!Tile::kWgmma && args.x.m > Tile::kTokens) return cudaErrorInvalidValue;
  // Why: up to 16 tokens only stages with room for fine groups have room for scales of fp32.
  const bool fine = is_fine(args.w) || (fp32_scales && !Tile::kWgmma);
  return with_form<Weight, !Tile::kWgmma, kEven<Weight, Act, Tile>>(args.w, fine, [&](auto form) -> int {
    using Form = decltype(form);
    // Why not where values are rounded: scales of fp32 would be too.
    constexpr bool kFloatScales = Stage<Weight, Tile, Form>::kFloatScales && !kRoundsValues<Weight, Act, Tile, Form>;
    if (fp32_scales && !kFloatScales) return cudaErrorInvalidValue;
    if constexpr ((Tile::kAll || !Form::kFine) && !(Weight::kCodebook && Form::kZeros)) {
      if constexpr (kHalves<Weight, Tile, Form>) {
        // It refuses what the plan has all of a multiprocessor for.
        int error = cudaErrorInvalidValue;
        if (launch.capability == 90)
          error = launch_tile<Weight, Act, gemm_sm90::Tile<Tile::kTokens, 8>, Form>(args, launch, affine);
        if (error != cudaErrorInvalidValue) return error;
      }
      if constexpr (shares_rows(Tile::kTokens, Weight::kCodebook, Form::kFine)) {
        const int error = launch_tile<Weight, Act, gemm_sm90::Tile<Tile::kTokens, 16, 2>, Form>(args, launch, affine);
        if (error != cudaErrorInvalidValue) return error;
      }
      return launch_tile<Weight, Act, Tile, Form>(args, launch, affine);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace lowbit::gemm_sm90
