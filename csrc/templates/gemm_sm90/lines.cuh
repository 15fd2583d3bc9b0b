// y of a tile by way of shared memory, so that whole lines of it are written: a warpgroup's 64 rows of W are 128 bytes
// of each token.
//
// Why: a store straight from the sums of wgmma writes 16 bytes of each of 8 tokens, and takes as long as 8 lines.
//
//   of a warpgroup   [2 buffers][16 tokens][128 bytes]; 8 rows of W, 16 bytes, lie at place ^ token % 8
//
// From 144 tokens on they have a place of their own (large.cuh); of 64 to 128 they lie where stages were: the last one
// of the task, which is given back only then (wide.cuh), or the ring of a block that has one task (shared_rows.cuh).
#pragma once
#include <cstring>

#include "../epilogue.cuh"
#include "../parts.cuh"
#include "../ptx/async.cuh"

namespace lowbit::gemm_sm90 {

struct Lines {
  static constexpr int kTokens = 16, kBuffer = kTokens * 128;  // bytes of a buffer
  static constexpr int kBytes = 2 * 2 * kBuffer;               // of both warpgroups
  static constexpr int kFirstBarrier = 3;                      // one for each warpgroup, after those of Turns
  static constexpr int kBothBarrier = kFirstBarrier + 2;       // of both
};

// Whether y lies so that it can be written in pieces of 16 bytes.
inline bool has_lines(const MatmulArgs& args) {
  return reinterpret_cast<uintptr_t>(args.y.data) % 16 == 0 && args.w.n % 8 == 0 &&
         (args.x.m == 1 || args.y.row_stride % 8 == 0);
}

// Where a warpgroup stores y of its 64 rows from n on, and what sums of them still need, as RowsOfY for those of a warp
// (parts.cuh). memory: of Lines, nothing else is there any more.
template <class Act, class Tile, class Problem>
struct LinesOfY {
  static_assert(Tile::kColumns % 2 == 0);
  const Problem& p;
  const int place, reads, row, barrier;  // of the 16 bytes that a lane writes: row n + 8 * place of token `reads`
  const uint32_t buffers;
  uint32_t to;
  float bias[2], factor[2];

  __device__ LinesOfY(const Problem& problem, uint32_t memory, int n, int warp, int lane)
      : p(problem),
        place(lane % 8),
        reads(warp % 4 * 4 + lane / 8),
        row(n + 8 * place),
        barrier(Lines::kFirstBarrier + warp / 4),
        buffers(memory + warp / 4 * 2 * Lines::kBuffer),
        bias{},
        factor{problem.factor[0], problem.factor[1]} {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = n + 16 * (warp % 4) + 8 * h + lane / 4;
      if (own >= p.n) continue;
      if (p.bias) bias[h] = load_bias(p.bias, p.bias_type, own);
      factor[h] = row_factor(p, own, factor[h]);
    }
    // Lanes 8i to 8i + 7 say where the rows of matrix i go once it is turned: tokens; i: row half, and which of two
    // columns.
    const int half = lane / 8 % 2, turned = lane / 16 * 8 + lane % 8;
    to = turned * 128 + ((2 * (warp % 4) + half) ^ lane % 8) * 16;
  }

  // Tokens of a tile from `token` on, of columns that have a bit in `own`, which come in pairs. sums(column, i): of row
  // half i / 2, token i % 2. Pairs of columns are 0, 1, 2... of the tile, or `first` and every Apart-th after it.
  template <int Apart = 1, class Sums>
  __device__ __forceinline__ void store(int token, const Sums& sums, uint32_t own = ~0u, int first = 0) const {
    Act* const y = static_cast<Act*>(p.y) + (token + reads) * p.y_stride + row;
    const uint32_t from = reads * 128 + (place ^ reads % 8) * 16;
    uint32_t buffer = buffers;
#pragma unroll
    for (int pair = 0; pair < Tile::kColumns / 2 / Apart; ++pair) {
      const int tokens = Lines::kTokens * (Apart * pair + first);  // before it
      if (tokens >= p.tile_tokens || token + tokens >= p.m) break;
      if (!(own >> 2 * pair & 1)) continue;
      uint32_t values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i % 2, column = 2 * pair + i / 2;
        values[i] = pack_pair<Act>(fmaf(sums(column, 2 * h), factor[h], bias[h]),
                                   fmaf(sums(column, 2 * h + 1), factor[h], bias[h]));
      }
      ptx::store_matrices_turned(buffer + to, values);
      // Why one barrier: whoever writes to this buffer again has passed the one for the other buffer in between, or, in
      // another task, that of a turn.
      ptx::wait_at_barrier<128>(barrier);
      if (tokens + reads < p.tile_tokens && token + tokens + reads < p.m) write(y + tokens * p.y_stride, buffer + from);
      buffer = 2 * buffers + Lines::kBuffer - buffer;  // the other one
    }
  }

 private:
  __device__ __forceinline__ void write(Act* y, uint32_t from) const {
    uint4 eight;
    ptx::load_shared(from, eight.x, eight.y, eight.z, eight.w);
    if (p.lines) {
      if (row < p.n) *reinterpret_cast<uint4*>(y) = eight;
      return;
    }
    Act each[8];
    std::memcpy(each, &eight, sizeof(eight));
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (row + i < p.n) y[i] = each[i];
  }
};

// By which of the two a tile stores y. Together: columns_together; n: first row of the warpgroup; warp: of the block.
template <class Act, class Tile, int Together, class Problem>
__device__ __forceinline__ auto rows_of_y(const Problem& p, uint32_t memory, int n, int warp, int lane) {
  if constexpr (Together > 1) {
    return LinesOfY<Act, Tile, Problem>(p, memory, n, warp, lane);
  } else {
    return RowsOfY<Act, Tile, Problem>(p, n + warp % 4 * 16, lane);
  }
}

}  // namespace lowbit::gemm_sm90
