// How kernels of products are prepared and launched: host code, for all families.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../args.h"

namespace lowbit {

// What is known of a kernel, by device: one bit each.
struct Prepared {
  std::atomic<uint64_t> done{0};
  std::atomic<uint64_t> overlaps{0};  // its code was made for 9.0 or newer

  // Whether it may be launched while the kernel before still runs. Code made for 8.x that the driver translates for a
  // newer device does not wait for that one.
  bool may_overlap(int device) const { return overlaps.load(std::memory_order_relaxed) >> (device & 63) & 1; }
};

// Tells the driver once per device how much shared memory a kernel takes; a cudaError_t, cudaErrorInvalidValue where
// the kernel is empty or missing: a device may run code of this build that was made for an older one.
inline cudaError_t prepare(const void* function, int shared_bytes, int device, Prepared& prepared) {
  constexpr int kEmpty = 16;  // registers that an empty kernel stays below
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && (prepared.done.load(std::memory_order_acquire) & bit)) return cudaSuccess;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, function);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) return cudaErrorInvalidValue;
  if (error == cudaSuccess && attributes.numRegs < kEmpty) return cudaErrorInvalidValue;
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess && attributes.ptxVersion >= 90) prepared.overlaps.fetch_or(bit, std::memory_order_relaxed);
  if (error == cudaSuccess) prepared.done.fetch_or(bit, std::memory_order_release);
  return error;
}

// Launches a kernel so that it may start before its predecessor ends, where launches overlap. problem: what it is told,
// of the type that it takes.
inline cudaError_t start(const void* function, const void* problem, int grid, int threads, int shared_bytes,
                         int cluster, const Launch& launch) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = attributes;
  config.numAttrs = !launch.overlap ? 0 : cluster > 1 ? 2 : 1;  // clusters only where launches overlap
  void* arguments[] = {const_cast<void*>(problem)};
  return cudaLaunchKernelExC(&config, function, arguments);
}

template <class Problem>
inline cudaError_t start(void (*function)(Problem), const Problem& p, int grid, int threads, int shared_bytes,
                         int cluster, const Launch& launch) {
  return start(reinterpret_cast<const void*>(function), &p, grid, threads, shared_bytes, cluster, launch);
}

}  // namespace lowbit
