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

  // Which stage of so many row tiles and steps is the last one before the next kernel may begin; 0: none is waited for.
  __device__ __forceinline__ int last_before_next(int eighths, int rows, int steps) const {
    const int tiles = (end_tile - tile + rows - 1) / rows, stages = (end_step - first_step + steps - 1) / steps;
    return eighths ? max(tiles * stages * eighths / 8, 1) : 0;
  }
};

}  // namespace lowbit::decode
