// Which tiles of gemm_sm90 with more than 16 tokens also have kernels whose blocks take half of a multiprocessor, so
// that those of the next product begin beside. Their threads have 96 registers, and a block has one task, or its part
// of one. Why no others: tiles of 48 tokens spill, so do floats of 5 and 6 bits and fine groups with 64 tokens; of
// more bits a ring is too short: int8 with 32 rows, 8192 x 8192 22.7 us, by whole ones 20.0.
#pragma once

namespace lowbit {

constexpr bool has_halves(int tokens, int bits, bool is_float, bool codebook, bool fine) {
  if (codebook) return false;
  return tokens == 32 ? bits <= (is_float ? 4 : 6) : tokens == 64 && bits <= 4 && !fine;
}

// Which have kernels whose two warpgroups share K of 64 rows (gemm_sm90/shared_rows.cuh).
constexpr bool shares_rows(int tokens, int bits, bool is_float, bool codebook, bool fine) {
  return (tokens == 64 || tokens == 96) && !is_float && !codebook && !fine && bits <= 8;
}

}  // namespace lowbit
