// Where sums of a task meet whose stages the blocks of a cluster share (deal.cuh): every so-manieth column of all rows,
// or pair of columns, comes to each of them, in whose shared memory it lies. Columns are those of the tile, or those
// that one of two warpgroups has (shared_rows.cuh).
//
//   [block that sent it][row tile][column][lane][4]
#pragma once
#include <cstdint>
#include <type_traits>

#include "../parts.cuh"
#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "lines.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

// Together: columns_together. What is done with sums is laid out for each number of blocks, and each rank: which column
// goes where is known then, and the end of a task runs once, some five cycles an instruction (lines.cuh).
template <class Tile, int Together>
struct Meeting {
  static constexpr int kColumns = Tile::kColumns / Tile::kParts;
  static constexpr int kTogether = Together, kUnits = kColumns / kTogether;
  static constexpr int kMost = Tile::kParts > 1 ? kMostMeetOfParts : kMostMeet;  // blocks
  using Sums = float[4 * kColumns];                                              // [column][4]

  const uint32_t room, barrier;  // in shared memory: where sums come to, and what counts their bytes
  const int blocks, warp, lane;
  const uint32_t rank = ptx::cluster_rank();

  // Of all that comes to this block.
  static __device__ __forceinline__ int bytes(int blocks) {
    int units = 0;  // that it adds up, times blocks that send them
    with_blocks(blocks, [&](auto how_many) {
      constexpr int kBlocks = decltype(how_many)::value;
      units = (kUnits - static_cast<int>(ptx::cluster_rank()) + kBlocks - 1) / kBlocks * (kBlocks - 1);
    });
    return Tile::kParts * Tile::kRowTiles * units * kTogether * kColumnBytes;
  }

  // Sends others their columns. Each numbers those that send without itself.
  __device__ __forceinline__ void hand_in(const Sums& sum) const {
    with_blocks(blocks, [&](auto how_many) {
      constexpr int kBlocks = decltype(how_many)::value;
#pragma unroll
      for (uint32_t owner = 0; owner < kBlocks; ++owner) {
        if (rank == owner) continue;
        const auto to = ptx::place_in_cluster(place<kBlocks>(rank > owner ? rank - 1 : rank), barrier, owner);
        for_columns<kBlocks>(owner, [&](int column, int offset) {
          ptx::store_behind(to, offset,
                            {sum[4 * column], sum[4 * column + 1], sum[4 * column + 2], sum[4 * column + 3]});
        });
      }
    });
  }

  // Adds what others sent, always in the same order, to the columns of this block; returns a bit for each of these.
  __device__ __forceinline__ uint32_t add_up(Sums& sum) const {
    ptx::barrier_wait(barrier, 0);
    uint32_t own = 0;
    with_blocks(blocks, [&](auto how_many) {
      constexpr int kBlocks = decltype(how_many)::value;
#pragma unroll
      for (uint32_t owner = 0; owner < kBlocks; ++owner) {
        if (rank != owner) continue;
#pragma unroll 1
        for (int sender = 0; sender < kBlocks - 1; ++sender) {
          const uint32_t from = place<kBlocks>(sender);
          for_columns<kBlocks>(owner, [&](int column, int offset) {
            float more[4];
            ptx::load_shared(from + offset, more);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[4 * column + i] += more[i];
          });
        }
        for_columns<kBlocks>(owner, [&](int column, int) { own |= 1u << column; });
      }
    });
    return own;
  }

 private:
  template <class Run>
  static __device__ __forceinline__ void with_blocks(int blocks, const Run& run) {
    if (kMost == 2 || blocks == 2) {
      run(std::integral_constant<int, 2>());
    } else if (blocks == 3) {
      run(std::integral_constant<int, 3>());
    } else {
      run(std::integral_constant<int, kMost>());
    }
  }

  // Where sums of a block's first column lie that come from the others' number `sender`, in the memory of any block.
  template <int Blocks>
  __device__ __forceinline__ uint32_t place(uint32_t sender) const {
    constexpr int kMostColumns = (kUnits + Blocks - 1) / Blocks * kTogether;
    return room + (sender * Tile::kRowTiles + warp) * kMostColumns * kColumnBytes + lane * 16;
  }

  // Calls run(column, bytes from the first one's place) for the columns of block `owner`.
  template <int Blocks, class Run>
  static __device__ __forceinline__ void for_columns(uint32_t owner, const Run& run) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int unit = column / kTogether;
      if (static_cast<uint32_t>(unit % Blocks) == owner)
        run(column, (unit / Blocks * kTogether + column % kTogether) * kColumnBytes);
    }
  }
};

// Stores y of a task that this block has all of, or of the columns that come to it where its cluster shares the stages.
// rows: of rows_of_y; unit: what sums of each row half are counted in.
template <class Tile, int Together, class Rows>
__device__ __forceinline__ void finish_task(const Problem& p, const Part& part, uint32_t room, uint32_t barrier,
                                            Rows& rows, int warp, int lane, float (&unit)[2],
                                            typename Meeting<Tile, Together>::Sums& sum) {
  const bool meet = part.end - part.begin < p.deal.stages;
  // Why a shuffle: else all that follows from the number would be found before the first stage, and kept.
  const Meeting<Tile, Together> meeting{room, barrier, __shfl_sync(~0u, p.deal.meet, 0), warp, lane};
  if (meet) count_out(unit, sum), meeting.hand_in(sum);
  rows.count_in(unit);
  const uint32_t own = meet ? meeting.add_up(sum) : ~0u;
  // Both warpgroups are done with all products of the task: lines lie where its last stage was.
  if constexpr (Together > 1) ptx::wait_at_barrier<32 * Tile::kWarps>(LinesOfStages::kBothBarrier);
  rows.store([&](int column, int i) { return sum[4 * column + i]; }, own);
}

}  // namespace lowbit::gemm_sm90
