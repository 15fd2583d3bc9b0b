// What runs of both kinds of kernels of family gemm_sm90 share.
#pragma once
#include "on_host/product.h"
#include "templates/gemm_sm90.cuh"
#include "templates/gemm_sm90/add_parts.cuh"

namespace lowbit::gemm_sm90 {
alignas(1024) inline uint8_t memory[emulated::kMostBlocks * kSharedTwoRings];
}

namespace on_host {

template <int Maps>
void call_posed(const void* function, const void* problem) {
  using Posed = gemm_sm90::Posed<Maps>;
  reinterpret_cast<void (*)(Posed)>(const_cast<void*>(function))(*static_cast<const Posed*>(problem));
}

// The kernels of a weight of type Weight take as many tensors as it has planes; uneven: those for zeros serve it,
// though it has none.
template <class Weight>
void tell_kernels(ZeroKind kind, bool uneven = false) {
  constexpr int kPlanes = planes::plane_count(Weight::kBits);
  call_kernel = kind == ZeroKind::kNone && !uneven ? call_posed<gemm_sm90::first_plane(false) + kPlanes>
                                                   : call_posed<gemm_sm90::first_plane(true) + kPlanes>;
}

}  // namespace on_host
