// A hook for tests and benchmarks.
#pragma once

// From now on products of its types with no more rows of x than it takes use the kernel `name`, and are an error if it
// can't hold them; other products are not affected. A null name ends it. Returns 0, or 1 when this build has no such
// kernel. Called from Python through ctypes.
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_force(const char* name);
