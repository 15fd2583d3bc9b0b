// The second kernel of family gemm_sm90: y of tasks that several workers had parts of.
#pragma once
#include "../parts.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

template <class Act, class Tile, int Threads>
__global__ void __launch_bounds__(Threads) add_parts(const __grid_constant__ Problem p) {
  add_up_parts<Act, Tile, Threads>(p);
}

}  // namespace lowbit::gemm_sm90
