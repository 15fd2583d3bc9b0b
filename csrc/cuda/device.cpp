#include "device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <atomic>
#include <string>

extern "C" int lowbit_cuda_most_clusters(int blocks, int shared_bytes);  // clusters.cu

namespace lowbit::cuda {
namespace {

constexpr int kMaxDevices = 64;

// Driver functions that the runtime has no equal of. Why not linked: a machine without a driver must load this library.
struct Driver {
  int (*get_context)(void**);
  int (*set_context)(void*);
};

// `version`: of the CUDA driver interface that the function came with.
void* driver_function(const char* name, int version = 4000) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found), name);
  STD_TORCH_CHECK(function != nullptr, "the CUDA driver has no function ", name);
  return function;
}

const Driver& driver() {
  static const Driver functions = {reinterpret_cast<int (*)(void**)>(driver_function("cuCtxGetCurrent")),
                                   reinterpret_cast<int (*)(void*)>(driver_function("cuCtxSetCurrent"))};
  return functions;
}

// A device's attributes never change: each is asked once. Two threads that ask at the same time get the same answer.
int attribute(cudaDeviceAttr which, int device, std::array<std::atomic<int>, kMaxDevices>& known) {
  STD_TORCH_CHECK(device >= 0 && device < kMaxDevices, "expected a CUDA device below ", kMaxDevices, ", got ", device);
  int value = known[device].load(std::memory_order_relaxed);
  if (value == 0) {
    check(cudaDeviceGetAttribute(&value, which, device), "reading an attribute of the device");
    known[device].store(value, std::memory_order_relaxed);
  }
  return value;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string advice(cudaError_t error) {
  if (error == cudaErrorInsufficientDriver) {
    int version = 0;
    cudaDriverGetVersion(&version);
    return "; these kernels were built with CUDA " + version_text(CUDART_VERSION) + ", the driver has CUDA " +
           version_text(version) + ": CUDA 13 needs driver 580 or newer";
  }
  if (error == cudaErrorNoKernelImageForDevice)
    return "; this build has kernels for " LOWBIT_CUDA_ARCHS ": build lowbit with LOWBIT_CUDA_ARCHS for this GPU";
  return "";
}

}  // namespace

void* current_stream(int device) {
  using Function = int32_t (*)(int32_t, void**);
  // Why not linked: with a CPU-only torch there is no libtorch_cuda. Why NOLOAD: only the copy in use knows the stream.
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    STD_TORCH_CHECK(symbol != nullptr, "this torch has no CUDA streams: install a torch built for CUDA");
    return reinterpret_cast<Function>(symbol);
  }();
  void* stream = nullptr;
  STD_TORCH_CHECK(function(device, &stream) == 0, "torch has no current stream for CUDA device ", device);
  return stream;
}

Captured captured_by(void* stream) {
  Captured found;
  auto status = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &found.graph, nullptr,
                                                     &nodes, &edges, &count);
  // Why no exception: the default stream has an error here while another one captures; then a launch says what is
  // wrong.
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess || status != cudaStreamCaptureStatusActive || count != 1) return {};
  found.last = nodes[0];
  return found;
}

int multiprocessors(int device) {
  static std::array<std::atomic<int>, kMaxDevices> known{};
  return attribute(cudaDevAttrMultiProcessorCount, device, known);
}

Clusters most_clusters(int device) {
  static std::array<std::array<std::atomic<int>, kMaxDevices>, 5> known{};
  static std::array<std::atomic<int>, kMaxDevices> shared{};
  const int alone = multiprocessors(device);
  if (compute_capability(device) < 90) return {alone, 0, 0, 0, 0};
  constexpr int kBlocks[] = {1, 2, 4, 8, 3};
  Clusters most = {alone, 0, 0, 0, 0};
  for (int i = 1; i < 5; ++i) {
    int count = known[i][device].load(std::memory_order_relaxed);
    if (count == 0) {
      const int found =
          lowbit_cuda_most_clusters(kBlocks[i], attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device, shared));
      check(found < 0 ? -found : 0, "asking how many clusters of blocks the device holds");
      count = found + 1;  // Why: 0 stands for not asked yet
      known[i][device].store(count, std::memory_order_relaxed);
    }
    most[i] = count - 1;
  }
  return most;
}

int compute_capability(int device) {
  static std::array<std::atomic<int>, kMaxDevices> major{}, minor{};
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device, major) +
         attribute(cudaDevAttrComputeCapabilityMinor, device, minor);
}

void* tensor_map_encoder() {
  static void* const function = driver_function("cuTensorMapEncodeTiled", 12000);
  return function;
}

void check(int cuda_error, const char* what) {
  if (cuda_error == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(cuda_error);
  cudaGetLastError();  // else the next launch would report this error once more
  STD_TORCH_CHECK(false, what, " failed on CUDA: ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")",
                  advice(error));
}

bool refused(int cuda_error, const char* what) {
  if (cuda_error != cudaErrorInvalidValue) check(cuda_error, what);
  if (cuda_error != cudaSuccess) cudaGetLastError();
  return cuda_error != cudaSuccess;
}

DeviceScope::DeviceScope(int device) {
  int before = -1;
  check(cudaGetDevice(&before), "reading the current device");
  STD_TORCH_CHECK(driver().get_context(&context_before_) == 0, "the CUDA driver does not say what context is current");
  if (before == device) {
    // Why: a thread that has not used CUDA yet has no context, and the driver then describes no tensors.
    if (!context_before_) check(cudaSetDevice(device), "making the device of the weight current");
    return;
  }
  check(cudaSetDevice(device), "making the device of the weight current");
  changed_ = true;
}

// Why the context and not cudaSetDevice(before): that would make a context, and take its memory, on a device that this
// thread has not used yet.
DeviceScope::~DeviceScope() {
  if (changed_) driver().set_context(context_before_);
}

}  // namespace lowbit::cuda

// Called from Python through ctypes. The architectures of the build such as "80;90a"; the CUDA versions of the runtime
// inside and of the driver (13000 for 13.0; 0: no driver). None of them initializes CUDA.
extern "C" __attribute__((visibility("default"))) const char* lowbit_cuda_archs() { return LOWBIT_CUDA_ARCHS; }
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_runtime() { return CUDART_VERSION; }
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_driver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}
