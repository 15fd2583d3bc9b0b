// The second kernel: y from the sums of the parts that blocks had of each task.
#pragma once
#include "../epilogue.cuh"
#include "../ptx/async.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

// Adds up one float4 of every part: rows g and g + 8 of a row tile, two tokens. The parts of a task are those of the
// blocks from the one with its first stage to the one with its last, in that order, always the same.
template <class Act, class Tile, int Threads>
__global__ void __launch_bounds__(Threads) add_parts(const __grid_constant__ Problem p) {
  ptx::launch_dependents();
  const int columns = (p.m + 7) / 8;
  const int item = static_cast<int>(blockIdx.x) * Threads + static_cast<int>(threadIdx.x), lane = item % 32;
  const int row_tile = item / 32 / columns, column = item / 32 - row_tile * columns;
  const int task = row_tile / Tile::kRowTiles * p.token_tiles + column / Tile::kColumns;
  const int first = p.cut.part_of(task * p.stages), last = p.cut.part_of((task + 1) * p.stages - 1);
  constexpr int kPart = Tile::kRowTiles * Tile::kColumns * 512;  // bytes
  const uint8_t* from = reinterpret_cast<const uint8_t*>(p.parts) + static_cast<int64_t>(first + task) * kPart +
                        ((row_tile % Tile::kRowTiles * Tile::kColumns + column % Tile::kColumns) * 32 + lane) * 16;
  // Why only here: the numbers above take a while.
  ptx::wait_for_previous_kernel();
  if (row_tile * 16 >= p.n) return;
  float sum[4] = {};
#pragma unroll 4
  for (int block = first; block <= last; ++block, from += kPart) {
    const uint4 more = ptx::load_x(from);
    sum[0] += __uint_as_float(more.x), sum[1] += __uint_as_float(more.y);
    sum[2] += __uint_as_float(more.z), sum[3] += __uint_as_float(more.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = row_tile * 16 + lane / 4 + i / 2 * 8, token = column * 8 + lane % 4 * 2 + i % 2;
    if (n < p.n && token < p.m) store_y<Act>(p, n, token, sum[i], p.factor[i / 2]);
  }
}

}  // namespace lowbit::gemm_sm90
