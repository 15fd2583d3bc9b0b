// Sums of a task whose stages the blocks of a cluster share (deal.cuh). Each block leaves its sums in its shared
// memory; then each adds up what all have of every so-manieth unit of 16 tokens, always in the same order, and stores y
// of it.
//
//   sums   [row tile][column][lane][4]; where a unit was, y of it comes to lie: [16 tokens][16 rows]
//
// A warp needs sums of its own rows alone, so it waits for the same warp of other blocks. A block stays until others
// have read its sums.
//
// Why loops: code that runs once takes some five cycles an instruction, and sums in registers can't be indexed. Why
// sums are fetched: sent by st.async they come at 12 bytes a cycle (docs/notes/gemm-sm90.md, version 86).
#pragma once
#include <cstdint>

#include "../parts.cuh"
#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "lines.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

// Waits until all warps have given back what was the number `use` in a ring of `Depth` places, whose barriers begin at
// `empty`; not if that is less than 0.
template <int Depth>
__device__ __forceinline__ void wait_for_use(uint32_t empty, int use) {
  if (use >= 0) ptx::wait_arrivals(empty + 8 * (use % Depth), use / Depth % 2);
}

// room: where no other warp needs anything any more, but the same row tile of another block.
template <class Tile>
struct Meeting {
  static constexpr int kUnits = Tile::kTokens / 16, kUnitBytes = 2 * kColumnBytes;
  static constexpr int kBarriers = Tile::kRowTiles + 1;  // sums of a warp are there, for each; all have been read
  using Sums = float[4 * Tile::kColumns];                // [column][4]

  const uint32_t room, barriers;  // in shared memory
  const int blocks, warp, lane;
  const int rank = static_cast<int>(ptx::cluster_rank());

  // By one thread.
  static __device__ __forceinline__ void init(uint32_t barriers, int blocks) {
#pragma unroll 1
    for (int i = 0; i < Tile::kRowTiles; ++i) ptx::arrivals_init(barriers + 8 * i, blocks - 1);
    ptx::arrivals_init(barriers + 8 * Tile::kRowTiles, Tile::kRowTiles * (blocks - 1));
    ptx::publish_to_cluster();
  }

  __device__ __forceinline__ uint32_t place(int row_tile, int unit) const {
    return room + (row_tile * kUnits + unit) * kUnitBytes;
  }
  // Of 16 bytes of y, 8 rows, in the place of a unit.
  static __device__ __forceinline__ uint32_t within(int row_tile, int token, int half) {
    return (token ^ row_tile % 4) * 32 + (half ^ (token >> 2 & 1)) * 16;
  }

  // Tells all others.
  __device__ __forceinline__ void tell(uint32_t barrier) const {
    __syncwarp();
    if (lane < blocks && lane != rank) ptx::tell_in_cluster(barrier, lane);
  }

  // Leaves a warp's sums to all.
  __device__ __forceinline__ void leave(const Sums& sum) const {
    const uint32_t to = place(warp, 0) + lane * 16;
#pragma unroll
    for (int column = 0; column < Tile::kColumns; ++column) {
      const float own[4] = {sum[4 * column], sum[4 * column + 1], sum[4 * column + 2], sum[4 * column + 3]};
      ptx::store_shared(to + column * kColumnBytes, own);
    }
    tell(barriers + 8 * warp);
  }

  // Sums of all blocks of this warp's rows and 16 tokens.
  __device__ __forceinline__ void add_up(int unit, float (&sum)[2][4]) const {
    const uint32_t from = place(warp, unit) + lane * 16;
    ptx::load_shared(from, sum[0]), ptx::load_shared(from + kColumnBytes, sum[1]);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      if (block == rank) continue;
      float more[2][4];
      ptx::load_from_cluster(from, block, more[0]), ptx::load_from_cluster(from + kColumnBytes, block, more[1]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += more[i / 4][i % 4];
    }
  }

  // All that becomes of the sums of a part. n: first row of the warpgroup, token: first of the tile.
  template <class Act, class Problem>
  __device__ __forceinline__ void finish(const Problem& p, int n, int token, const Sums& sum) const {
    leave(sum);
    const RowsOfY<Act, Tile, Problem> rows(p, n + warp % 4 * 16, lane);
    const uint32_t to = within(warp, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    ptx::barrier_wait(barriers + 8 * warp, 0);
#pragma unroll 1
    for (int unit = rank; unit < kUnits; unit += blocks) {
      float sums[2][4];
      add_up(unit, sums);
      if (!p.lines) {
        for (int j = 0; j < 2; ++j) rows.store_column(token, unit * 16 + 8 * j, sums[j]);
        continue;
      }
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = rows.pair(i % 2, sums[i / 2]);
      __syncwarp();  // all lanes have read theirs
      ptx::store_matrices_turned(place(warp, unit) + to, pairs);
    }
    tell(barriers + 8 * Tile::kRowTiles);
    if (p.lines) store(p, n, token);
    ptx::barrier_wait(barriers + 8 * Tile::kRowTiles, 0);
  }

  // Stores whole lines of y: 64 rows of a token are 128 bytes.
  template <class Problem>
  __device__ __forceinline__ void store(const Problem& p, int n, int token) const {
    ptx::wait_at_barrier<128>(Lines::kFirstBarrier + warp / 4);
    const int own = warp % 4 * 4 + lane / 8, piece = lane % 8;
    const uint32_t from = place(warp / 4 * 4 + piece / 2, 0) + within(piece / 2, own, piece % 2);
    if (n + 8 * piece >= p.n) return;
    uint16_t* y = static_cast<uint16_t*>(p.y) + (token + own) * p.y_stride + n + 8 * piece;
#pragma unroll 1
    for (int unit = rank; unit < kUnits; unit += blocks) {
      uint4 values;
      ptx::load_shared(from + unit * kUnitBytes, values.x, values.y, values.z, values.w);
      const int at = unit * 16 + own;
      if (at < p.tile_tokens && token + at < p.m) *reinterpret_cast<uint4*>(y + unit * 16 * p.y_stride) = values;
    }
  }
};

}  // namespace lowbit::gemm_sm90
