// How many clusters of blocks a GPU holds at once.
#include <cuda_runtime.h>

namespace {
__global__ void __launch_bounds__(32) fill_multiprocessor() {}
}  // namespace

// How many clusters of so many blocks run at once on the current device with a multiprocessor for each block; a
// negative cudaError_t when the driver can't say.
extern "C" int lowbit_cuda_most_clusters(int blocks, int shared_bytes) {
  const void* function = reinterpret_cast<const void*>(&fill_multiprocessor);
  // Why all shared memory: no two such blocks fit on one multiprocessor.
  if (const cudaError_t error =
          cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
    return -static_cast<int>(error);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = 32;
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, function, &config);
  return error ? -static_cast<int>(error) : count;
}
