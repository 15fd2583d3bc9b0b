// Copies of boxes of a tensor into shared memory by its copy engine, and the barriers that count their bytes (compute
// capability 9.0).
//
// Volatile with a memory clobber, like everything in async.cuh. Compiles to nothing for older targets, whose kernels
// are never launched.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace lowbit::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define LOWBIT_TENSOR_COPIES 1
#endif

// True in one thread of a warp that has converged. Why not lane == 0: the compiler then knows that one thread runs, and
// keeps operands of copies in uniform registers.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen = 0;
#ifdef LOWBIT_TENSOR_COPIES
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(chosen));
#endif
  return chosen;
}

// Barriers that were just initialized are seen by the copy engine.
__device__ __forceinline__ void publish_barriers() {
#ifdef LOWBIT_TENSOR_COPIES
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

// How long a line is worth keeping in L2: what createpolicy.fractional makes of evict_first and evict_last for all of
// the lines, on 9.0 to 12.0. Why numbers: the compiler finds each of them by seven instructions, wherever it is used.
constexpr uint64_t kFirstOut = 0x12F0000000000000, kLastOut = 0x14F0000000000000;

// The box at (inner, outer) of a 2-D tensor to shared memory; the barrier counts its bytes. What lies outside of the
// tensor becomes 0 and counts too.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int inner, int outer, uint32_t barrier,
                                         uint64_t policy) {
#ifdef LOWBIT_TENSOR_COPIES
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;\n" ::"r"(to),
      "l"(&map), "r"(inner), "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

// The same of a 3-D tensor.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int inner, int middle, int outer,
                                         uint32_t barrier, uint64_t policy) {
#ifdef LOWBIT_TENSOR_COPIES
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(to),
      "l"(&map), "r"(inner), "r"(middle), "r"(outer), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

// The same to that place in every block of the cluster in `blocks` (a bit each), whose own barrier counts its bytes.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap& map, int inner, int outer,
                                                uint32_t barrier, uint16_t blocks, uint64_t policy) {
#ifdef LOWBIT_TENSOR_COPIES
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5, %6;\n" ::"r"(to),
      "l"(&map), "r"(inner), "r"(outer), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
#endif
}

// Arrives at the barrier at that place in the block of rank `block`. Why no release at the scope of the cluster: only
// reads come before it, and that release would wait for every copy that is under way.
__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier, uint32_t block) {
#ifdef LOWBIT_TENSOR_COPIES
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(block)
      : "memory");
#endif
}

// Brings a map into its cache.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
#ifdef LOWBIT_TENSOR_COPIES
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
#endif
}

}  // namespace lowbit::ptx
