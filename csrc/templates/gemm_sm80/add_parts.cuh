// The second kernel of family gemm_sm80: y of tasks that several workers had parts of, one for each tile and type of x.
#pragma once
#include "parts.cuh"

namespace lowbit::gemm_sm80 {

template <class Act, class Tile>
__global__ void __launch_bounds__(kAddThreads) add_parts(const __grid_constant__ Problem p) {
  add_up_parts<Act, Tile, kAddThreads>(p);
}

template <class Act, class Tile>
void (*Shared<Act, Tile>::add_kernel())(Problem) {
  return add_parts<Act, Tile>;
}

}  // namespace lowbit::gemm_sm80
