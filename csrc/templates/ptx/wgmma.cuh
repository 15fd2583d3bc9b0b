// wgmma: 64 rows of the weight in the registers of a warpgroup x tokens in shared memory, over 16 k (sm_90a alone).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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

// sum[4j + 2h + i] += row g + 8h of the warp's 16 x token 8j + 2t + i, for lane 4g + t; a as in mma. add: or = instead.
template <class Act, int Tokens>
__device__ __forceinline__ void wgmma(float (&sum)[Tokens / 2], const uint32_t (&a)[4], uint64_t tokens, int add = 1);

// Sums of products that have been waited for are read after this. Why: the compiler knows only that it may not move
// memory accesses over the wait, not what it is for.
template <int Count>
__device__ __forceinline__ void settle(float (&sum)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#define LOWBIT_SUMS_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define LOWBIT_SUMS_16(i) LOWBIT_SUMS_4(i), LOWBIT_SUMS_4(i + 4), LOWBIT_SUMS_4(i + 8), LOWBIT_SUMS_4(i + 12)
#define LOWBIT_LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LOWBIT_LIST_24 LOWBIT_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LOWBIT_LIST_32 LOWBIT_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LOWBIT_LIST_48 LOWBIT_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LOWBIT_LIST_64 LOWBIT_LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LOWBIT_LIST_72 LOWBIT_LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LOWBIT_LIST_80 LOWBIT_LIST_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LOWBIT_LIST_96 LOWBIT_LIST_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LOWBIT_LIST_104 LOWBIT_LIST_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define LOWBIT_LIST_128                                                                                            \
  LOWBIT_LIST_104                                                                                                  \
  ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
  "%122, %123, %124, %125, %126, %127"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LOWBIT_PRODUCT(tokens_, type, list, a0, a1, a2, a3, b, add_, ...)                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.s32 add, %" add_ ", 0;\nwgmma.mma_async.sync.aligned.m64n" tokens_ \
               "k16.f32." type "." type " {" list "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b               \
               ", add, 1, 1, 0;\n}\n"                                                                          \
               : __VA_ARGS__                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(add))
#else
#define LOWBIT_PRODUCT(...)
#endif
#define LOWBIT_PRODUCTS(act, type)                                                                                     \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 32>(float (&sum)[16], const uint32_t (&a)[4], uint64_t tokens, int add) { \
    LOWBIT_PRODUCT("32", type, LOWBIT_LIST_16, "16", "17", "18", "19", "20", "21", LOWBIT_SUMS_16(0));                 \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 48>(float (&sum)[24], const uint32_t (&a)[4], uint64_t tokens, int add) { \
    LOWBIT_PRODUCT("48", type, LOWBIT_LIST_24, "24", "25", "26", "27", "28", "29", LOWBIT_SUMS_16(0),                  \
                   LOWBIT_SUMS_4(16), LOWBIT_SUMS_4(20));                                                              \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 64>(float (&sum)[32], const uint32_t (&a)[4], uint64_t tokens, int add) { \
    LOWBIT_PRODUCT("64", type, LOWBIT_LIST_32, "32", "33", "34", "35", "36", "37", LOWBIT_SUMS_16(0),                  \
                   LOWBIT_SUMS_16(16));                                                                                \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 96>(float (&sum)[48], const uint32_t (&a)[4], uint64_t tokens, int add) { \
    LOWBIT_PRODUCT("96", type, LOWBIT_LIST_48, "48", "49", "50", "51", "52", "53", LOWBIT_SUMS_16(0),                  \
                   LOWBIT_SUMS_16(16), LOWBIT_SUMS_16(32));                                                            \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 128>(float (&sum)[64], const uint32_t (&a)[4], uint64_t tokens,           \
                                                  int add) {                                                           \
    LOWBIT_PRODUCT("128", type, LOWBIT_LIST_64, "64", "65", "66", "67", "68", "69", LOWBIT_SUMS_16(0),                 \
                   LOWBIT_SUMS_16(16), LOWBIT_SUMS_16(32), LOWBIT_SUMS_16(48));                                        \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 144>(float (&sum)[72], const uint32_t (&a)[4], uint64_t tokens,           \
                                                  int add) {                                                           \
    LOWBIT_PRODUCT("144", type, LOWBIT_LIST_72, "72", "73", "74", "75", "76", "77", LOWBIT_SUMS_16(0),                 \
                   LOWBIT_SUMS_16(16), LOWBIT_SUMS_16(32), LOWBIT_SUMS_16(48), LOWBIT_SUMS_4(64), LOWBIT_SUMS_4(68));  \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 160>(float (&sum)[80], const uint32_t (&a)[4], uint64_t tokens,           \
                                                  int add) {                                                           \
    LOWBIT_PRODUCT("160", type, LOWBIT_LIST_80, "80", "81", "82", "83", "84", "85", LOWBIT_SUMS_16(0),                 \
                   LOWBIT_SUMS_16(16), LOWBIT_SUMS_16(32), LOWBIT_SUMS_16(48), LOWBIT_SUMS_16(64));                    \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 192>(float (&sum)[96], const uint32_t (&a)[4], uint64_t tokens,           \
                                                  int add) {                                                           \
    LOWBIT_PRODUCT("192", type, LOWBIT_LIST_96, "96", "97", "98", "99", "100", "101", LOWBIT_SUMS_16(0),               \
                   LOWBIT_SUMS_16(16), LOWBIT_SUMS_16(32), LOWBIT_SUMS_16(48), LOWBIT_SUMS_16(64),                     \
                   LOWBIT_SUMS_16(80));                                                                                \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 208>(float (&sum)[104], const uint32_t (&a)[4], uint64_t tokens,          \
                                                  int add) {                                                           \
    LOWBIT_PRODUCT("208", type, LOWBIT_LIST_104, "104", "105", "106", "107", "108", "109", LOWBIT_SUMS_16(0),          \
                   LOWBIT_SUMS_16(16), LOWBIT_SUMS_16(32), LOWBIT_SUMS_16(48), LOWBIT_SUMS_16(64), LOWBIT_SUMS_16(80), \
                   LOWBIT_SUMS_4(96), LOWBIT_SUMS_4(100));                                                             \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<act, 256>(float (&sum)[128], const uint32_t (&a)[4], uint64_t tokens,          \
                                                  int add) {                                                           \
    LOWBIT_PRODUCT("256", type, LOWBIT_LIST_128, "128", "129", "130", "131", "132", "133", LOWBIT_SUMS_16(0),          \
                   LOWBIT_SUMS_16(16), LOWBIT_SUMS_16(32), LOWBIT_SUMS_16(48), LOWBIT_SUMS_16(64), LOWBIT_SUMS_16(80), \
                   LOWBIT_SUMS_16(96), LOWBIT_SUMS_16(112));                                                           \
  }
LOWBIT_PRODUCTS(__half, "f16")
LOWBIT_PRODUCTS(__nv_bfloat16, "bf16")

#undef LOWBIT_PRODUCTS
#undef LOWBIT_PRODUCT
#undef LOWBIT_LIST_128
#undef LOWBIT_LIST_104
#undef LOWBIT_LIST_96
#undef LOWBIT_LIST_80
#undef LOWBIT_LIST_72
#undef LOWBIT_LIST_64
#undef LOWBIT_LIST_48
#undef LOWBIT_LIST_32
#undef LOWBIT_LIST_24
#undef LOWBIT_LIST_16
#undef LOWBIT_SUMS_16
#undef LOWBIT_SUMS_4
#undef LOWBIT_WGMMA

}  // namespace lowbit::ptx
