// The launcher of the packing kernels, for pack.cpp, which knows torch and not CUDA.
#pragma once
#include <cstdint>

// Bit stream to layout nvidia, or back when `unpack`; sizes as in templates/pack_weight.cuh, 1 <= bits <= 8, on the
// current device. Returns a cudaError_t.
extern "C" int lowbit_cuda_pack(const uint8_t* from, uint8_t* to, int64_t n, int64_t k, int bits, bool unpack,
                                void* stream);
