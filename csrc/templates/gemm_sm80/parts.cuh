// The second kernel of family gemm_sm80, as those that need it know it: y of tasks that several workers had parts of.
//
// Why a declaration alone: it knows nothing of weights, and is compiled once for all of their types (add_parts.cuh).
#pragma once
#include "../parts.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm80 {

constexpr int kAddThreads = 256;

// What kernels of a tile and a type of x share, whatever the type of weights.
template <class Act, class Tile>
struct Shared {
  static void (*add_kernel())(Problem);
};

}  // namespace lowbit::gemm_sm80
