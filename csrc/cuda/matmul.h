// Hooks for tests and benchmarks, and what the library would choose. Called from Python through ctypes.
#pragma once
#include <cstdint>

// From now on products of its types with no more rows of x than it takes use the kernel `name`, and are an error if it
// can't hold them; other products are not affected. A null name ends it. Returns 0, or 1 when this build has no such
// kernel.
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_force(const char* name);

// The kernels of this build for x [m, k] times a weight [n, k] on a device of `capability` (90 for 9.0) that runs so
// many blocks, and pairs of blocks, at once: lines "name us", the one that is tried first first. us: about, -1 where no
// time is known (decode, other devices, kernels that are only tried after others). group_size: -1 for the whole row;
// zero_kind: an index into ZERO_KINDS of lowbit/scheme.py. The text is the thread's until its next call.
extern "C" __attribute__((visibility("default"))) const char* lowbit_cuda_plan(int weight, int act, int64_t m,
                                                                               int64_t n, int64_t k, int64_t group_size,
                                                                               int zero_kind, int capability,
                                                                               int blocks, int pairs);

// What a plan depends on of a device: its compute capability, the blocks and the pairs of blocks that it runs at once.
extern "C" __attribute__((visibility("default"))) void lowbit_cuda_device(int device, int* numbers);

// Whether a row of y is to be the same to the bit whatever rows x has beside it, from now on; returns what was so
// before.
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_batch_invariant(int on);
