// What the host code of CUDA ops asks of the machine: streams, devices, errors. It knows torch's C functions only.
#pragma once
#include <array>
#include <cstdint>

namespace lowbit::cuda {

// Torch's current stream of a device, as a cudaStream_t.
void* current_stream(int device);

// What the next kernel of a stream in the graph that it captures comes behind: the graph's number, and a node; no node
// where it captures nothing, or comes behind several.
struct Captured {
  unsigned long long graph = 0;
  const void* last = nullptr;
  bool operator==(const Captured& other) const { return graph == other.graph && last == other.last; }
};
Captured captured_by(void* stream);

int multiprocessors(int device);
// How many clusters of 1, 2, 4, 8, 3 blocks the device, which is current, runs at once: see struct Launch.
using Clusters = std::array<int, 5>;
Clusters most_clusters(int device);
// 90 for compute capability 9.0.
int compute_capability(int device);
// The driver's cuTensorMapEncodeTiled.
void* tensor_map_encoder();

// Raises when a CUDA call or a launcher did not return 0; `what` names the work: "packing the weight".
void check(int cuda_error, const char* what);
// Whether a launcher launched nothing because its kernel can't hold the problem; raises for any other error.
bool refused(int cuda_error, const char* what);

// Makes a device current for the calling thread, until the end of the scope. Costs a few nanoseconds where it
// is current already. A thread that had no context keeps the one that it gets.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  bool changed_ = false;
  void* context_before_ = nullptr;
};

}  // namespace lowbit::cuda
