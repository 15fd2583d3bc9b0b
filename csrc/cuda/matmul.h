// A hook for tests and benchmarks.
#pragma once

// From now on products that the kernel `name` can serve use it, whatever the choice would be; other products are not
// affected. A null name ends it. Returns 0, or 1 when this build has no such kernel. Called from Python through ctypes.
extern "C" __attribute__((visibility("default"))) int lowbit_cuda_force(const char* name);
