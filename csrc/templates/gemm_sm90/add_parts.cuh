// The second kernel of family gemm_sm90: y of tasks that several workers had parts of, one for each tile and type of x.
#pragma once
#include "parts.cuh"

namespace lowbit::gemm_sm90 {

template <class Act, class Tile, int Threads>
__global__ void __launch_bounds__(Threads) add_parts(const __grid_constant__ Problem p) {
  add_up_parts<Act, Tile, Threads>(p);
}

template <class Act, class Tile>
void (*Shared<Act, Tile>::add_kernel(bool fine))(Problem) {
  return fine ? add_parts<Act, Tile, add_threads<Tile>(true)> : add_parts<Act, Tile, add_threads<Tile>(false)>;
}

}  // namespace lowbit::gemm_sm90
