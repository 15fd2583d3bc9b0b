// What becomes of sums where the two warpgroups of a block have the same 64 rows and stages in turns: each gives the
// other every second column, or pair of columns, by way of shared memory; and where blocks of a cluster share a task as
// well, those that a warpgroup then has meet once more (meeting.cuh).
//
// Why: twice as many blocks fill the device as by 128 rows each, so that most tasks need not be shared by blocks, whose
// sums take longer on their way: 8192 x 3584, int4, 64 rows 10.0 us by two blocks of 128 rows, 9.4 so.
//
//   [who gets it][row tile][column][lane][4]
#pragma once
#include <cstdint>

#include "../parts.cuh"
#include "../ptx/async.cuh"
#include "meeting.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

// Bytes that come to a warpgroup from another block.
template <class Tile, int Together>
constexpr int kRoomOfPart = meeting_room(Tile::kRowTiles, Tile::kColumns / 2, Together, kMostMeetOfParts);

// Stores y of the columns that come to this warpgroup. Every thread of both comes here, once, when all turns are over,
// if there are any. base: of Map; rows: of rows_of_y; warp: its row tile; part_of_k: which of the warpgroups it is.
template <class Tile, class Stage, class Rows>
__device__ __forceinline__ void finish_shared_rows(const Problem& p, uint32_t base, const Rows& rows, int warp,
                                                   int part_of_k, int lane, const float (&sum)[4 * Tile::kColumns]) {
  using Map = gemm_sm90::Map<Stage>;
  constexpr int kTogether = Stage::kTogether;
  const uint32_t room = base + Map::kMeeting;
  static_assert(Tile::kParts == 2 && Tile::kColumns % (2 * kTogether) == 0);
  constexpr int kOwn = Tile::kColumns / 2, kGiven = Tile::kRowTiles * kOwn * kColumnBytes;
  const uint32_t place = room + warp * kOwn * kColumnBytes + lane * 16;
  const uint32_t from = place + part_of_k * kGiven, to = place + (1 - part_of_k) * kGiven;
  float own[4 * kOwn];
#pragma unroll
  for (int column = 0; column < kOwn; ++column) {
    float given[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int unit = column / kTogether, within = 4 * (column % kTogether) + i;
      const float even = sum[8 * unit * kTogether + within], odd = sum[(8 * unit + 4) * kTogether + within];
      own[4 * column + i] = part_of_k ? odd : even, given[i] = part_of_k ? even : odd;
    }
    ptx::store_shared(to + column * kColumnBytes, given);
  }
  // Why not a barrier by number, and why each lane: compute-sanitizer's racecheck does not follow the former after
  // turns, nor one lane's arrival for all of its warp.
  ptx::arrive(base + Map::kExchanged);
  ptx::wait_arrivals(base + Map::kExchanged, 0);
#pragma unroll
  for (int column = 0; column < kOwn; ++column) {
    float more[4];
    ptx::load_shared(from + column * kColumnBytes, more);
#pragma unroll
    for (int i = 0; i < 4; ++i) own[4 * column + i] += more[i];
  }
  uint32_t mine = ~0u;
  if (p.deal.meet > 1) {
    const Meeting<Tile, kTogether> meeting{room + 2 * kGiven + part_of_k * kRoomOfPart<Tile, kTogether>,
                                           base + Map::kMet, p.deal.meet, warp, lane};
    meeting.hand_in(own);
    mine = meeting.add_up(own);
  }
  rows.template store<2>([&](int column, int i) { return own[4 * column + i]; }, mine, part_of_k);
}

}  // namespace lowbit::gemm_sm90
