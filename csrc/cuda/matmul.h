// Hooks for tests and benchmarks, and what the library would choose. Called from Python through ctypes.
#pragma once
#include <cstdint>

// From now on products of its types with no more rows of x than it takes use the kernel `name`, and are an error if it
// can't hold them; other products are not affected. A null name ends it. Returns 0, or 1 when this build has no such
// kernel.
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_force(const char* name);
// The same for products that the calling thread launches, for kernels of products alone: to time them while other
// threads go on. It takes the place of lowbit_cuda_force.
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_try(const char* name);

// From now on kernels share products in this way, the seven numbers of struct Split (csrc/args.h), each from 0 to 255:
// those of gemm_sm90 and decode, which refuse a product where they can't. No parts ends it.
extern "C" __attribute__((visibility("default"))) void lowbit_cuda_force_split(const int* split);

// The kernels of this build for x [m, k] times a weight [n, k] on a device of `capability` (90 for 9.0) that runs so
// many blocks, and pairs of blocks, at once: lines "name place", the one that is tried first first. place:
// microseconds, about; or "untimed", tried in this order though no time is known (decode with floats or short groups,
// other devices); "later", only tried after those; "never", has no room or no kernel for the product. group_size: -1
// for the whole row; zero_kind: an index into OP_ZERO_KINDS of lowbit/scheme.py, 0 for scales that are not even. Needs
// no device. The text is the thread's until its next call.
extern "C" __attribute__((visibility("default"))) const char* lowbit_cuda_plan(int weight, int act, int64_t m,
                                                                               int64_t n, int64_t k, int64_t group_size,
                                                                               int zero_kind, int scale_type,
                                                                               int capability, int blocks, int pairs);

// What a plan depends on of a device: its compute capability, the blocks and the pairs of blocks that it runs at once.
// Returns 0, or 1 where there is no such device, or it fails.
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_device(int device, int* numbers);

namespace lowbit::cuda {

// A product that was launched: x [m, k] times a weight [n, k]; weight, act, zero_kind, scale_type: indices into the
// lists of lowbit/dtypes.py and lowbit/scheme.py; capability, blocks and pairs as for lowbit_cuda_plan. `kernel` runs
// it, because of `why`: "plan", the first of lowbit_cuda_plan that holds it; "tuned", by lowbit_cuda_tune; "parts",
// some rows at a time; "forced"; "tried"; "batch-invariant"; "expanded", for torch's product. follows: as of Launch.
// lowbit/autotune/log.py mirrors this struct.
struct WatchedProduct {
  const char* kernel;
  const char* why;
  int64_t weight, act, m, n, k, group_size, zero_kind, scale_type, capability, blocks, pairs, follows;
};
using ProductWatcher = void (*)(const WatchedProduct*);

}  // namespace lowbit::cuda

// Call a function after each launch of a product from now on, on the thread that launched it, also while a CUDA graph
// is captured: it may neither throw nor ask for CUDA. Null ends it.
extern "C" __attribute__((visibility("default"))) void lowbit_cuda_watch(lowbit::cuda::ProductWatcher watch);

// Whether a row of y is to be the same to the bit whatever rows x has beside it, from now on; returns what was so
// before.
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_batch_invariant(int on);
