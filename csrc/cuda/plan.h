// Which tile of products is tried first: plain arithmetic, from times measured on an H200.
#pragma once
#include <cstdint>

#include "../templates/deal.cuh"

namespace lowbit::cuda {

// Families of kernels that multiply a packed weight; of tiles of as many tokens, that of the later one is tried first.
enum class Family { kDecode, kGemmSm80, kGemmSm90 };

// Whether a tile is for devices of a compute capability, 90 for 9.0: those of gemm_sm90 by what they need.
constexpr bool is_for(Family family, int tokens, int capability) {
  if (family != Family::kGemmSm90) return capability >= 80;
  return tokens > 16 ? capability == 90 : capability >= 90 && capability < 120;
}

// Whether a tile takes more rows of x than it has tokens.
constexpr bool repeats(Family family, int tokens) {
  return family == Family::kGemmSm80 || (family == Family::kGemmSm90 && tokens > 16);
}

// Microseconds of a product by tiles of 128 or 256 tokens, about: what the busiest block multiplies, and, where tasks
// are in parts, the second kernel and the stores it needs. blocks: workers at once, multiprocessors or pairs of them.
constexpr float large_us(int64_t m, int64_t n, int64_t k, int tokens, int blocks) {
  const int rows = tokens == 256 ? 256 : 128, stages = static_cast<int>((k + 127) / 128);
  const float each = tokens == 256 ? 1.5f : 0.8f;  // 128 k of 256 or 128 rows
  const int64_t tasks = (n + rows - 1) / rows * ((m + tokens - 1) / tokens);
  if (blocks < 1 || tasks > INT32_MAX || int64_t{stages} * blocks > INT32_MAX) return 1e30f;
  const Deal dealt = deal(static_cast<int>(tasks), stages, blocks, true);
  const bool whole = !dealt.in_parts();
  return static_cast<float>(dealt.longest()) * each * (whole ? 1.0f : 1.15f) + (whole           ? 3.0f
                                                                                : tokens == 256 ? 12.0f
                                                                                                : 10.0f);
}

// The tokens that the first tile to try must hold, for a weight [n, k] of `bits` bits: fewer than m where a tile is
// repeated. clusters: of 1 and 2 blocks that run at once.
constexpr int64_t first_tile(int64_t m, int64_t n, int64_t k, int bits, int capability, const int* clusters) {
  if (capability != 90) return m < 128 ? m : 128;  // nothing was measured there
  // Few row tiles have many k: tiles of up to 4 tokens keep all of x in shared memory, and split k too little to fill
  // the device. Measured: up to 25% at 4096 x 14336, 3584 x 14336 and 5120 x 27648 (docs/notes/decode.md).
  if (m > 2 && m <= 4 && n <= 5120 && k >= (bits <= 2 ? 12 : 24) * 1024) return 8;
  if (m == 1 && n <= 5120 && k >= 24 * 1024) return 2;  // 23.1 us, not 25.5, at 5120 x 27648 with 4 bits
  if (m > 128) return large_us(m, n, k, 128, clusters[0]) < large_us(m, n, k, 256, clusters[1]) ? 128 : 256;
  return m;
}

}  // namespace lowbit::cuda
