// y of a tile by way of shared memory, so that whole lines of it are written: a warpgroup's 64 rows of W are 128 bytes
// of each token.
//
// Why: a store straight from the sums of wgmma writes 16 bytes of each of 8 tokens, and takes as long as 8 lines.
//
//   of a warpgroup   [2 buffers][pair of columns][16 tokens][128 bytes]
//                    8 rows of W, 16 bytes, lie at place ^ token % 8
//
// The end of a task runs once, so that instructions are not at hand: each takes some five cycles, and the tensor cores
// wait for most of them. So there are few (docs/notes/gemm-sm90-versions.md, version 107).
//
// From 144 tokens on they have a place of their own (large.cuh); of 64 to 128 they lie where stages were: the last one
// of the task, which is given back only then (wide.cuh), or the ring of a block that has one task (shared_rows.cuh).
#pragma once
#include "../epilogue.cuh"
#include "../parts.cuh"
#include "../ptx/async.cuh"

namespace lowbit::gemm_sm90 {

// Pairs: of columns, in a buffer.
template <int Pairs>
struct Lines {
  static constexpr int kTokens = 16, kPair = kTokens * 128;  // of two columns, and their bytes
  static constexpr int kPairs = Pairs, kBuffer = kPairs * kPair;
  static constexpr int kBytes = 2 * 2 * kBuffer;          // of both warpgroups
  static constexpr int kFirstBarrier = 3;                 // one for each warpgroup, after those of Turns
  static constexpr int kBothBarrier = kFirstBarrier + 2;  // of both
};

// Where a tile's stages were there is room enough.
using LinesOfStages = Lines<2>;

// Whether y lies so that it can be written in pieces of 16 bytes.
inline bool has_lines(const MatmulArgs& args) {
  return reinterpret_cast<uintptr_t>(args.y.data) % 16 == 0 && args.w.n % 8 == 0 &&
         (args.x.m == 1 || args.y.row_stride % 8 == 0);
}

// Where a warpgroup stores y of its 64 rows from n on and of a tile's tokens from `token` on, and what sums of them
// still need, as RowsOfY for those of a warp (parts.cuh). memory: of Lines, nothing else is there any more when y is
// stored.
template <class Act, class Tile, class Lines, class Problem>
struct LinesOfY {
  static_assert(Tile::kColumns % 2 == 0);
  const Problem& p;
  const int place, reads, row, barrier;  // of the 16 bytes that a lane writes: row n + 8 * place of token `reads`
  int left;                              // tokens that are there
  uint32_t to, from;  // in a buffer: where this lane's row of a matrix goes, and where its piece of y comes from
  uintptr_t y;        // where that goes
  float bias[2], factor[2];

  __device__ LinesOfY(const Problem& problem, uint32_t memory, int n, int token, int warp, int lane)
      : p(problem),
        place(lane % 8),
        reads(warp % 4 * 4 + lane / 8),
        row(n + 8 * place),
        barrier(Lines::kFirstBarrier + warp / 4),
        left(min(problem.tile_tokens, problem.m - token)),
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
    const uint32_t own_memory = memory + warp / 4 * 2 * Lines::kBuffer;
    to = own_memory + turned * 128 + ((2 * (warp % 4) + half) ^ lane % 8) * 16;
    from = own_memory + reads * 128 + (place ^ reads % 8) * 16;
    y = reinterpret_cast<uintptr_t>(static_cast<Act*>(p.y) + (token + reads) * p.y_stride + row);
    ptx::hold(left), ptx::hold(to), ptx::hold(from), ptx::hold(y);
#pragma unroll
    for (int h = 0; h < 2; ++h) ptx::hold(bias[h]), ptx::hold(factor[h]);
  }

  // From now on sums are counted in units: of each row half one.
  __device__ __forceinline__ void count_in(const float (&unit)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[h] *= unit[h];
  }

  // Of columns that have a bit in `own`, which come in pairs. sums(column, i): of row half i / 2, token i % 2. Pairs of
  // columns are 0, 1, 2... of the tile, or `first` and every Apart-th after it.
  template <int Apart = 1, class Sums>
  __device__ __forceinline__ void store(const Sums& sums, uint32_t own = ~0u, int first = 0) const {
    constexpr int kPairs = Tile::kColumns / 2 / Apart, kApart = Lines::kTokens * Apart;
    // Bits of pairs that begin so many tokens after the first or earlier.
    const auto begin_before = [&](int tokens) {
      const int count = max(tokens + kApart - 1, 0) / kApart;
      return count < 16 ? (1u << 2 * count) - 1 : ~0u;
    };
    const int after_first = left - Lines::kTokens * first;
    // Why a shuffle: bits in a register are looked at by one instruction, in a uniform one by two.
    own = __shfl_sync(~0u, own & begin_before(after_first), 0);
    const uint32_t mine = row < p.n ? own & begin_before(after_first - reads) : 0;  // what this lane writes
    const int64_t apart = kApart * p.y_stride * static_cast<int64_t>(sizeof(Act));
    uintptr_t y = this->y + Lines::kTokens * first * p.y_stride * static_cast<int64_t>(sizeof(Act));
    if (!p.lines) {
      store_ragged<kPairs>(y, apart, sums, own, mine);
      return;
    }
    uint32_t to = this->to, from = this->from;
    const uint32_t both_to = 2 * to + Lines::kBuffer, both_from = 2 * from + Lines::kBuffer;  // of both buffers
#pragma unroll
    for (int begin = 0; begin < kPairs; begin += Lines::kPairs) {
      const int end = begin + Lines::kPairs < kPairs ? begin + Lines::kPairs : kPairs;
      if (own >> 2 * begin & ((1u << 2 * Lines::kPairs) - 1)) {
#pragma unroll
        for (int pair = begin; pair < end; ++pair)
          put(to + (pair - begin) * Lines::kPair, [&](int i) { return sums(2 * pair + i / 4, i % 4); });
        // Why one barrier: whoever writes to this buffer again has passed the one for the other buffer in between, or,
        // in another task, that of a turn; without turns all warps have given the place back before it is filled again.
        ptx::wait_at_barrier<128>(barrier);
#pragma unroll
        for (int pair = begin; pair < end; ++pair) {
          if (!(mine >> 2 * pair & 1)) continue;
          uint4 eight;
          ptx::load_shared(from + (pair - begin) * Lines::kPair, eight.x, eight.y, eight.z, eight.w);
          ptx::store_global(reinterpret_cast<void*>(y + (pair - begin) * apart), eight);
        }
        to = both_to - to, from = both_from - from;
      }
      y += (end - begin) * apart;
    }
  }

 private:
  // Puts y of two columns to a pair's place; sum(i): i / 4: column, i % 4 as above.
  template <class Sum>
  __device__ __forceinline__ void put(uint32_t at, const Sum& sum) const {
    uint32_t values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i % 2, own = i / 2 * 4 + 2 * h;
      values[i] = pack_pair<Act>(fmaf(sum(own), factor[h], bias[h]), fmaf(sum(own + 1), factor[h], bias[h]));
    }
    ptx::store_matrices_turned(at, values);
  }

  // The same where y can't be written in pieces of 16 bytes: one value at a time. Why a loop that moves all sums on:
  // hardly anyone has such y, and code for each pair would stand in the way of the one above.
  template <int Pairs, class Sums>
  __device__ __forceinline__ void store_ragged(uintptr_t y, int64_t apart, const Sums& sums, uint32_t own,
                                               uint32_t mine) const {
    float each[8 * Pairs];
#pragma unroll
    for (int i = 0; i < 8 * Pairs; ++i) each[i] = sums(i / 4, i % 4);
#pragma unroll 1
    for (int pair = 0; pair < Pairs; ++pair, own >>= 2, mine >>= 2, y += apart) {
      if (own & 1) {
        put(to, [&](int i) { return each[i]; });
        ptx::wait_at_barrier<128>(barrier);
#pragma unroll 1
        for (int i = 0; (mine & 1) && i < 8 && row + i < p.n; ++i) {
          const uint32_t two = ptx::load_shared(from + i / 2 * 4);
          reinterpret_cast<uint16_t*>(y)[i] = static_cast<uint16_t>(i % 2 ? two >> 16 : two);
        }
        ptx::wait_at_barrier<128>(barrier);
      }
#pragma unroll
      for (int i = 0; i < 8 * (Pairs - 1); ++i) each[i] = each[i + 8];
    }
  }
};

// By which of the two a tile stores y. Together: columns_together; n: first row of the warpgroup, token: first one of
// the tile; warp: of the block.
template <class Act, class Tile, int Together, class Problem>
__device__ __forceinline__ auto rows_of_y(const Problem& p, uint32_t memory, int n, int token, int warp, int lane) {
  if constexpr (Together > 1) {
    return LinesOfY<Act, Tile, LinesOfStages, Problem>(p, memory, n, token, warp, lane);
  } else {
    return RowsOfY<Act, Tile, Problem>(p, n + warp % 4 * 16, token, lane);
  }
}

}  // namespace lowbit::gemm_sm90
