// How many row blocks a patch of tasks has (patches.cuh), so that little of W and x comes from memory twice: workers
// that read the same bytes should do so at about the same time, before these have left the last cache.
//
//     whole tasks       all workers are at the same stage; it takes their row blocks and tiles of tokens, each once
//     tasks left over   a worker begins its share somewhere within a task, so that tasks of one row block, or of one
//                       tile of tokens, come to the same stage at times of their own
//
// Measured on an H200 (nvidia-h200/patches_20261130.json; docs/notes/gemm-sm90-versions.md, version 130). A model of a
// cache of 30 MB, which all workers walk through and which forgets what was used longest ago, brings what ncu counts
// within 5% in 23 of 42 cases if weights are kept as long as x, in 5 where they are not, as with few tiles of tokens
// (kManyTiles); 0.45 to 1.9 times as much in others. By that model, over 656 products (19 shapes, 256 to 4096 rows),
// what is chosen here is behind the best patch by 0.1% of a product's energy, always 8 or 16 row blocks by 0.8, 12 at
// worst. Plain arithmetic on sizes, for the host.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "deal.cuh"
#include "patches.cuh"

namespace lowbit {

// Bytes that a worker reads for a stage: of its row block of W, and of its tile of x.
struct StageReads {
  float weights, x;
};

constexpr float kFewBytes = 20e6f;  // a product of so few stays in the cache in any order
// What is read again is there unless about so many bytes were read since, a tenth of those of x counted: most of these
// are in the cache already.
constexpr float kForgotten = 25e6f;
// Another patch than the usual one is chosen if it reads less than this share of what that one does. Why: of 70
// products 20 above it took as long with both, 50 below it 1.2% less, from 6.6% less to 0.8% more.
constexpr float kWorthwhile = 0.875f;

// Bytes that all workers read for a stage, by patches of several sizes.
struct Reads {
  const MeetingDeal& deal;
  const int row_blocks, token_tiles;
  const StageReads bytes;
  std::vector<int> tasks, times;  // left over, in the order in which they come to their middle stage, and when
  std::vector<int> last;          // when a row block, then when a tile of tokens was read last; -1: never

  Reads(const MeetingDeal& dealt, int rows, int tiles, const StageReads& each)
      : deal(dealt), row_blocks(rows), token_tiles(tiles), bytes(each), tasks(dealt.left()), times(dealt.left()) {
    for (int i = 0; i < deal.left(); ++i) {
      const int middle = i * deal.stages + deal.stages / 2;
      tasks[i] = i, times[i] = deal.in_parts() ? middle - deal.cut(deal.cut.part_of(middle)) : 0;
    }
    std::sort(tasks.begin(), tasks.end(), [&](int a, int b) { return times[a] < times[b]; });
  }

  float of_whole_tasks(int patch) const {
    const auto rows = static_cast<float>(row_blocks), tiles = static_cast<float>(token_tiles);
    const auto most = static_cast<float>(patch), workers = static_cast<float>(deal.workers);
    const bool all_tiles = most * tiles <= workers;
    const float side_by_side = all_tiles ? std::min(rows, workers / tiles + most / 2) : std::min(rows, most);
    const float tiles_there = all_tiles ? tiles : std::min(tiles, workers / most + 0.5f);
    return static_cast<float>(deal.rounds) * (side_by_side * bytes.weights + tiles_there * bytes.x);
  }

  float of_tasks_left(int patch) {
    const Patches patches(row_blocks, token_tiles, patch);
    const float fills = kForgotten / (static_cast<float>(deal.workers) * (bytes.weights + bytes.x / 10));
    last.assign(row_blocks + token_tiles, -1);
    float sum = 0;
    const auto read = [&](int what, int now, float each) {
      const float since = static_cast<float>(now - last[what]) / fills;
      sum += last[what] < 0 ? each : each * std::min(since * since, 1.0f);
      last[what] = now;
    };
    for (const int task : tasks) {
      const Spot spot = patches(deal.rounds * deal.workers + task);
      read(spot.row_block, times[task], bytes.weights);
      read(row_blocks + spot.token_tile, times[task], bytes.x);
    }
    return sum;
  }

  float operator()(int patch) { return of_whole_tasks(patch) + of_tasks_left(patch); }
};

// Row blocks of a patch: the usual number, or another one by which much less is read.
inline int best_patch(const MeetingDeal& deal, int row_blocks, int token_tiles, const StageReads& bytes) {
  const int usual = std::min(patch_of(token_tiles), row_blocks);
  const float once = static_cast<float>(row_blocks) * bytes.weights + static_cast<float>(token_tiles) * bytes.x;
  const bool at_once = deal.rounds == 0 && !deal.in_parts();  // each worker has a task
  if (token_tiles == 1 || at_once || static_cast<float>(deal.stages) * once < kFewBytes) return usual;
  Reads reads(deal, row_blocks, token_tiles, bytes);
  int best = usual;
  float least = kWorthwhile * reads(usual);
  for (const int patch : {1, 2, 3, (row_blocks + 1) / 2, row_blocks}) {
    if (patch > row_blocks) continue;
    const float read = reads(patch);
    if (read < least) best = patch, least = read;
  }
  return best;
}

}  // namespace lowbit
