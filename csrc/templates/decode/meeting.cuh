// Where the sums of a pass meet: what every slice of K found for a tile comes to one block, which stores y.
//
// Tile i of row group r of a block belongs to the block of rank (r * pass_tiles + i) % cluster, which finds in its
// shared memory [owned tile][slice][item][float]: what lanes of a worker handed in (Worker::kItems, kFloats and spot).
#pragma once
#include "../epilogue.cuh"
#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "shape.cuh"

namespace lowbit::decode {

// Bytes of a tile's sums from one slice.
template <class Worker>
constexpr int kSumBytes = Worker::kItems * Worker::kFloats * 4;

// How many tiles of a pass this block owns.
template <class Tile>
__device__ __forceinline__ int owned_tiles(const Position& at) {
  const int slots = (Tile::kWarps >> at.p.warps_k_shift) * at.p.pass_tiles;
  return (slots - at.rank + (1 << at.p.cluster_shift) - 1) >> at.p.cluster_shift;
}

// A warp's sums of row tile r of those side by side, which is tile i of the pass; every warp hands in something for
// every i, so that owners know what to wait for.
template <class Worker>
__device__ __forceinline__ void hand_in(Worker& worker, const Position& at, uint32_t place, uint32_t met, int i,
                                        int r) {
  const Problem& p = at.p;
  const int slot = (at.warp >> p.warps_k_shift) * p.pass_tiles + i;
  const int owned = ((slot >> p.cluster_shift) << (p.cluster_shift + p.warps_k_shift)) + at.slice;
  const uint32_t owner = slot & ((1 << p.cluster_shift) - 1);
  place += owned * kSumBytes<Worker>;
  worker.hand_in(r, [&](int item, const float (&values)[Worker::kFloats]) {
    const uint32_t to = place + item * (Worker::kFloats * 4);
    if (p.cluster_shift) {
      ptx::store_in_cluster(to, met, owner, values);
    } else {
      ptx::store_shared(to, values);
    }
  });
}

// Waits for all that was handed in; round: how often the barrier was used before.
__device__ __forceinline__ void meet(const Problem& p, uint32_t met, int round) {
  if (p.cluster_shift) {
    ptx::barrier_wait(met, round & 1);
  } else {
    __syncthreads();
  }
}

// Stores what the sums of one item of a row tile have become.
template <class Act, class Worker>
__device__ __forceinline__ void store_item(const Problem& p, int tile, int item,
                                           const float (&value)[Worker::kFloats]) {
#pragma unroll
  for (int j = 0; j < Worker::kFloats; ++j) {
    const auto spot = Worker::spot(item, j);
    const int n = tile * 16 + spot.row;
    if (n >= p.n || spot.token >= p.m) continue;
    store_y<Act>(p, n, spot.token, value[j], p.step * Worker::unit(spot.row));
  }
}

// Stores this block's tiles of the pass whose first tile is `first` of each row group. A thread adds up one item of
// every slice.
template <class Act, class Worker, class Tile>
__device__ __forceinline__ void store_pass(const Position& at, uint32_t place, int first) {
  const Problem& p = at.p;
  constexpr int kItems = Worker::kItems, kFloats = Worker::kFloats;
  const int splits = 1 << (p.cluster_shift + p.warps_k_shift);
  const int owned = owned_tiles<Tile>(at);
  const float tiles = 1.0f / static_cast<float>(p.pass_tiles);
#pragma unroll 1
  for (int i = threadIdx.x; i < owned * kItems; i += Tile::kThreads) {
    const int own = i / kItems, item = i % kItems;
    float value[kFloats] = {};
#pragma unroll 8
    for (int s = 0; s < splits; ++s) {
      float more[kFloats];
      ptx::load_shared(place + ((own * splits + s) * kItems + item) * (kFloats * 4), more);
#pragma unroll
      for (int j = 0; j < kFloats; ++j) value[j] += more[j];
    }
    const int slot = (own << p.cluster_shift) + at.rank,
              group = static_cast<int>((static_cast<float>(slot) + 0.5f) * tiles);
    const int row_group = at.first_row_group + group;
    const int tile = p.row_groups(row_group) + first + slot - group * p.pass_tiles;
    if (tile >= p.row_groups(row_group + 1)) continue;
    store_item<Act, Worker>(p, tile, item, value);
  }
}

}  // namespace lowbit::decode
