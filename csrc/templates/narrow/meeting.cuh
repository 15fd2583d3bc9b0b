// Where sums of parts of K meet: those of a row tile come to one block of the cluster, in whose shared memory they lie
// [its row tile][slice: block, part][column][lane][4]. A warp adds up a row tile.
//
// Ring: where that is (`meeting`), and the barrier that counts its bytes where there are two blocks (`met`).
#pragma once
#include <cstdint>

#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "split.cuh"

namespace lowbit::narrow {

constexpr int kColumnBytes = 512;  // of a warp's sums of 8 tokens

// Of all slices of the row tiles that come to this block of a cluster.
template <class Tile>
__device__ __forceinline__ int meeting_bytes(const Stages& stages) {
  const int own = (stages.split.row_tiles - static_cast<int>(blockIdx.x & 1) + 1) / 2;
  return own * stages.slices * Tile::kColumns * kColumnBytes;
}

// What a warp needs to hand in its sums of a task, and to add up those of its row tile. Why apart from doing so: it can
// be found before the kernel before has ended; after the last product nothing else is under way, and each instruction
// takes five cycles and more.
template <class Tile, class Ring>
struct Meeting {
  static constexpr int kColumns = Tile::kColumns, kSlice = kColumns * kColumnBytes;
  using Sum = float[kColumns][4];

  uint32_t met;                // where there are two blocks: the barrier
  uint32_t from, end;          // this lane's sums of the row tile that the warp adds up
  ptx::PlaceInCluster handed;  // where its own go; to: 0 if the warp has none

  // tile, part: what the warp multiplies.
  __device__ Meeting(const Stages& stages, const Ring& ring, int tile, int part, int warp, int lane)
      : met(stages.split.blocks > 1 ? ring.met() : 0),
        from(ring.meeting() + warp * stages.slices * kSlice + lane * 16),
        end(from + stages.slices * kSlice),
        handed(place_for(stages, ring, tile, part, lane)) {}

  static __device__ __forceinline__ int rank(const Stages& stages) {
    return static_cast<int>(blockIdx.x) & (stages.split.blocks - 1);
  }

  // The row tile of its task that a warp adds up, and stores; beyond those of the task: none.
  static __device__ __forceinline__ int own_tile(const Stages& stages, int warp) {
    return stages.split.blocks > 1 ? 2 * warp + rank(stages) : warp;
  }

  static __device__ __forceinline__ ptx::PlaceInCluster place_for(const Stages& stages, const Ring& ring, int tile,
                                                                  int part, int lane) {
    if (tile >= stages.split.row_tiles) return {};
    const int more = stages.split.blocks - 1, slice = rank(stages) * stages.split.parts + part;
    const uint32_t to = ring.meeting() + ((tile >> more) * stages.slices + slice) * kSlice + lane * 16;
    if (more) return ptx::place_in_cluster(to, ring.met(), tile & more);
    return {to};
  }

  // All threads of a warp: what was found stays in registers.
  __device__ __forceinline__ void hold() {
    ptx::hold(met), ptx::hold(from), ptx::hold(end), ptx::hold(handed.to), ptx::hold(handed.counts);
  }

  __device__ __forceinline__ void hand_in(const Sum& total) const {
    if (!handed.to) return;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      if (handed.counts) {
        ptx::store_behind(handed, column * kColumnBytes, total[column]);
      } else {
        ptx::store_shared(handed.to + column * kColumnBytes, total[column]);
      }
    }
  }

  // All warps come here. Adds up slices, always in the same order, if `any`. Why four at once: one after the other they
  // take 40 cycles each. Why not in blocks of a whole multiprocessor: registers, which blocks of add_parts need.
  __device__ __forceinline__ void add_up(bool any, Sum& total) const {
    if (met) {
      ptx::barrier_wait(met, 0);
    } else {
      ptx::wait_at_barrier<32 * Tile::kWarps>(1);
    }
    if (!any) return;
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[column][i] = 0.0f;
    uint32_t at = from;
    if (Tile::kHalf) {
#pragma unroll 1
      for (; at + 4 * kSlice <= end; at += 4 * kSlice) add<4>(at, total);
      if (at + 2 * kSlice <= end) add<2>(at, total), at += 2 * kSlice;
    }
#pragma unroll 1
    for (; at < end; at += kSlice) add<1>(at, total);
  }

 private:
  template <int Count>
  static __device__ __forceinline__ void add(uint32_t from, Sum& total) {
    float more[Count][kColumns][4];
#pragma unroll
    for (int slice = 0; slice < Count; ++slice)
#pragma unroll
      for (int column = 0; column < kColumns; ++column)
        ptx::load_shared(from + slice * kSlice + column * kColumnBytes, more[slice][column]);
#pragma unroll
    for (int slice = 0; slice < Count; ++slice)
#pragma unroll
      for (int column = 0; column < kColumns; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[column][i] += more[slice][column][i];
  }
};

}  // namespace lowbit::narrow
