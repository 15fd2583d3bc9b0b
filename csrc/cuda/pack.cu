// The packing kernels, one of each kind a width.
#include "pack.h"

#include "templates/pack_weight.cuh"

extern "C" int lowbit_cuda_pack(const uint8_t* from, uint8_t* to, int64_t n, int64_t k, int bits, bool unpack,
                                void* stream) {
  using Run = int (*)(const uint8_t*, uint8_t*, int64_t, int64_t, bool, cudaStream_t);
  using namespace lowbit::packing;
  constexpr Run kRuns[] = {run<1>, run<2>, run<3>, run<4>, run<5>, run<6>, run<7>, run<8>};
  return kRuns[bits - 1](from, to, n, k, unpack, static_cast<cudaStream_t>(stream));
}
