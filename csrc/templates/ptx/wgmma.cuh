// wgmma: 64 rows of the weight in the registers of a warpgroup x tokens in shared memory, over 64 k, four instructions
// (sm_90a alone).
#pragma once
#include <cstdint>

#include "wgmma_product.cuh"

namespace lowbit::ptx {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LOWBIT_WGMMA(text) asm volatile(text::: "memory")
#else
#define LOWBIT_WGMMA(text)
#endif

// Gives registers of all warps of a warpgroup back, or takes them, so that each thread has Count.
template <int Count>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Count));
#endif
}
template <int Count>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Count));
#endif
}

// Registers that products read or add to were written before.
__device__ __forceinline__ void begin_products() { LOWBIT_WGMMA("wgmma.fence.sync.aligned;\n"); }
// Ends a group of products.
__device__ __forceinline__ void commit_products() { LOWBIT_WGMMA("wgmma.commit_group.sync.aligned;\n"); }
// Returns when at most Pending of the newest groups still run; registers of all others are free.
template <int Pending>
__device__ __forceinline__ void wait_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
#endif
}

// x in shared memory as the copy engine writes it with a swizzle of 128 bytes: 64 k of a token in a row of 128 bytes,
// 8 tokens in 1024, where `address` starts, a multiple of that. The next 16 k are 2 further on.
__device__ __forceinline__ uint64_t describe_tokens(uint32_t address) {
  constexpr uint64_t kEightTokens = 1024 >> 4, kSwizzle128 = 1;
  return static_cast<uint64_t>(address >> 4) | uint64_t{1} << 16 | kEightTokens << 32 | kSwizzle128 << 62;
}

// sum[4j + 2h + i] += row g + 8h of the warp's 16 x token 8j + 2t + i, for lane 4g + t, over 64 k; a[f]: of 16 k as in
// mma. add: or = instead. Sums beyond those of Tokens stay.
template <class Act, int Tokens, int Count>
__device__ __forceinline__ void wgmma(float (&sum)[Count], const uint32_t (&a)[4][4], uint64_t tokens, int add = 1) {
  static_assert(Tokens <= 2 * Count);
  Product<Act, Tokens>::run(sum, a, tokens, add);
}

// Sums of products that have been waited for are read after this. Why: the compiler knows only that it may not move
// memory accesses over the wait, not what it is for.
template <int Count>
__device__ __forceinline__ void settle(float (&sum)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#undef LOWBIT_WGMMA

}  // namespace lowbit::ptx
