// The second kernel of family gemm_sm90, as those that need it know it: y of tasks that several workers had parts of.
//
// Why a declaration alone: it knows nothing of weights, and is compiled once for all of their types (add_parts.cuh).
#pragma once
#include "../parts.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

// Threads of a block of it; fine: beside a kernel of fine groups. Why fewer there with 16 tokens: that kernel would
// spill with the registers that more of them leave.
template <class Tile>
constexpr int add_threads(bool fine) {
  return Tile::kWgmma || (fine && Tile::kTokens == 16) ? 128 : 256;
}

// What kernels of a tile and a type of x share, whatever the type of weights.
template <class Act, class Tile>
struct Shared {
  static void (*add_kernel(bool fine))(Problem);
};

}  // namespace lowbit::gemm_sm90
