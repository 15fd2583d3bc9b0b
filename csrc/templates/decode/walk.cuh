// Which steps of which row tiles a warp takes, one after the other.
#pragma once
#include "shape.cuh"

namespace lowbit::decode {

// All of a warp's slice first_step .. end_step, tile by tile; done when tile >= end_tile.
struct Walk {
  int first_step, end_step, tile, end_tile;

  __device__ explicit Walk(const Position& at)
      : first_step(at.first_step),
        end_step(at.end_step),
        tile(at.first_step < at.end_step ? at.first_tile : at.end_tile),
        end_tile(at.end_tile) {}

  __device__ __forceinline__ void next(int rows) { tile += rows; }
};

}  // namespace lowbit::decode
