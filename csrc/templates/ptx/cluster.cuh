// Clusters of blocks (compute capability 9.0): rank, barrier, stores into the shared memory of another block.
//
// Where there are no clusters a cluster is one block, and its barrier that of the block.
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

__device__ __forceinline__ void cluster_arrive() {
#ifdef LOWBIT_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#ifdef LOWBIT_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// Four floats to the place `to` of this block's shared memory, but in the block of rank `block` of a cluster.
__device__ __forceinline__ void store_in_cluster(uint32_t to, uint32_t block, float4 v, bool clustered) {
#ifdef LOWBIT_CLUSTERS
  if (clustered) {
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;\n" : "+r"(to) : "r"(block));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
    return;
  }
#endif
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

}  // namespace lowbit::ptx
