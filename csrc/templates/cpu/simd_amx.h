// AVX-512 with matrix tiles (AMX-INT8, AMX-BF16): Sapphire Rapids and newer.
//
// Contract: as simd_avx512.h. Tile registers belong to the thread; whoever configures them releases them (tiles.h).
#pragma once
#include "simd_avx512.h"
#define LOWBIT_ISA_TILES 1

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

// Why asm: the compilers' intrinsics want literal tile numbers, which a template argument is not.
struct Tiles {
  static constexpr int kMost = 16;  // rows of a tile; a row has 64 bytes

  // The eight tiles of one palette: C tiles first, then A, then B.
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  LOWBIT_INLINE void configure(const Config& c) { asm volatile("ldtilecfg %0" ::"m"(c)); }
  LOWBIT_INLINE void release() { asm volatile("tilerelease" ::); }
  template <int T>
  LOWBIT_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  LOWBIT_INLINE void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  LOWBIT_INLINE void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  // C += A (signed bytes, tokens x k) times B (signed bytes, k x rows), exact in int32.
  template <int C, int A, int B>
  LOWBIT_INLINE void dot(int8_t) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // The same for bfloat16 pairs, summed in fp32.
  template <int C, int A, int B>
  LOWBIT_INLINE void dot(uint16_t) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
