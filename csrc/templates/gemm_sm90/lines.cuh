// y of a tile by way of shared memory, so that whole lines of it are written: a warpgroup's 64 rows of W are 128 bytes
// of each token.
//
// Why: a store straight from the sums of wgmma writes 16 bytes of each of 8 tokens, and takes as long as 8 lines.
//
//   of a warpgroup   [2 buffers][16 tokens][128 bytes]; 8 rows of W, 16 bytes, lie at place ^ token % 8
#pragma once
#include "../epilogue.cuh"
#include "../parts.cuh"
#include "../ptx/async.cuh"

namespace lowbit::gemm_sm90 {

struct Lines {
  static constexpr int kTokens = 16, kBuffer = kTokens * 128;  // bytes of a buffer
  static constexpr int kBytes = 2 * 2 * kBuffer;               // of both warpgroups
  static constexpr int kFirstBarrier = 3;                      // one for each warpgroup, after those of Turns
};

// Whether y lies so that it can be written in pieces of 16 bytes.
inline bool has_lines(const MatmulArgs& args) {
  return reinterpret_cast<uintptr_t>(args.y.data) % 16 == 0 && args.w.n % 8 == 0 &&
         (args.x.m == 1 || args.y.row_stride % 8 == 0);
}

// These are all sums of a task: of the warpgroup's rows from n on, and the tokens of a tile from `token` on; sums as
// for store_rows, in columns that have a bit in `own`, which come in pairs. memory: of Lines. warp: of the block.
template <class Act, class Tile, class Problem, class Sums>
__device__ __forceinline__ void store_lines(const Problem& p, uint32_t memory, int n, int token, int warp, int lane,
                                            const Sums& sums, uint32_t own = ~0u) {
  static_assert(Tile::kColumns % 2 == 0);
  const int group = warp / 4, quarter = warp % 4;
  const uint32_t buffers = memory + group * 2 * Lines::kBuffer;
  uint32_t buffer = buffers;
  float bias[2] = {}, factor[2] = {p.factor[0], p.factor[1]};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = n + 16 * quarter + 8 * h + lane / 4;
    if (row >= p.n) continue;
    if (p.bias) bias[h] = load_bias(p.bias, p.bias_type, row);
    factor[h] = row_factor(p, row, factor[h]);
  }
  // Lanes 8i to 8i + 7 say where the rows of matrix i go once it is turned: tokens; i: row half, and which of two
  // columns.
  const int half = lane / 8 % 2, turned = lane / 16 * 8 + lane % 8;
  const uint32_t to = turned * 128 + ((2 * quarter + half) ^ lane % 8) * 16;
  // What a lane reads again: 16 bytes of a token.
  const int place = lane % 8, reads = quarter * 4 + lane / 8;
  const uint32_t from = reads * 128 + (place ^ reads % 8) * 16;
  Act* y = static_cast<Act*>(p.y) + (token + reads) * p.y_stride + n + 8 * place;
#pragma unroll
  for (int first = 0; first < Tile::kTokens; first += Lines::kTokens) {
    if (first >= p.tile_tokens || token + first >= p.m) break;
    if (!(own >> first / 8 & 1)) continue;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i % 2, of = first / 8 + i / 2;
      pairs[i] =
          pack_pair<Act>(fmaf(sums(of, 2 * h), factor[h], bias[h]), fmaf(sums(of, 2 * h + 1), factor[h], bias[h]));
    }
    ptx::store_matrices_turned(buffer + to, pairs);
    // Why one barrier: whoever writes to this buffer again has passed the one for the other buffer in between, or, in
    // another task, that of a turn.
    ptx::wait_at_barrier<128>(Lines::kFirstBarrier + group);
    uint4 values;
    ptx::load_shared(buffer + from, values.x, values.y, values.z, values.w);
    if (first + reads < p.tile_tokens && token + first + reads < p.m && n + 8 * place < p.n)
      *reinterpret_cast<uint4*>(y + first * p.y_stride) = values;
    buffer = 2 * buffers + Lines::kBuffer - buffer;  // the other one
  }
}

}  // namespace lowbit::gemm_sm90
