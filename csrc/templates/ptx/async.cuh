// Instructions of the memory pipeline: asynchronous copies to shared memory, matrix loads, programmatic launches.
//
// All of them are volatile with a memory clobber: their order among each other is the meaning of a kernel.
#pragma once
#include <cstdint>

namespace lowbit::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// blockIdx.x, threadIdx.x. Why volatile: what follows from them is found once more, not kept in registers meanwhile.
__device__ __forceinline__ int block_again() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(index));
  return index;
}

__device__ __forceinline__ int thread_again() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}

// The compiler takes an address for a number like any other: what is added to it later is added to it as a whole. Why:
// it would add parts of it that are the same for all threads anew to every copy.
__device__ __forceinline__ void keep_apart(const uint8_t*& address) { asm("" : "+l"(address)); }

// 16 bytes from global to shared memory, past L1. Why not ld.global: a register per 4 bytes in flight is too dear. Why
// not a bulk copy: those of different lanes are issued one after the other, and sm_80 has none.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}

// The same for the first `bytes` of 16; the others become 0.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// One of a block's barriers by number, from 1: Threads threads, some of which may only arrive.
template <int Threads>
__device__ __forceinline__ void wait_at_barrier(int number) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(number), "n"(Threads) : "memory");
}
template <int Threads>
__device__ __forceinline__ void arrive_at_barrier(int number) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(number), "n"(Threads) : "memory");
}

// 1 / a, off by one unit in the last place at most; infinite for subnormal numbers, 0 from 2^126 on. Why volatile: the
// compiler would branch around it.
__device__ __forceinline__ float reciprocal(float a) {
  float inverse;
  asm volatile("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(inverse) : "f"(a));
  return inverse;
}

// A barrier in shared memory that counts arrivals; a thread's own comes when all copies have that it has issued.
__device__ __forceinline__ void arrivals_init(uint32_t barrier, int threads) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}\n" ::"r"(barrier)
      : "memory");
}
__device__ __forceinline__ void wait_arrivals(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
      "@!done bra retry;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// 16 bytes of x. Why volatile and not __ldg: it must stay below the wait for the previous kernel.
__device__ __forceinline__ uint4 load_x(const void* from) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ uint32_t load_x_4(const void* from) {
  uint32_t x;
  asm volatile("ld.global.u32 %0, [%1];\n" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// Four times 16 bytes that lie Stride bytes apart; of those from `count` on, 0. Why one statement: the compiler would
// wait for some of them before it asks for the others, to save registers.
template <int Stride>
__device__ __forceinline__ void load_four(const void* from, int count, uint4 (&to)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = {0, 0, 0, 0};
  asm volatile(
      "{\n"
      ".reg .pred one, two, three, four;\n"
      "setp.gt.s32 one, %17, 0;\n"
      "setp.gt.s32 two, %17, 1;\n"
      "setp.gt.s32 three, %17, 2;\n"
      "setp.gt.s32 four, %17, 3;\n"
      "@one ld.global.v4.u32 {%0, %1, %2, %3}, [%16];\n"
      "@two ld.global.v4.u32 {%4, %5, %6, %7}, [%16+%18];\n"
      "@three ld.global.v4.u32 {%8, %9, %10, %11}, [%16+%19];\n"
      "@four ld.global.v4.u32 {%12, %13, %14, %15}, [%16+%20];\n"
      "}\n"
      : "+r"(to[0].x), "+r"(to[0].y), "+r"(to[0].z), "+r"(to[0].w), "+r"(to[1].x), "+r"(to[1].y), "+r"(to[1].z),
        "+r"(to[1].w), "+r"(to[2].x), "+r"(to[2].y), "+r"(to[2].z), "+r"(to[2].w), "+r"(to[3].x), "+r"(to[3].y),
        "+r"(to[3].z), "+r"(to[3].w)
      : "l"(from), "r"(count), "n"(Stride), "n"(2 * Stride), "n"(3 * Stride)
      : "memory");
}

__device__ __forceinline__ uint32_t load_x_16(const void* from) {
  uint16_t x;
  asm volatile("ld.global.u16 %0, [%1];\n" : "=h"(x) : "l"(from) : "memory");
  return x;
}

// All threads of a warp: each keeps its value in a register from here on. Why: the compiler would find a number where
// it is used, and in what lies between two products of few weights an instruction costs about five cycles, a constant
// of the kernel more (docs/notes/decode-versions.md, version 51). Why a shuffle: it can't find again what came through
// one; of what all lanes share it sometimes does.
__device__ __forceinline__ void hold(int& value) { value = __shfl_sync(~0u, value, threadIdx.x % 32); }
__device__ __forceinline__ void hold(uint32_t& value) { value = __shfl_sync(~0u, value, threadIdx.x % 32); }
__device__ __forceinline__ void hold(float& value) { value = __shfl_sync(~0u, value, threadIdx.x % 32); }
__device__ __forceinline__ void hold(const uint8_t*& value) {
  value =
      reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(value), threadIdx.x % 32));
}
__device__ __forceinline__ void hold(uint64_t& value) {
  value = __shfl_sync(~0u, static_cast<unsigned long long>(value), threadIdx.x % 32);
}
// The same of what all threads share. zero: always_zero(), which the compiler does not know: it sees through a shuffle
// of what is the same for all.
__device__ __forceinline__ int always_zero() {
  int zero;
  asm volatile("mov.u32 %0, %%tid.z;\n" : "=r"(zero));
  return zero;
}
__device__ __forceinline__ void hold_common(int& value, int zero) { hold(value ^= zero); }
__device__ __forceinline__ void hold_common(float& value, int zero) {
  hold(value = __int_as_float(__float_as_int(value) ^ zero));
}
// The value, but what follows from it is found where it is used, not in front of a loop that it is the same in.
__device__ __forceinline__ int found_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
// The same of what lies in 0 .. Below - 1, which the compiler still knows.
template <int Below>
__device__ __forceinline__ void hold_below(int& value) {
  hold(value);
  __builtin_assume(value >= 0 && value < Below);
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most Pending of this thread's newest groups are still under way.
template <int Pending>
__device__ __forceinline__ void wait_groups() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Before this thread tells of it, all that it has read of shared memory has been read, and the copy engine may write
// there. Why: an arrival passes loads that were issued before it and not used yet, and beside other kernels these were
// seen to read what the engine wrote a microsecond later (docs/notes/gemm-sm90-versions.md, version 73).
__device__ __forceinline__ void end_reads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

// Lets the next kernel of the stream start as soon as every block of this one has come here.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Returns when every kernel before this one has finished and its writes can be seen.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// Four 8 x 8 matrices of 16-bit values; lanes 8i .. 8i+7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// The transposes of four 8 x 8 matrices of 16-bit values, of which lane 4g + t holds row g, columns 2t and 2t + 1;
// lanes 8i .. 8i+7 give where the rows of turned matrix i go. Compute capability 9.0 and newer.
__device__ __forceinline__ void store_matrices_turned(uint32_t row, const uint32_t (&from)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
#endif
}

// Loads and stores by 32-bit addresses of shared memory. Why not through pointers: those are 64 bits to the compiler.
__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(word) : "r"(from) : "memory");
  return word;
}

// From memory, not through the read-only path (tools/check_cuda.py says why).
__device__ __forceinline__ float load_float(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];\n" : "=f"(value) : "l"(from) : "memory");
  return value;
}

// The word at `from` in shared memory, and the one after it if `two`.
__device__ __forceinline__ uint2 load_one_or_two(uint32_t from, bool two) {
  uint2 words = {};
  asm volatile(
      "{\n"
      ".reg .pred two;\n"
      "setp.ne.u32 two, %3, 0;\n"
      "@two ld.shared.v2.u32 {%0, %1}, [%2];\n"
      "@!two ld.shared.u32 %0, [%2];\n"
      "}\n"
      : "+r"(words.x), "+r"(words.y)
      : "r"(from), "r"(static_cast<uint32_t>(two))
      : "memory");
  return words;
}

// From what does not change any more: the compiler may move it.
__device__ __forceinline__ uint32_t look_up(uint32_t from) {
  uint32_t word;
  asm("ld.shared.u32 %0, [%1];\n" : "=r"(word) : "r"(from));
  return word;
}

__device__ __forceinline__ void load_shared(uint32_t from, uint32_t& a, uint32_t& b) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t from, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from)
               : "memory");
}

// 16 bytes to memory. Why asm: where v is looked at elsewhere too, the compiler writes 4 bytes four times.
__device__ __forceinline__ void store_global(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(to), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(to), "f"(v) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, const float (&v)[1]) { store_shared(to, v[0]); }

__device__ __forceinline__ void store_shared(uint32_t to, const float (&v)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(to), "f"(v[0]), "f"(v[1]) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t from, float (&v)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(v[0]), "=f"(v[1]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t from, float (&v)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(from)
               : "memory");
}

}  // namespace lowbit::ptx
