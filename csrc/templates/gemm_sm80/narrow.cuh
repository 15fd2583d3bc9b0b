// Up to 16 tokens, and 32 where groups are not fine: 16 warps multiply a row tile each by the worker of
// narrow/worker.cuh; four helpers bring stages to the ring, each thread 16 bytes at a time, and add up x where zeros
// need its sums. Barriers of places count who is done: copies that have come (full), sums of x (summed),
// warps that have read (empty).
#pragma once
#include "../form.cuh"
#include "../narrow/worker.cuh"
#include "../narrow/x_sums.cuh"
#include "feed.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm80 {

template <class Weight, class Act, class Tile, class Form>
using NarrowWorker = narrow::Worker<Weight, Act, Tile, Form, Stage<Weight, Tile, Form>,
                                    Ring<gemm_sm80::Stage<Weight, Tile, Form>>, Problem>;

template <class Weight, class Act, class Tile, class Form>
struct Helper {
  using Stage = gemm_sm80::Stage<Weight, Tile, Form>;
  using Ring = gemm_sm80::Ring<Stage>;
  using Place = narrow::Place;
  using Worker = NarrowWorker<Weight, Act, Tile, Form>;
  // A warp adds up 128 k of x of 8 tokens at a time.
  static constexpr int kUnits = Stage::kSteps * Tile::kColumns, kHelpers = Tile::kCopiers / 32;
  static constexpr int kSummers = kUnits >= kHelpers ? kHelpers : kUnits;

  const Problem& p;
  const Ring ring;
  const int stages, early, helper, lane;
  const Feed<Weight, Tile, Form> feed;
  const Cursor first;

  __device__ Helper(const Problem& problem, const Ring& own_ring, const Parts& own_parts, int own_helper, int own_lane)
      : p(problem),
        ring(own_ring),
        stages(own_parts.stages),
        early(min(Stage::kEarly, min(own_ring.depth, own_parts.stages))),
        helper(own_helper),
        lane(own_lane),
        feed(problem),
        first(problem, own_parts) {}

  // Before the kernel before has ended: weights alone.
  __device__ __forceinline__ void start() const {
    Cursor at = first;
#pragma unroll 1
    for (int i = 0; i < early; ++i, at.next(p, blockIdx.x)) feed.ask_for_weights(at, ring.stage(i));
  }

  __device__ __forceinline__ void add_up(Place& place) const {
    if (!Worker::kSums) return;
    ptx::wait_arrivals(ring.full(place.index), place.parity);
    if (helper < kSummers) {
#pragma unroll
      for (int unit = helper; unit < kUnits; unit += kSummers) {
        const int step = unit / Tile::kColumns, column = unit % Tile::kColumns;
        narrow::add_up_column<Act, Stage>(
            ring.stage(place.index) + 2 * step * Stage::kXBox + column * 1024, Stage::kXBox,
            ring.sums(place.index) + unit * (narrow::kSumBytes * narrow::kSumsOfStep<Stage>), lane, Worker::kSumFactor,
            p.group_fragments > 0);
      }
      ptx::arrive(ring.summed(place.index));  // each lane for what it stored
    }
    place.next();
  }

  // After.
  __device__ __forceinline__ void go_on() const {
    Cursor at = first;
    Place asked = ring.first(), summed = ring.first();
    const auto ask = [&](bool weights) {
      if (weights) feed.ask_for_weights(at, ring.stage(asked.index));
      feed.ask_for_x(at, ring.stage(asked.index));
      ptx::arrive_with_copies(ring.full(asked.index));
      at.next(p, blockIdx.x);
      asked.next();
    };
    if (stages == 0) return;
    const int fill = min(ring.depth, stages);
#pragma unroll 1
    for (int i = 0; i < fill; ++i) ask(i >= early);
    add_up(summed);
    // Workers are at stage i - 1. Why its place is waited for last: they need the sums of stage i next.
#pragma unroll 1
    for (int i = 1; i < stages; ++i) {
      add_up(summed);
      if (i - 1 + fill >= stages) continue;
      ptx::wait_arrivals(ring.empty(asked.index), asked.parity ^ 1);
      ask(true);
    }
    // Why: nothing may come to shared memory once the block has left it.
    ptx::commit();
    ptx::wait_groups<0>();
  }
};

template <class Weight, class Act, class Tile, class Form>
__global__ void __launch_bounds__(Tile::kThreads, 1) multiply_narrow(const __grid_constant__ Problem p) {
  using Worker = NarrowWorker<Weight, Act, Tile, Form>;
  using Helper = gemm_sm80::Helper<Weight, Act, Tile, Form>;
  using Stage = typename Helper::Stage;
  extern __shared__ __align__(128) uint8_t memory[];

  // ---- setup
  ptx::launch_dependents();
  // Why shuffles: the compiler would find the address anew in every step, and then knows that a warp goes one way.
  const typename Helper::Ring ring{__shfl_sync(~0u, ptx::shared_address(memory), 0),
                                   p.large ? Stage::kLarge : Stage::kSmall};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Parts parts(p.deal, blockIdx.x);
  const Helper helper(p, ring, parts, warp - Tile::kWarps, lane);

  // ---- weights: they do not depend on the kernel before, nor on the barriers that others make meanwhile
  if (warp >= Tile::kWarps) {
    helper.start();
  } else if (warp < 3 && lane == 0) {
    const uint32_t first = warp == 0 ? ring.full(0) : warp == 1 ? ring.summed(0) : ring.empty(0);
    const int arrivals = warp == 0 ? Tile::kCopiers : warp == 1 ? 32 * Helper::kSummers : Tile::kWarps;
#pragma unroll 1
    for (int i = 0; i < ring.depth; ++i) ptx::arrivals_init(first + 8 * i, arrivals);
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();

  // ---- everything else
  if (warp >= Tile::kWarps) {
    helper.go_on();
  } else {
    Worker(p, ring, 0, warp, lane).run(parts);
  }
}

}  // namespace lowbit::gemm_sm80
