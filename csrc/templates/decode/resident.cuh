// The kernel of family `decode`: x of a block stays in shared memory.
//
// K is cut into slices, one a warp: warp % warps_k of a block, times the blocks of a cluster (1, 2, 4 or 8). The warps
// of one slice each, over all slices, are a row group, which walks its own row tiles. Those of a cluster, here 0 and 1,
// lie apart (Position::row_group).
//
//     cluster of 2, warps_k = 4:            k ->
//                     block 0                          block 1
//     row group 0   | warp 0 | warp 1 | .. | warp 3 | warp 0 | .. | warp 3 |     its tiles, one after the other
//     row group 1   | warp 4 | warp 5 | .. | warp 7 | warp 4 | .. | warp 7 |
//
// Nobody waits for anybody until the sums of a pass (all tiles, where there is room for them, or some) meet.
#pragma once
#include <type_traits>

#include "byte_worker.cuh"
#include "float_worker.cuh"
#include "meeting.cuh"
#include "shape.cuh"

namespace lowbit::decode {

// Integers, and floats whose bytes are looked up, multiply as bytes, other floats in the type of x.
template <class Weight, class Act, class Tile, class Form>
using WorkerOf = std::conditional_t<Weight::kFloat && !bytes::kLookedUp<Weight>, FloatWorker<Weight, Act, Tile>,
                                    ByteWorker<Weight, Act, Tile, Form>>;

template <class Weight, class Act, class Tile, class Form>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) resident(const __grid_constant__ Problem p) {
  using Worker = WorkerOf<Weight, Act, Tile, Form>;
  using Ring = typename Worker::Ring;
  using Map = decode::Map<Ring, Tile>;
  extern __shared__ __align__(128) uint8_t memory[];

  // ---- setup
  constexpr bool kWhole = Tile::kKind == Kind::kWhole;
  if (!Tile::kFeedsTell || p.next_after == 0) ptx::launch_dependents();  // else feeds do
  const uint32_t shared = ptx::shared_address(memory), met = shared + Map::kMet;
  if (p.cluster_shift) {  // Why first: making barriers known waits for copies under way
    if (threadIdx.x < 2) ptx::barrier_init(met + threadIdx.x * 8);
    __syncwarp();
    ptx::cluster_arrive_early();
  }
  Position at(p, !kWhole);
  if (!kWhole) at.keep();

  // ---- weights: they do not depend on the kernel before
  typename Worker::Feed feed(at, shared + Map::kRings + at.warp * Ring::kBytes);
  // Stages that are asked for before products. Why of 5 bits the last slot too, where a warp has as many stages as its
  // ring: of 4096 x 4096 it has, and the last one, asked for behind the first product, came late: 4.24 us to 3.57.
  const int ahead = Ring::kDepth - 1 + (!kWhole && Weight::kBits == 5 && feed.left == Ring::kDepth);
  const int early = min(!kWhole && at.block >= p.late ? 1 : p.early, ahead), beside = min(early + 2, ahead);
  // Why apart, and numbers kept behind it: a block of a whole multiprocessor begins when the kernel before ends, and
  // memory is idle until it asks, some 30 to 45 instructions sooner so. Others begin beside that kernel, whose x would
  // have to wait: 4096 x 4096, int4, 3.1 us to 3.3.
  if (kWhole) feed.fetch();
#pragma unroll 1
  for (int i = kWhole; i < early; ++i) feed.fetch();
  if (kWhole) at.keep(), feed.walk.renew(at);

  // ---- what else can be done before x is there: between two products of few weights every instruction counts
  const uint32_t x = shared + Map::kX, table = x + p.x_bytes;
  const auto store_constants = [&] {
    if (threadIdx.x < 16) ptx::store_shared(shared + Map::kZeros + threadIdx.x * 16, uint4{0, 0, 0, 0});
    if (threadIdx.x == 0) Worker::Table::store(shared + Map::kTable);
  };
  if (!kWhole) store_constants();
  typename Worker::X own_x(at, x, table);
  int asked = early;
  const auto ask_for_x = [&] {
    ptx::wait_for_previous_kernel();
    own_x.ask();
#pragma unroll 1
    for (; asked < beside || (asked < ahead && feed.is_done()); ++asked) feed.fetch();
  };
  // Why so early: blocks of a whole multiprocessor begin when the kernel before ends; others have time until it does.
  if (kWhole) ask_for_x(), store_constants();
  Worker worker(at, shared + Map::kZeros, x, table);
  auto place = Worker::start(feed.ring);
  Meeting<Act, Worker, Tile> meeting(at, table + p.table_bytes, met);
  meeting.expect();
  if (p.cluster_shift) ptx::cluster_wait();  // blocks store into each other's memory only when all of them run

  // ---- x
  if (!kWhole) ask_for_x();
  meeting.aim_first();
  own_x.bring();
#pragma unroll 1
  for (; asked < ahead; ++asked) feed.fetch();
  __syncthreads();

  // ---- passes
  int tile = at.first_tile;
#pragma unroll 1
  for (;;) {
    int i = 0;
#pragma unroll 1
    do {
      if (tile < at.end_tile) worker.run_tile(place, feed);
      meeting.hand_in(worker, i);
      tile += Ring::kRows, i += Ring::kRows;
    } while (i < meeting.pass_tiles);
    meeting.finish();
    if (meeting.is_last()) break;
    meeting.next_pass();
    meeting.expect();
    if (p.cluster_shift) __syncthreads();  // all of the block has read before any of it hands in again
  }
}

}  // namespace lowbit::decode
