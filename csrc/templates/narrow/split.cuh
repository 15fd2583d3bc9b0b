// How the 16 (or 8) warps of a block, and the blocks of a cluster, share rows of W and K, and where a block's stages
// lie.
//
//     16 x 1       each warp has 16 rows of its own, for all k of a stage   (row tiles x parts of K x blocks)
//      8 x 2       warps 2r and 2r + 1 have the same 16 rows, for half of the stage's k each
//      8 x 2 x 2   so do those of two blocks, of which each has half of the stages
//
// Sums of parts of K meet in shared memory at the end. Why: there are then as many blocks as the device runs at once,
// of whole tasks, and no second kernel adds up sums of parts. Why blocks too: a block reads x of all its k, and all of
// x for few rows is more than the last cache brings in time. Which split a product has is the plan's (cuda/split.h).
// Plain arithmetic that compiles for the host too.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../../args.h"
#include "../deal.cuh"

namespace lowbit::narrow {

constexpr int kMostWorkers = 16;  // warps that multiply: row tiles x parts of a block at most

// Bytes of shared memory of a block. Of whole multiprocessors: two of them must not meet on one. Why not all of its 228
// KB: the system takes 1 KB of every block, also of those of add_parts, which are to start beside.
constexpr int shared_bytes(int warps) { return (warps < kMostWorkers ? 110 : 220) * 1024; }

// Steps of 128 k in a stage, of each part of K: as many as a box of the copy engine holds (256 items of 8 bytes a row
// tile of the widest plane), and some stages fit. Why fewer of fine groups, whose room for scales is large: 8192 x
// 8192, groups of 32, int4 in halves of a multiprocessor n8 12.3 us with 1, 11.3 with 2, but 4096 x 4096 n16 5.2 and
// 5.9. Why not four with 2 bits in half of a multiprocessor: registers would not do.
constexpr int stage_steps(int tokens, int bits, int warps, bool fine) {
  const bool half = warps < kMostWorkers;
  const int boxes = bits & 8 ? 1 : bits & 4 ? 2 : 4;
  const int largest = shared_bytes(warps) / (half ? 4 : 5) / (256 * (tokens + warps * bits));
  const int most = !fine ? 4 : tokens == 8 || bits <= 2 ? 2 : 1;
  const int steps = boxes < largest ? boxes : largest;
  return steps >= 4 && most == 4 && !(half && bits == 2) ? 4 : steps >= 2 && most >= 2 ? 2 : 1;
}

// Stages of weights, of codes of so many bits, that a block asks for before the kernel before has ended. Why few: x of
// the first stages would stand in line behind them. Measured: docs/notes/gemm-sm90-versions.md, version 5.
constexpr int early_stages(int bits) { return bits <= 2 ? 1 : bits <= 4 ? 2 : 3; }

// The most stages that a ring of a whole multiprocessor has, of codes of so many bits. Why not all that there is room
// for: with more on their way weights come slower. Measured on an H200, seven products of 28672 x 4096 and more, 2, 3,
// 4 and all stages: n8 W4 +4, -2, -1, 0%, W3 +6, -2, -3, 0, W6 +7, -2, -2, 0, n16 W6 +11, 0, -2, 0, else within 1%.
constexpr int most_stages(int tokens, int bits) { return tokens <= 8 && bits == 4 ? 3 : 4; }

// Tasks that are never cut; or each for a cluster of two blocks, stages an even number then.
LOWBIT_HOST_DEVICE constexpr MeetingDeal deal_whole(int tasks, int stages, int most, int blocks) {
  if (blocks == 2) return deal_to_clusters(tasks, stages, tasks, 2);
  MeetingDeal made{{tasks, stages, most, tasks / most, tasks % most, Cut{stages, 0}}};
  if (made.rounds == 0) made.workers = made.sharers;
  return made;
}

// What a stage is made of: codes, scales and zeros of all warps, x of each part of K, sums of x of each part.
struct StageBytes {
  int weights, x, sums;  // weights: x begins there; x, sums: of a part
  int align;             // of stages
  LOWBIT_HOST_DEVICE constexpr int of(int parts) const {
    return (weights + parts * (x + sums) + align - 1) / align * align;
  }
};

// What a kernel is told of its stages.
struct Stages {
  Split split{kMostWorkers, 1, 1, 1, kMostWorkers, 0, 0};
  int slices = 1;     // of K, in all: parts x blocks
  bool whole = true;  // each warp has rows of its own, all of them: parts of tasks may be dealt out
  int steps;          // of 128 k in a stage
  int bytes, sums_at;
  int depth = 0;      // stages in the ring
  uint32_t per_warp;  // 2^16 / parts, rounded up
  // The row tile of a warp: its number by the parts of K.
  LOWBIT_HOST_DEVICE constexpr int tile_of(int warp) const { return static_cast<int>(warp * per_warp >> 16); }
};

// Whether there are blocks of half of a multiprocessor. Why not 16 tokens of fine groups beside sums of x: they spill.
LOWBIT_HOST_DEVICE constexpr bool has_halves(int tokens, const WeightKind& kind) {
  return tokens < 16 || !kind.fine || !kind.any_zeros;
}

// Whether a ring has two stages of so many parts of K, about: what kernels themselves say is SplitQuestion::fits.
constexpr bool has_room(int parts, int tokens, int bits, int warps, bool fine) {
  const int steps = stage_steps(tokens, bits, warps, fine), sums = warps * tokens * 64;
  return 2 * steps * 256 * (warps * bits + warps * (fine ? 1 : 0) + parts * tokens) <=
         shared_bytes(warps) - sums - 4096;
}

// A row tile for each of 16 warps and all of K, tasks that are cut: what is left of whole ones is dealt out in parts.
constexpr bool is_dealt(const Split& split) {
  return split.row_tiles == kMostWorkers && split.parts * split.blocks == 1;
}

// Blocks, or pairs of them, of a split that run at once.
constexpr int64_t at_once(const Split& split, const SplitQuestion& q) {
  return int64_t{q.clusters[split.blocks - 1]} << split.two_each;
}

// Whether a kernel can do it: its warps and stages allow it, and sums of parts, which meet once, those of a cluster
// half in each block, are of tasks that all run at once. Half of a multiprocessor is for such tasks alone. Two each of
// fewer blocks than there are multiprocessors are right too, though nothing gains.
constexpr bool possible(const Split& split, const SplitQuestion& q) {
  const int rows = split.row_tiles, parts = split.parts, blocks = split.blocks;
  if (rows < 1 || parts < 1 || rows * parts > q.warps || !(q.fits >> parts & 1) || split.early < 1) return false;
  const bool half = q.warps < kMostWorkers;
  if (split.warps != q.warps || (split.two_each ? !half : half && parts * blocks == 1)) return false;
  if (blocks == 2) return rows % 2 == 0 && q.tiles <= at_once(split, q) * rows;
  return blocks == 1 && ((parts == 1 && !split.two_each) || q.tiles <= at_once(split, q) * rows);
}

// The split of a product: as forced, or the plan's, or `own` where there is none.
inline Split split_for(const Launch& launch, const SplitQuestion& question, const Split& own) {
  if (launch.forced.parts) return launch.forced;
  if (!launch.split) return own;
  Split made = launch.split(question);
  if (!launch.follows) made.early = kEarlyAlone;
  return made;
}

// Those of a product of `tiles` row tiles and `steps` times 128 k; own_steps: of a warp in a stage; warps: of a block,
// that multiply. group_steps: of groups that are not fine, log2 of one, or -1 where a row has one. most_steps: in a
// stage; most: stages; room: bytes for them. No depth where a split is forced that can't be, or the plan wants none of
// so many warps.
inline Stages stages_of(const StageBytes& stage, int own_steps, int64_t tiles, int64_t steps, int tokens, int bits,
                        int warps, const Launch& launch, const WeightKind& kind, int group_steps, int most_steps,
                        int most, int room) {
  SplitQuestion question{tiles, steps, tokens, bits, warps, launch.clusters, 0, kind};
  for (int parts = 1; parts <= warps; ++parts) {
    const int64_t all = int64_t{own_steps} * parts, group = group_steps < 0 ? 1 : int64_t{1} << group_steps;
    const bool fits = room / stage.of(parts) >= 2 && all <= most_steps && (all % group == 0 || group % all == 0);
    question.fits |= static_cast<uint32_t>(fits) << parts;
  }
  Stages made;
  made.split.row_tiles = warps;
  made.split.warps = warps;
  made.split = split_for(launch, question, made.split);
  if (!possible(made.split, question)) return made;
  const int parts = made.split.parts;  // fits
  made.slices = parts * made.split.blocks, made.whole = is_dealt(made.split);
  made.steps = own_steps * parts;
  made.bytes = stage.of(parts), made.sums_at = stage.weights + parts * stage.x;
  made.depth = room / made.bytes < most ? room / made.bytes : most;
  if (warps == kMostWorkers) made.depth = std::min(made.depth, most_stages(tokens, bits));
  if (made.split.early > made.depth) made.split.early = made.depth;
  made.per_warp = ((1 << 16) + parts - 1) / parts;
  return made;
}

}  // namespace lowbit::narrow
