// Which steps of which row tiles a warp takes, one after the other.
#pragma once
#include "shape.cuh"

namespace lowbit::decode {

// Strip: all of a warp's slice, tile by tile.
struct Strip {
  int first_step, end_step, tile, end_tile;

  __device__ Strip(const Position& at, int /*rows*/)
      : first_step(at.first_step),
        end_step(at.end_step),
        tile(at.first_step < at.end_step ? at.first_tile : at.end_tile),
        end_tile(at.end_tile) {}
  // To the next `rows` tiles of the slice first_step .. end_step; done when tile >= end_tile.
  __device__ __forceinline__ void next(int rows) { tile += rows; }
};

// Phases: `rows` tiles through all phases of K, then the next ones. A slice is the part of a phase that is the warp's.
struct Phases {
  const Position& at;
  const int end_tile;
  int first_step, end_step, tile, phase;

  __device__ Phases(const Position& position, int rows)
      : at(position), end_tile(position.end_tile), tile(position.first_tile), phase(-1) {
    next(rows);
  }
  // To the next phase that has something to do.
  __device__ __forceinline__ void next(int rows) {
    do {
      if (++phase == at.p.phases) phase = 0, tile += rows;
      at.slice_of(phase, first_step, end_step);
    } while (first_step >= end_step && tile < end_tile);
  }
};

}  // namespace lowbit::decode
