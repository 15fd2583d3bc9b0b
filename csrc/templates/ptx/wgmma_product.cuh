// wgmma for 64 rows, 64 k and each number of tokens that a kernel multiplies: four instructions (sm_90a alone).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace lowbit::ptx {

// run(sum, a, tokens, add): as wgmma (wgmma.cuh). Why four instructions in one statement: the compiler's time goes by
// operands, of which most are sums.
template <class Act, int Tokens>
struct Product;

// The A operand of 16 k, of which asm says that it is written too.
struct Fragment {
  uint32_t words[4];
  __device__ __forceinline__ explicit Fragment(const uint32_t (&a)[4]) : words{a[0], a[1], a[2], a[3]} {}
  __device__ __forceinline__ uint32_t& operator[](int i) { return words[i]; }
};

// Sums of n tokens as operands of asm: LOWBIT_SUMS_n is what they are in C++, LOWBIT_LIST_n their numbers. Why all
// other operands come before them, and so are written too: sums, of which there are more or less, have the last
// numbers.
#define LOWBIT_SUMS_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define LOWBIT_SUMS_16(i) LOWBIT_SUMS_4(i), LOWBIT_SUMS_4(i + 4), LOWBIT_SUMS_4(i + 8), LOWBIT_SUMS_4(i + 12)
#define LOWBIT_SUMS_32 LOWBIT_SUMS_16(0)
#define LOWBIT_SUMS_48 LOWBIT_SUMS_32, LOWBIT_SUMS_4(16), LOWBIT_SUMS_4(20)
#define LOWBIT_SUMS_64 LOWBIT_SUMS_48, LOWBIT_SUMS_4(24), LOWBIT_SUMS_4(28)
#define LOWBIT_SUMS_96 LOWBIT_SUMS_64, LOWBIT_SUMS_16(32)
#define LOWBIT_SUMS_128 LOWBIT_SUMS_96, LOWBIT_SUMS_16(48)
#define LOWBIT_SUMS_144 LOWBIT_SUMS_128, LOWBIT_SUMS_4(64), LOWBIT_SUMS_4(68)
#define LOWBIT_SUMS_160 LOWBIT_SUMS_144, LOWBIT_SUMS_4(72), LOWBIT_SUMS_4(76)
#define LOWBIT_SUMS_192 LOWBIT_SUMS_160, LOWBIT_SUMS_16(80)
#define LOWBIT_SUMS_208 LOWBIT_SUMS_192, LOWBIT_SUMS_4(96), LOWBIT_SUMS_4(100)
#define LOWBIT_SUMS_224 LOWBIT_SUMS_208, LOWBIT_SUMS_4(104), LOWBIT_SUMS_4(108)
#define LOWBIT_SUMS_256 LOWBIT_SUMS_224, LOWBIT_SUMS_16(112)
#define LOWBIT_LIST_32 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36"
#define LOWBIT_LIST_48 LOWBIT_LIST_32 ", %37, %38, %39, %40, %41, %42, %43, %44"
#define LOWBIT_LIST_64 LOWBIT_LIST_48 ", %45, %46, %47, %48, %49, %50, %51, %52"
#define LOWBIT_LIST_96 LOWBIT_LIST_64 ", %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68"
#define LOWBIT_LIST_128 \
  LOWBIT_LIST_96 ", %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84"
#define LOWBIT_LIST_144 LOWBIT_LIST_128 ", %85, %86, %87, %88, %89, %90, %91, %92"
#define LOWBIT_LIST_160 LOWBIT_LIST_144 ", %93, %94, %95, %96, %97, %98, %99, %100"
#define LOWBIT_LIST_192 \
  LOWBIT_LIST_160 ", %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116"
#define LOWBIT_LIST_208 LOWBIT_LIST_192 ", %117, %118, %119, %120, %121, %122, %123, %124"
#define LOWBIT_LIST_224 LOWBIT_LIST_208 ", %125, %126, %127, %128, %129, %130, %131, %132"
#define LOWBIT_LIST_256 \
  LOWBIT_LIST_224 ", %133, %134, %135, %136, %137, %138, %139, %140, %141, %142, %143, %144, %145, %146, %147, %148"
#define LOWBIT_FRAGMENT(f) "+r"(a##f[0]), "+r"(a##f[1]), "+r"(a##f[2]), "+r"(a##f[3])
#define LOWBIT_ONE(name, a, x, add) name ", {" a "}, " x ", " add ", 1, 1, 0;\n"
// name: the instruction and its sums.
#define LOWBIT_FOUR(name)                                                                     \
  "{\n.reg .pred add, more;\nsetp.ne.s32 add, %20, 0;\nsetp.eq.s32 more, 0, 0;\n" LOWBIT_ONE( \
      name, "%0, %1, %2, %3", "%16", "add") LOWBIT_ONE(name, "%4, %5, %6, %7", "%17", "more") \
      LOWBIT_ONE(name, "%8, %9, %10, %11", "%18", "more") LOWBIT_ONE(name, "%12, %13, %14, %15", "%19", "more") "}\n"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LOWBIT_ASM(n, type)                                                                                          \
  Fragment a0(a[0]), a1(a[1]), a2(a[2]), a3(a[3]);                                                                   \
  uint64_t x1 = tokens + 2, x2 = tokens + 4, x3 = tokens + 6;                                                        \
  asm volatile(LOWBIT_FOUR("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" LOWBIT_LIST_##n "}") \
               : LOWBIT_FRAGMENT(0), LOWBIT_FRAGMENT(1), LOWBIT_FRAGMENT(2), LOWBIT_FRAGMENT(3), "+l"(tokens),       \
                 "+l"(x1), "+l"(x2), "+l"(x3), "+r"(add), LOWBIT_SUMS_##n)
#else
#define LOWBIT_ASM(n, type)
#endif
#define LOWBIT_PRODUCT(act, type, n)                                                                              \
  template <>                                                                                                     \
  struct Product<act, n> {                                                                                        \
    static __device__ __forceinline__ void run(float* sum, const uint32_t (&a)[4][4], uint64_t tokens, int add) { \
      LOWBIT_ASM(n, type);                                                                                        \
    }                                                                                                             \
  };
#define LOWBIT_PRODUCTS(n) LOWBIT_PRODUCT(__half, "f16", n) LOWBIT_PRODUCT(__nv_bfloat16, "bf16", n)
LOWBIT_PRODUCTS(32)
LOWBIT_PRODUCTS(48)
LOWBIT_PRODUCTS(64)
LOWBIT_PRODUCTS(96)
LOWBIT_PRODUCTS(128)
LOWBIT_PRODUCTS(144)
LOWBIT_PRODUCTS(160)
LOWBIT_PRODUCTS(192)
LOWBIT_PRODUCTS(208)
LOWBIT_PRODUCTS(224)
LOWBIT_PRODUCTS(256)

#undef LOWBIT_PRODUCTS
#undef LOWBIT_PRODUCT
#undef LOWBIT_ASM
#undef LOWBIT_FOUR
#undef LOWBIT_ONE
#undef LOWBIT_FRAGMENT
#undef LOWBIT_LIST_256
#undef LOWBIT_LIST_224
#undef LOWBIT_LIST_208
#undef LOWBIT_LIST_192
#undef LOWBIT_LIST_160
#undef LOWBIT_LIST_144
#undef LOWBIT_LIST_128
#undef LOWBIT_LIST_96
#undef LOWBIT_LIST_64
#undef LOWBIT_LIST_48
#undef LOWBIT_LIST_32
#undef LOWBIT_SUMS_256
#undef LOWBIT_SUMS_224
#undef LOWBIT_SUMS_208
#undef LOWBIT_SUMS_192
#undef LOWBIT_SUMS_160
#undef LOWBIT_SUMS_144
#undef LOWBIT_SUMS_128
#undef LOWBIT_SUMS_96
#undef LOWBIT_SUMS_64
#undef LOWBIT_SUMS_48
#undef LOWBIT_SUMS_32
#undef LOWBIT_SUMS_16
#undef LOWBIT_SUMS_4

}  // namespace lowbit::ptx
