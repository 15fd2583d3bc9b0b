// Which steps of which row tiles a warp takes, one after the other.
#pragma once
#include "shape.cuh"

namespace lowbit::decode {

// All of a warp's slice first_step .. end_step, tile by tile; done when tile >= end_tile.
struct Walk {
  int first_step, end_step, tile, end_tile;

  __device__ explicit Walk(const Position& at)
      : first_step(at.first_step), end_step(at.end_step), tile(at.first_tile), end_tile(at.end_tile) {}

  // By the same numbers, now that they are kept. Why not on 12.0: int1 with four tokens spills.
  __device__ __forceinline__ void renew(const Position& at) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1200
    first_step = at.first_step, end_step = at.end_step, end_tile = at.end_tile;
#endif
  }

  __device__ __forceinline__ void next(int rows) { tile += rows; }

  // Stages of so many row tiles and steps.
  __device__ __forceinline__ int stages(int rows, int steps) const {
    const unsigned tiles = end_tile - tile + rows - 1, all_steps = end_step - first_step + steps - 1;
    return static_cast<int>(tiles / rows * (all_steps / steps));
  }
  // How many of them are still to be asked for when the next kernel may begin; -1: that is not waited for.
  static __device__ __forceinline__ int left_for_next(int stages, int eighths) {
    return eighths ? stages - max(stages * eighths >> 3, 1) : -1;
  }
};

}  // namespace lowbit::decode
