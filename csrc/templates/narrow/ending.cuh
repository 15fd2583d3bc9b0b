// What becomes of a warp's sums of a task: they meet where others have parts of its K (meeting.cuh), and y is stored;
// or they are kept for a second kernel (parts.cuh).
//
// Early: whether what that needs is found before x is there. There is one task a block then, whose parts meet. Why
// apart from doing it: after the last product nothing else is under way, and each instruction takes five cycles and
// more.
#pragma once
#include <type_traits>

#include "../parts.cuh"
#include "meeting.cuh"

namespace lowbit::narrow {

template <class Act, class Tile, class Ring, class Problem, bool Early>
struct Ending {
  using Meeting = narrow::Meeting<Tile, Ring>;
  using Rows = RowsOfY<Act, Tile, Problem>;
  using Sum = float[Tile::kColumns][4];
  struct Found {
    Meeting meeting;
    Rows rows;
  };
  struct Nothing {};

  const Problem& p;
  const Ring ring;                   // Why not a reference: the worker that has both would have to lie in memory
  const int tile, part, warp, lane;  // row tile and part of K that the warp multiplies
  std::conditional_t<Early, Found, Nothing> found;

  __device__ Ending(const Problem& problem, const Ring& own_ring, int own_tile, int own_part, int own_warp,
                    int own_lane)
      : p(problem), ring(own_ring), tile(own_tile), part(own_part), warp(own_warp), lane(own_lane), found(find()) {
    if constexpr (Early) found.meeting.hold(), found.rows.hold();
  }

  __device__ __forceinline__ Meeting find_meeting() const { return {p.ring, ring, tile, part, warp, lane}; }

  // brings: as of RowsOfY.
  __device__ __forceinline__ Rows find_rows(int task, bool brings) const {
    const int own = Meeting::own_tile(p.ring, warp), tiles = p.ring.split.row_tiles;
    return {p, own < tiles ? (task * tiles + own) * 16 : p.n, 0, lane, brings};
  }

  __device__ __forceinline__ auto find() const {
    if constexpr (Early) {
      return Found{find_meeting(), find_rows(Parts(p.deal, blockIdx.x)[0].task, false)};
    } else {
      return Nothing{};
    }
  }

  // Below the wait for the kernel before: what it may have written.
  __device__ __forceinline__ void bring() {
    if constexpr (Early) found.rows.bring();
  }

  __device__ __forceinline__ void finish(const Part& done, Sum& total) const {
    const auto sums = [&](int column, int i) { return total[column][i]; };
    if constexpr (!Ring::kSplits) {
      finish_part<Act, Tile>(p, done, blockIdx.x, 0, warp, lane, sums);
    } else if constexpr (Early) {
      found.meeting.hand_in(total);
      found.meeting.add_up(found.rows.left, total);
      found.rows.store(sums);
    } else {
      if constexpr (!Ring::kOneTask)
        if (p.ring.whole && done.end - done.begin < p.deal.stages) {
          int own = lane;
          if (Tile::kColumns == 2) ptx::hold_below<32>(own);  // Why: else it is found before the first stage, and kept
          return keep_part<Tile>(p, blockIdx.x, done.place, 0, warp, own, sums);
        }
      const Meeting meeting = find_meeting();
      const bool meets = Ring::kOneTask || p.ring.slices > 1;
      if (meets) meeting.hand_in(total);
      const Rows rows = find_rows(done.task, true);
      if (meets) meeting.add_up(rows.left, total);
      rows.store(sums);
    }
  }
};

}  // namespace lowbit::narrow
