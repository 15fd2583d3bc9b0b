// Where sums of parts of K meet: those of a row tile come to one block of the cluster, in whose shared memory they lie
// [its row tile][slice: block, part][column][lane][4].
//
// Ring: where that is (`meeting`), and the barrier that counts its bytes where there are two blocks (`met`).
#pragma once
#include <cstdint>

#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "split.cuh"

namespace lowbit::narrow {

template <class Tile, class Ring>
struct Meeting {
  static constexpr int kColumns = Tile::kColumns;
  using Sum = float[kColumns][4];

  const Stages& stages;
  const Ring& ring;
  const int warp, lane;

  // Of all slices of the row tiles that come to this block of a cluster.
  static __device__ __forceinline__ int bytes(const Stages& stages) {
    const int own = (stages.split.row_tiles - static_cast<int>(blockIdx.x & 1) + 1) / 2;
    return own * stages.slices * kColumns * 512;
  }

  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) & (stages.split.blocks - 1); }

  // The row tile of its task that this warp adds up; beyond those of the task: none.
  __device__ __forceinline__ int own_tile() const { return stages.split.blocks > 1 ? 2 * warp + rank() : warp; }

  __device__ __forceinline__ void hand_in(int tile, int part, const Sum& total) const {
    const int more = stages.split.blocks - 1, slice = rank() * stages.split.parts + part;
    const uint32_t to = ring.meeting() + (((tile >> more) * stages.slices + slice) * kColumns) * 512 + lane * 16;
    if (more) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column)
        ptx::store_in_cluster(to + column * 512, ring.met(), tile & more, total[column]);
    } else {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) ptx::store_shared(to + column * 512, total[column]);
    }
  }

  // All warps come here. Adds up slices, always in the same order, if `any`.
  __device__ __forceinline__ void add_up(bool any, Sum& total) const {
    int own = lane;
    if (Tile::kTokens == 16) ptx::hold_below<32>(own);  // Why: else `from` is found before the first stage, and kept
    uint32_t from = ring.meeting() + warp * stages.slices * (kColumns * 512) + own * 16;
    if (stages.split.blocks > 1) {
      ptx::barrier_wait(ring.met(), 0);
    } else {
      ptx::wait_at_barrier<32 * Tile::kWarps>(1);
    }
    if (!any) return;
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[column][i] = 0.0f;
#pragma unroll 4
    for (int slice = 0; slice < stages.slices; ++slice)
#pragma unroll
      for (int column = 0; column < kColumns; ++column, from += 512) {
        float more[4];
        ptx::load_shared(from, more);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[column][i] += more[i];
      }
  }
};

}  // namespace lowbit::narrow
