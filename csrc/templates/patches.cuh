// The order of tasks: patches of row blocks, in each of them one tile of tokens after the other, so that what workers
// read at the same time fits into the last cache.
//
//     a patch of 2 row blocks, 3 tiles of tokens     row block 0   0 2 4
//                                                    row block 1   1 3 5     the next patch begins with task 6
//
// Plain arithmetic that compiles for the host too.
#pragma once
#include "cut.cuh"

namespace lowbit {

// A task: a block of rows of W and a tile of tokens.
struct Spot {
  int row_block, token_tile;
};

// From so many tiles of tokens on x does not stay in the last cache until the next patch: patches are larger, and
// weights of one are kept in the cache for all tiles (large.cuh). Measured on an H200, 8192 x 8192, int8: 4096 rows 853
// us and 830, 8192 rows 1685 and 1633; int4 at 8192 1592 and 1564; fewer rows 0 to 3% slower with both.
constexpr int kManyTiles = 16;

// Row blocks side by side.
LOWBIT_HOST_DEVICE constexpr int patch_of(int token_tiles) { return token_tiles < kManyTiles ? 8 : 16; }

// Why no divisions: as in cut.cuh.
struct Patches {
  int row_blocks, token_tiles;
  int most;                                       // row blocks of a patch; the last one may have fewer
  uint32_t inverse, inverse_most, inverse_fewer;  // of a patch's tasks, of its row blocks, of the last one's

  Patches() = default;
  LOWBIT_HOST_DEVICE constexpr Patches(int rows, int tiles, int wanted)
      : row_blocks(rows),
        token_tiles(tiles),
        most(rows < wanted ? rows : wanted),
        inverse(inverse_of(most * tiles)),
        inverse_most(inverse_of(most)),
        inverse_fewer(inverse_of(rows % most)) {}

  LOWBIT_HOST_DEVICE inline Spot operator()(int task) const {
    if (token_tiles == 1) return {task, 0};
    const int first = quotient(task, most * token_tiles, inverse) * most, within = task - first * token_tiles;
    const bool fewer = row_blocks - first < most;
    const int rows = fewer ? row_blocks - first : most;
    const int tile = quotient(within, rows, fewer ? inverse_fewer : inverse_most);
    return {first + within - tile * rows, tile};
  }
};

}  // namespace lowbit
