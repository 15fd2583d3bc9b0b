// Clusters of blocks (compute capability 9.0): rank, barrier, stores into the shared memory of another block.
//
// Below 9.0 these do nothing and the rank is 0: nobody may rely on them there.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace lowbit::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define LOWBIT_CLUSTERS 1
#endif

// Tells the cluster only that this thread runs, nothing of what it wrote.
__device__ __forceinline__ void cluster_arrive_early() {
#ifdef LOWBIT_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#ifdef LOWBIT_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// Barriers that this thread initialized are seen by other blocks that come past the cluster's barrier.
__device__ __forceinline__ void publish_to_cluster() {
#ifdef LOWBIT_CLUSTERS
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}

// Its number in the cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#ifdef LOWBIT_CLUSTERS
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
#endif
  return rank;
}

// A barrier is 8 bytes of shared memory; its phase flips when all arrivals and all announced bytes have come. This one
// takes one arrival a phase. The fence makes it known to the cluster.
__device__ __forceinline__ void barrier_init(uint32_t barrier) {
#ifdef LOWBIT_CLUSTERS
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
#ifdef LOWBIT_CLUSTERS
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef LOWBIT_CLUSTERS
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finish;\n"
      "bra retry;\n"
      "finish:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// A place in the shared memory of a block of this cluster, and that one's barrier that counts what comes there.
struct PlaceInCluster {
  uint32_t to, counts;
};

// to, barrier: places in this block's shared memory; block: rank of the one that is meant.
__device__ __forceinline__ PlaceInCluster place_in_cluster(uint32_t to, uint32_t barrier, uint32_t block) {
  PlaceInCluster place{};
#ifdef LOWBIT_CLUSTERS
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(place.to) : "r"(to), "r"(block));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(place.counts) : "r"(barrier), "r"(block));
#endif
  return place;
}

// Floats to `offset` bytes behind the place; the barrier counts their bytes. Why not a plain store: its release would
// wait for every copy that is under way.
__device__ __forceinline__ void store_behind(const PlaceInCluster& place, int offset, const float (&v)[1]) {
#ifdef LOWBIT_CLUSTERS
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];\n" ::"r"(place.to + offset),
               "r"(place.counts), "f"(v[0])
               : "memory");
#endif
}

__device__ __forceinline__ void store_behind(const PlaceInCluster& place, int offset, const float (&v)[2]) {
#ifdef LOWBIT_CLUSTERS
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];\n" ::"r"(place.to + offset),
      "r"(place.counts), "f"(v[0]), "f"(v[1])
      : "memory");
#endif
}

__device__ __forceinline__ void store_behind(const PlaceInCluster& place, int offset, const float (&v)[4]) {
#ifdef LOWBIT_CLUSTERS
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];\n" ::"r"(
                   place.to + offset),
               "r"(place.counts), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
#endif
}

}  // namespace lowbit::ptx
