// How many columns a tile of wgmma multiplies: as many as it has tokens at most, or, of 256, what holds those that are
// there. Why not of smaller tiles: what is not there is never brought, and products of it take little energy, which is
// what bounds those; the branch costs 2 to 4% (docs/notes/gemm-sm90-versions.md, version 92).
#pragma once
#include <cstdint>

#include "cut.cuh"

namespace lowbit {

constexpr int kColumnSteps = 4, kColumnStep = 32;  // of a tile of 256: 160, 192, 224, 256

LOWBIT_HOST_DEVICE constexpr int columns_of(int tile, int tokens) {
  if (tile < 256) return tile;
  const int fewest = tile - (kColumnSteps - 1) * kColumnStep;
  const int columns = (tokens + kColumnStep - 1) / kColumnStep * kColumnStep;
  return columns < fewest ? fewest : columns;
}

// The same of each of as few tiles as hold m tokens.
constexpr int columns_of_each(int tile, int64_t m) {
  const int64_t tiles = (m + tile - 1) / tile;
  return columns_of(tile, static_cast<int>((m + tiles - 1) / tiles));
}

}  // namespace lowbit
