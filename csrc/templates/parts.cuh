// What becomes of a block's sums of a task: y, where it had all stages of it; else they stay in memory, and a second
// kernel makes y of the parts.
//
// For families whose workers are dealt tasks (deal.cuh). Problem: sizes n and m; deal, patches,
// tile_tokens; parts, factor; and what epilogue.cuh needs. Tile: kColumns, kRowTiles, kCluster.
#pragma once
#include "deal.cuh"
#include "epilogue.cuh"
#include "halves.cuh"
#include "ptx/async.cuh"
#include "ptx/mma.cuh"

namespace lowbit {

// Floats of a part. A worker keeps two of them at most.
template <class Tile>
constexpr int kPart = Tile::kCluster * Tile::kRowTiles * Tile::kColumns * 128;

// Blocks of a worker, each with rows of its own. Why not always asked of the deal: gemm_sm80's is none that meets.
template <class Tile, class Problem>
__device__ __forceinline__ int blocks_of(const Problem& p) {
  if constexpr (Tile::kCluster == 1) {
    return 1;
  } else {
    return p.deal.blocks_of(Tile::kCluster);
  }
}

// Blocks of `Threads` that add up a task.
template <class Tile, int Threads>
constexpr int kAddBlocks = kPart<Tile> / 4 / Threads;

// Multiplies sums by the units that they are counted in, of each row half one; from now on these are 1. For sums that
// others add to theirs: where one warp has all of a task, y's factor takes the units (count_in).
template <int Count>
__device__ __forceinline__ void count_out(float (&unit)[2], float (&sum)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) sum[i] *= unit[i / 2 % 2];
  unit[0] = unit[1] = 1.0f;
}

// Where a warp stores y of its 16 rows from n on and of a tile's tokens from `token` on, and what sums of them still
// need. Why apart from the store: all of it can be found while others are waited for.
template <class Act, class Tile, class Problem>
struct RowsOfY {
  const Problem& p;
  int n;
  const int lane;
  int left;  // tokens that are there; none where no row is
  float bias[2] = {}, factor[2];
  int pairs;  // whether two rows can be written at once
  Act* y;     // where this lane's token and rows of the first column go

  // brings: whether biases and factors of rows are. Else they come by bring, below the wait for the kernel before.
  __device__ RowsOfY(const Problem& problem, int first, int token, int own_lane, bool brings = true)
      : p(problem),
        n(first),
        lane(own_lane),
        left(first < problem.n ? min(problem.tile_tokens, problem.m - token) : 0),
        factor{problem.factor[0], problem.factor[1]} {
    if (brings) bring();
    pairs = n + 16 <= p.n && reinterpret_cast<uintptr_t>(p.y) % 4 == 0 && p.y_stride % 2 == 0;
    y = static_cast<Act*>(p.y) + (token + lane / 4) * p.y_stride + n + lane % 4 * 2;
  }

  __device__ __forceinline__ void bring() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = n + lane / 4 + 8 * h;
      if (row >= p.n) continue;
      if (p.bias) bias[h] = load_bias(p.bias, p.bias_type, row);
      factor[h] = row_factor(p, row, factor[h]);
    }
  }

  // All threads of a warp: what was found stays in registers.
  __device__ __forceinline__ void hold() {
    uint64_t at = reinterpret_cast<uintptr_t>(y);
    ptx::hold(at), ptx::hold(n), ptx::hold(left), ptx::hold(pairs);
    y = reinterpret_cast<Act*>(static_cast<uintptr_t>(at));
  }

  // From now on sums are counted in units: of each row half one.
  __device__ __forceinline__ void count_in(const float (&unit)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[h] *= unit[h];
  }

  // Of columns that have a bit in `own`. sums(column, i): of row half i / 2, token i % 2. Columns are 0, 1, 2... of the
  // tile, or `first` and every Apart-th after it.
  template <int Apart = 1, class Sums>
  __device__ __forceinline__ void store(const Sums& sums, uint32_t own = ~0u, int first = 0) const {
    constexpr int kColumns = Tile::kColumns / Apart;
    const int64_t apart = 8 * Apart * p.y_stride;
    Act* y = this->y + 8 * first * p.y_stride;
    if (!pairs) {
      store_ragged<kColumns, Apart>(y, sums, own, first);
      return;
    }
#pragma unroll
    for (int column = 0; column < kColumns; ++column, y += apart) {
      const int tokens = 8 * (Apart * column + first);  // before it
      if (tokens >= left) break;
      if (!(own >> column & 1)) continue;
      uint32_t pair[2];
      turn([&](int i) { return sums(column, i); }, pair);
      if (tokens + lane / 4 >= left) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) *reinterpret_cast<uint32_t*>(y + 8 * h) = pair[h];
    }
  }

 private:
  // y of one column, of two rows side by side of each row half.
  template <class Sum>
  __device__ __forceinline__ void turn(const Sum& sum, uint32_t (&pair)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      // Turned, a lane has one token and two rows.
      pair[h] = ptx::transpose(
          pack_pair<Act>(fmaf(sum(2 * h), factor[h], bias[h]), fmaf(sum(2 * h + 1), factor[h], bias[h])));
  }

  // The same where rows are written one at a time. Why a loop that moves all sums on: hardly anyone has such y, and
  // code for each column would stand in the way of the one above. Why none of more columns: gemm_sm80 has no register
  // for it.
  template <int Columns, int Apart, class Sums>
  __device__ __forceinline__ void store_ragged(Act* y, const Sums& sums, uint32_t own, int first) const {
    constexpr int kLaidOut = Columns > 8 ? Columns : 1;
    float each[Columns][4];
#pragma unroll
    for (int column = 0; column < Columns; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i) each[column][i] = sums(column, i);
#pragma unroll kLaidOut
    for (int tokens = 8 * first; tokens < 8 * Apart * Columns && tokens < left; tokens += 8 * Apart) {
      uint32_t pair[2];
      turn([&](int i) { return each[0][i]; }, pair);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane % 4 * 2 + i / 2 * 8 + i % 2;
        const bool here = (own & 1) && tokens + lane / 4 < left && n + row < p.n;
        const uint16_t value = static_cast<uint16_t>(i % 2 ? pair[i / 2] >> 16 : pair[i / 2]);
        if (here) reinterpret_cast<uint16_t*>(y)[i / 2 * 8 + i % 2] = value;
      }
      y += 8 * Apart * p.y_stride, own >>= 1;
#pragma unroll
      for (int column = 0; column + 1 < Columns; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i) each[column][i] = each[column + 1][i];
    }
  }
};

// These are all sums of a task. rank: of the block in its cluster; warp: which of the block's row tiles it is.
template <class Act, class Tile, class Problem, class Sums>
__device__ __forceinline__ void store_task(const Problem& p, int task, int rank, int warp, int lane, const Sums& sums) {
  const Spot spot = p.patches(task);
  const int row_tile = (spot.row_block * blocks_of<Tile>(p) + rank) * Tile::kRowTiles + warp;
  RowsOfY<Act, Tile, Problem>(p, row_tile * 16, spot.token_tile * p.tile_tokens, lane).store(sums);
}

// These are those of a part of one, which lies at `place` of its worker.
template <class Tile, class Problem, class Sums>
__device__ __forceinline__ void keep_part(const Problem& p, int worker, int place, int rank, int warp, int lane,
                                          const Sums& sums) {
  float4* to = reinterpret_cast<float4*>(p.parts + static_cast<int64_t>(2 * worker + place) * kPart<Tile>) +
               (rank * Tile::kRowTiles + warp) * (Tile::kColumns * 32) + lane;
#pragma unroll
  for (int column = 0; column < Tile::kColumns; ++column)
    to[column * 32] = {sums(column, 0), sums(column, 1), sums(column, 2), sums(column, 3)};
}

// part: of this block's worker.
template <class Act, class Tile, class Problem, class Sums>
__device__ __forceinline__ void finish_part(const Problem& p, const Part& part, int worker, int rank, int warp,
                                            int lane, const Sums& sums) {
  if (part.end - part.begin == p.deal.stages) {
    store_task<Act, Tile>(p, part.task, rank, warp, lane, sums);
  } else {
    keep_part<Tile>(p, worker, part.place, rank, warp, lane, sums);
  }
}

// Adds up one float4 of every part: rows g and g + 8 of a row tile, two tokens. The parts of a task left over are those
// of the workers from the one with its first stage to the one with its last, in that order, always the same. The whole
// of a kernel of blocks of `Threads`.
template <class Act, class Tile, int Threads, class Problem>
__device__ __forceinline__ void add_up_parts(const Problem& p) {
  ptx::launch_dependents();
  constexpr int kRowTiles = Tile::kRowTiles * Tile::kCluster, kBlocks = kAddBlocks<Tile, Threads>;
  const Deal& deal = p.deal;
  const int index = static_cast<int>(blockIdx.x) / kBlocks, begin = index * deal.stages;
  const Spot spot = p.patches(deal.rounds * deal.workers + index);
  const int item = static_cast<int>(blockIdx.x) % kBlocks * Threads + static_cast<int>(threadIdx.x), lane = item % 32;
  const int row_tile = spot.row_block * kRowTiles + item / 32 / Tile::kColumns, column = item / 32 % Tile::kColumns;
  const int tokens = spot.token_tile * p.tile_tokens + column * 8;
  const int first = deal.cut.part_of(begin), last = deal.cut.part_of(begin + deal.stages - 1);
  // Of all but the first worker it is the first part that they have.
  const int place = 2 * first + (deal.cut(first) != begin);
  const float* head = p.parts + static_cast<int64_t>(place) * kPart<Tile> + item * 4;
  const float* from = p.parts + static_cast<int64_t>(2 * first + 2) * kPart<Tile> + item * 4;
  // Why only here: the numbers above take a while.
  ptx::wait_for_previous_kernel();
  if (row_tile * 16 >= p.n || column * 8 >= p.tile_tokens || tokens >= p.m || first == last) return;
  uint4 more[4];
  const auto load = [&](int left) { ptx::load_four<2 * kPart<Tile> * 4>(from, left, more); };
  load(last - first);
  // Why after them: all are under way at once.
  const uint4 own = ptx::load_x(head);
  float sum[4] = {__uint_as_float(own.x), __uint_as_float(own.y), __uint_as_float(own.z), __uint_as_float(own.w)};
#pragma unroll 1
  for (int left = last - first; left > 0;) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[0] += __uint_as_float(more[i].x), sum[1] += __uint_as_float(more[i].y);
      sum[2] += __uint_as_float(more[i].z), sum[3] += __uint_as_float(more[i].w);
    }
    from += 4 * 2 * kPart<Tile>, left -= 4;
    load(left);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = row_tile * 16 + lane / 4 + i / 2 * 8, token = tokens + lane % 4 * 2 + i % 2;
    if (n < p.n && token < p.m) store_y<Act>(p, n, token, sum[i], p.factor[i / 2]);
  }
}

}  // namespace lowbit
