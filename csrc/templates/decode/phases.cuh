// Family `decode` for 5 to 16 tokens: x does not fit into shared memory whole.
//
// Blocks share K, and walk their part of it in phases: 16 KB of x, in one of two places, while those of the next phase
// are on their way. A warp takes two row tiles through all phases, then the next two; its sums stay in registers. Then
// they go to memory, and a second kernel adds up those of all parts of K.
//
// Why not in a cluster: clusters of 4 and more leave multiprocessors idle, where the blocks of the next launch then
// come to lie two by two.
#pragma once
#include "activations.cuh"
#include "chunk_worker.cuh"
#include "meeting.cuh"
#include "shape.cuh"
#include "stage_worker.cuh"

namespace lowbit::decode {

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
using ManyWorkerOf =
    std::conditional_t<Fine, ChunkWorker<Weight, Act, Tile, Fine, Zeros>, StageWorker<Weight, Act, Tile, Zeros>>;

// A block of add_parts fits beside one of phases, so that it can start early: 32 registers a thread. Why more threads
// with 16 tokens: there are as many blocks as multiprocessors then. 7 bits and floats of 6 need the registers.
template <class Weight, class Tile>
struct AddBounds {
  static constexpr bool kTight = Weight::kBits == 7 || (Weight::kBits == 6 && Weight::kFloat);
  static constexpr int kThreads = Tile::kTokens > 8 && !kTight ? 256 : 128;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kLeftRegisters = 128;  // phases never runs there: it takes too much shared memory
#else
  static constexpr int kLeftRegisters = (64 * 1024 - 32 * kThreads) / Tile::kThreads;
#endif
};

// Where things lie in shared memory.
template <class Ring, class Tile>
struct PhaseMap {
  static constexpr int kPhaseSteps = 64 / Tile::kTokens;
  static constexpr int kXBytes = kPhaseSteps * Tile::kTokens * kRowBytes;  // of a phase
  static constexpr int kTableBytes = (kPhaseSteps + 8) * Tile::kTokens * 4;
  static constexpr int kRings = 128;  // after two barriers
  static constexpr int kX = kRings + Tile::kWarps * Ring::kBytes;
  static constexpr int kTable = kX + 2 * kXBytes;
  static_assert(kTable + 2 * kTableBytes <= Tile::kSharedBytes);
};

// All threads ask for x of a phase; the barrier counts them when it has come.
template <class Tile, int PhaseSteps>
__device__ __forceinline__ void ask_for_x(const Position& at, int phase, uint32_t x, uint32_t barrier) {
  const Problem& p = at.p;
  const int first = p.slices(at.rank) + phase * PhaseSteps;
  const int chunk = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < (PhaseSteps * Tile::kTokens * 16 + Tile::kThreads - 1) / Tile::kThreads; ++i) {
    const int row = threadIdx.x / 16 + i * (Tile::kThreads / 16), step = row % PhaseSteps, token = row / PhaseSteps;
    const int k = (first + step) * kStepK + chunk * 8;
    const int bytes = min(max(2 * (p.k - k), 0), 16);
    if (token < p.m)
      ptx::copy_async(x + (step * p.m + token) * kRowBytes + chunk * 16,
                      p.x + (bytes ? 2 * (token * p.x_stride + k) : 0), bytes);
  }
  ptx::arrive_with_copies(barrier);
}

// All threads add up x of a phase, 128 k of a token each half warp: each thread reads what it asked for itself.
template <class Act, class Tile, int PhaseSteps>
__device__ __forceinline__ void sum_x(const Position& at, uint32_t x, uint32_t sums, float unit) {
#pragma unroll
  for (int i = 0; i < (PhaseSteps * Tile::kTokens * 16 + Tile::kThreads - 1) / Tile::kThreads; ++i) {
    const int row = threadIdx.x / 16 + i * (Tile::kThreads / 16), step = row % PhaseSteps, token = row / PhaseSteps;
    uint32_t pairs[4] = {0, 0, 0, 0};
    if (token < at.p.m)
      ptx::load_shared(x + (step * at.p.m + token) * kRowBytes + threadIdx.x % 16 * 16, pairs[0], pairs[1], pairs[2],
                       pairs[3]);
    float sum = (sum_of_pair<Act>(pairs[0]) + sum_of_pair<Act>(pairs[1])) +
                (sum_of_pair<Act>(pairs[2]) + sum_of_pair<Act>(pairs[3]));
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x % 16 == 0) ptx::store_shared(sums + (step * Tile::kTokens + token) * 4, sum * unit);
  }
}

template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
__global__ void __maxnreg__((AddBounds<Weight, Tile>::kLeftRegisters)) phases(const __grid_constant__ Problem p) {
  using Worker = ManyWorkerOf<Weight, Act, Tile, Fine, Zeros>;
  using Ring = typename Worker::Ring;
  using Map = PhaseMap<Ring, Tile>;
  constexpr int kSteps = Map::kPhaseSteps, kRows = Ring::kRows;
  constexpr bool kSumX = Worker::kOnes && !Fine;
  extern __shared__ __align__(128) uint8_t memory[];

  // ---- setup
  ptx::launch_dependents();
  const uint32_t shared = ptx::shared_address(memory);
  if (threadIdx.x == 0) {
    ptx::arrivals_init(shared, Tile::kThreads);
    ptx::arrivals_init(shared + 8, Tile::kThreads);
  }
  const Position at(p, Tile::kWarps, p.parts_k);

  // ---- weights: they do not depend on the kernel before
  typename Worker::Feed feed(at, shared + Map::kRings + at.warp * Ring::kBytes);
  feed.fetch();     // Why one stage: x of the kernel before would stand in line behind more
  __syncthreads();  // the barriers are known

  // ---- x of the first two phases
  const int bands = (p.most_tiles + kRows - 1) / kRows, all = bands * p.phases;
  // With two phases at most, x stays.
  const auto wanted = [&](int q) { return q < (p.phases <= 2 ? p.phases : all); };
  const auto place_of = [&](int q) { return p.phases == 1 ? 0 : q & 1; };
  const auto ask = [&](int q, int phase) {
    const int place = place_of(q);
    ask_for_x<Tile, kSteps>(at, phase, shared + Map::kX + place * Map::kXBytes, shared + place * 8);
  };
  const auto ready = [&](int q) {
    const int place = place_of(q);
    ptx::wait_arrivals(shared + place * 8, q >> 1 & 1);
    if (kSumX)
      sum_x<Act, Tile, kSteps>(at, shared + Map::kX + place * Map::kXBytes,
                               shared + Map::kTable + place * Map::kTableBytes, 1.0f / Worker::Decoder::kUnit);
  };
  ptx::wait_for_previous_kernel();
  ask(0, 0);
  if (wanted(1)) ask(1, 1);
#pragma unroll 1
  for (int i = 1; i < Worker::kAhead; ++i) feed.fetch();
  ready(0);
  if (p.phases == 2) ready(1);
  __syncthreads();

  // ---- row tiles
  Worker worker(at, 0, 0, 0);
  auto place = Worker::start(feed.ring);
  const int block_step = p.slices(at.rank);
  int q = 0, phase = 0, tile = at.first_tile;
  worker.clear_total();
#pragma unroll 1
  for (; q < all; ++q) {
    if (q && wanted(q + 1)) ask(q + 1, phase + 1 == p.phases ? 0 : phase + 1);
    int first, stop;
    at.slice_of(phase, first, stop);
    worker.x = shared + Map::kX + place_of(q) * Map::kXBytes;
    worker.ones = shared + Map::kTable + place_of(q) * Map::kTableBytes;
    worker.first = block_step + phase * kSteps;
    if (tile < at.end_tile) worker.run_slice(place, feed, first, stop);
    if (++phase == p.phases) {
      // ---- sums of a part of K
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (tile + r < at.end_tile) {
          float4* to = reinterpret_cast<float4*>(p.parts) +
                       (static_cast<int64_t>(at.slice) * p.tiles + tile + r) * Worker::kItems + at.lane;
#pragma unroll
          for (int column = 0; column < Tile::kColumns; ++column)
            to[column * 32] = {worker.total[r][column][0], worker.total[r][column][1], worker.total[r][column][2],
                               worker.total[r][column][3]};
        }
      worker.clear_total();
      phase = 0, tile += kRows;
    }
    if (p.phases <= 2 || !wanted(q + 1)) continue;
    ready(q + 1);
    __syncthreads();  // all have read this x and added up the next
  }
}

// y from the sums of all parts of K.
template <class Weight, class Act, class Tile, bool Fine, bool Zeros>
__global__ void __launch_bounds__((AddBounds<Weight, Tile>::kThreads)) add_parts(const __grid_constant__ Problem p) {
  using Worker = ManyWorkerOf<Weight, Act, Tile, Fine, Zeros>;
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  const int i = blockIdx.x * AddBounds<Weight, Tile>::kThreads + threadIdx.x;
  if (i >= p.tiles * Worker::kItems) return;
  const int parts = p.parts_k << p.warps_k_shift;
  const uint8_t* from = reinterpret_cast<const uint8_t*>(p.parts) + static_cast<int64_t>(i) * 16;
  const int64_t apart = static_cast<int64_t>(p.tiles) * Worker::kItems * 16;
  float value[4] = {};
#pragma unroll 8
  for (int part = 0; part < parts; ++part) {
    const uint4 more = ptx::load_x(from + part * apart);
    value[0] += __uint_as_float(more.x), value[1] += __uint_as_float(more.y);
    value[2] += __uint_as_float(more.z), value[3] += __uint_as_float(more.w);
  }
  store_item<Act, Worker>(p, i / Worker::kItems, i % Worker::kItems, value);
}

}  // namespace lowbit::decode
