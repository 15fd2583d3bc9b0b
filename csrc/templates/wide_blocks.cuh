// In which kinds of blocks tiles of gemm_sm90 with more than 16 tokens come, beside those of a whole multiprocessor
// with 128 rows of W. Such a block has one task, or its part of one.
#pragma once

namespace lowbit {

// Half of a multiprocessor, so that blocks of the next product begin beside. Their threads have 96 registers. Why no
// others: tiles of 48 tokens spill, so do floats of 5 and 6 bits and fine groups with 64 tokens; of more bits a ring is
// too short: int8 with 32 rows, 8192 x 8192 22.7 us, by whole ones 20.0.
constexpr bool has_halves(int tokens, int bits, bool is_float, bool codebook, bool fine) {
  if (codebook) return false;
  return tokens == 32 ? bits <= (is_float ? 4 : 6) : tokens == 64 && bits <= 4 && !fine;
}

// 64 rows, of which the two warpgroups share K (gemm_sm90/shared_rows.cuh): twice as many tasks, so that no two blocks
// need share one. Why no more tokens: x comes twice as often for a weight, and no more than some 48 bytes of it a
// cycle; 8192 x 8192, int4, 128 rows 28.3 us, so 30.6. Nor does multicast help: of pairs of blocks 3 to 8% slower.
// Codebooks of 4 bits have none of 32 tokens, which are 2 to 22% slower than by 128 rows.
constexpr bool shares_rows(int tokens, bool codebook, bool fine) {
  return tokens == 64 || (tokens == 32 && !codebook) || ((tokens == 48 || tokens == 96) && !codebook && !fine);
}

}  // namespace lowbit
