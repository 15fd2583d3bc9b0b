// What the helping warps of a block do: one brings the stages, three add up x where zeros need its sums.
#pragma once
#include "../dequant/int.cuh"
#include "../dequant/planes.cuh"
#include "../narrow/x_sums.cuh"
#include "../ptx/async.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/tma.cuh"
#include "shape.cuh"

namespace lowbit::gemm_sm90 {

constexpr int kSummers = 3;  // warps that add up x

// Asks for scales and zeros of the row tiles from `tile` on, as many as a box has, and the groups from a step on.
template <class Stage>
__device__ __forceinline__ void ask_for_groups(const PosedOf<Stage>& p, int step, int tile, uint32_t to,
                                               uint32_t barrier, uint64_t policy) {
  const int group = Stage::kFine ? step * 8 >> p.group_fragments : step >> p.group_steps;
  const int word = group * (Stage::kFloatScales ? p.group_bytes / 8 : 4);
  ptx::copy_box(to, p.maps[kMapOfScales], word, tile, barrier, policy);
  if (Stage::kZeros) ptx::copy_box(to + Stage::kScales, p.maps[kMapOfZeros], word, tile, barrier, policy);
}

// Asks for codes, scales and zeros of a stage of the row tiles from `tile` on; the barrier counts them, and
// bytes_beside more that the caller asks for.
template <class Stage, class Tile>
__device__ __forceinline__ void ask_for_rows(const PosedOf<Stage>& p, int stage, int tile, uint32_t to,
                                             uint32_t barrier, int bytes_beside, uint64_t policy) {
  const int step = stage * Stage::kSteps;
  const uint32_t groups_bytes = p.stage_groups * p.group_bytes * Tile::kRowTiles;
  ptx::barrier_expect(barrier, bytes_beside + Stage::kCodes + groups_bytes * (Stage::kZeros ? 2 : 1));
#pragma unroll
  for (int width = 8; width >= 1; width /= 2) {
    if (!(Stage::kBits & width)) continue;
    ptx::copy_box(to, p.maps[first_plane(Stage::kZeros) + planes::plane_index(Stage::kBits, width)], step * 32 * width,
                  tile, barrier, policy);
    to += Tile::kRowTiles * Stage::kSteps * 256 * width;
  }
  ask_for_groups<Stage>(p, step, tile, to, barrier, policy);
}

// The same for tiles of up to 16 tokens, whose warps may share row tiles (narrow/split.cuh).
template <class Stage>
__device__ __forceinline__ void ask_for_split(const PosedOf<Stage>& p, int stage, int row_block, uint32_t to,
                                              uint32_t barrier, int bytes_beside, uint64_t policy) {
  const int row_tiles = p.ring.split.row_tiles, tile = row_block * row_tiles, step = stage * p.ring.steps;
  const uint32_t groups_bytes = p.stage_groups * p.group_bytes * row_tiles;
  const uint32_t codes = row_tiles * p.ring.steps * (256 * Stage::kBits);
  ptx::barrier_expect(barrier, bytes_beside + codes + groups_bytes * (Stage::kZeros ? 2 : 1));
#pragma unroll
  for (int width = 8; width >= 1; width /= 2) {
    if (!(Stage::kBits & width)) continue;
    ptx::copy_box(to, p.maps[first_plane(Stage::kZeros) + planes::plane_index(Stage::kBits, width)], 0,
                  stage * p.box_steps, tile, barrier, policy);
    to += Stage::kRowTiles * Stage::kSteps * 256 * width;
  }
  ask_for_groups<Stage>(p, step, tile, to, barrier, policy);
}

// One thread asks for all stages of a block, one after the other.
template <class Weight, class Tile, class Form>
struct Producer {
  using Stage = gemm_sm90::Stage<Weight, Tile, Form>;
  using Map = gemm_sm90::Map<Stage>;

  const PosedOf<Stage>& p;
  const Ring<Stage> ring;
  const int steps;               // of 128 k in a stage
  const int count, early, next;  // stages; next: after which the next kernel may begin
  const Parts& parts;
  const Cursor first;

  __device__ Producer(const PosedOf<Stage>& problem, const Parts& own_parts, uint32_t shared)
      : p(problem),
        ring{shared, problem.ring},
        steps(Stage::kNarrow ? problem.ring.steps : Stage::kSteps),
        count(own_parts.stages),
        early(begins_late(problem) ? 1 : min(most_early(problem), Stage::kHalf ? count : max(count / 4, 1))),
        next(Stage::kHalf ? max(count * problem.ring.split.next_after / 8, 1) : 0),
        parts(own_parts),
        first(problem, own_parts) {}

  __device__ __forceinline__ void ask_for_weights(const Cursor& at, int place) const {
    const uint32_t to = ring.stage(place) + Stage::kCodesAt;
    const int x_bytes = 2 * steps * 128 * p.tile_tokens;
    if constexpr (Stage::kNarrow) {
      ask_for_split<Stage>(p, at.stage, at.row_block, to, ring.full(place), x_bytes, ptx::kFirstOut);
    } else {
      ask_for_rows<Stage, Tile>(p, at.stage, at.row_block * Tile::kRowTiles, to, ring.full(place), x_bytes,
                                ptx::kFirstOut);
    }
  }

  // first: what is to be done before the first copy, when all is found that this one needs.
  template <class First>
  __device__ __forceinline__ void ask_for_x(const Cursor& at, int place, const First& first) const {
    const uint32_t to = ring.stage(place) + Stage::kXAt;
    const int boxes = 2 * steps;
    if constexpr (Stage::kNarrow) {
      if (p.deep_x) {
        first();
        return ptx::copy_box(to, p.maps[kMapOfX], 0, at.token, at.stage * boxes, ring.full(place), ptx::kLastOut);
      }
    }
    first();
#pragma unroll Stage::kNarrow ? 1 : 8
    for (int i = 0; i < boxes; ++i)
      ptx::copy_box(to + i * Stage::kXBox, p.maps[kMapOfX], (at.stage * boxes + i) * 64, at.token, ring.full(place),
                    ptx::kLastOut);
  }

  // Stages that are asked for before the kernel before has ended, at most.
  static __device__ __forceinline__ int most_early(const Problem& p) {
    return Stage::kNarrow || Stage::kHalf ? p.ring.split.early : Map::kEarly;
  }

  static __device__ __forceinline__ bool begins_late(const Problem& p) {
    return Stage::kNarrow && Stage::kHalf && static_cast<int>(blockIdx.x) >= p.late;
  }

  // Stages whose barrier `full` this thread makes; other warps make the others. Why so few: a block of a whole
  // multiprocessor begins when the kernel before ends, and memory is idle until it asks. Why all of halves: when they
  // ask was fitted (half_of of cuda/split.h), and sooner their weights come in the way of the kernel before.
  __device__ __forceinline__ int makes() const { return Stage::kHalf ? ring.depth() : most_early(p); }

  // Before the kernel before has ended: weights alone, and before any other warp of the block is needed.
  __device__ __forceinline__ void start() const {
#pragma unroll 1
    for (int i = 0; i < makes(); ++i) ptx::arrivals_init(ring.full(i), 1);
    ptx::publish_barriers();
    Cursor at = first;
    ask_for_weights(at, 0);
#pragma unroll 1
    for (int i = 1; i < early; ++i) {
      at.next(p, parts);
      ask_for_weights(at, i);
    }
  }

  // Waits for it, then brings everything else.
  __device__ __forceinline__ void go_on() const {
    // Why apart: the address of x would be found after all that the loop needs.
    ask_for_x(first, 0, [] { ptx::wait_for_previous_kernel(); });
    Cursor at = first;
    auto place = ring.first();
    at.next(p, parts), place.next();
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      // The first round finds all places empty.
      if (i >= ring.depth()) ptx::wait_arrivals(ring.empty(place.index), place.parity ^ 1);
      if (i >= early) ask_for_weights(at, place.index);
      ask_for_x(at, place.index, [] {});
      at.next(p, parts);
      place.next();
      // Why only now: its weights would be brought before what this product still needs.
      if (Stage::kHalf && i == next) ptx::launch_dependents();
    }
    if (Stage::kHalf && next >= count) ptx::launch_dependents();
  }
};

// Sums of x. A warp takes every third of the steps and columns of a stage.
template <class Worker, class Act, class Stage, class Tile>
__device__ __forceinline__ void add_up_x(const Problem& p, int stages, uint32_t base, int summer, int lane) {
  const Ring<Stage> ring{base, p.ring};
  auto place = ring.first();
#pragma unroll 1
  for (int at = 0; at < stages; ++at, place.next()) {
    ptx::wait_arrivals(ring.full(place.index), place.parity);
    const uint32_t x = ring.stage(place.index) + Stage::kXAt, to = ring.sums(place.index);
#pragma unroll 2
    for (int unit_of_stage = summer; unit_of_stage < p.ring.steps * Tile::kColumns; unit_of_stage += kSummers) {
      const int step = unit_of_stage / Tile::kColumns, column = unit_of_stage % Tile::kColumns;
      const int x_box = narrow::x_box_of<Stage>(p);
      narrow::add_up_column<Act, Stage>(x + 2 * step * x_box + column * 1024, x_box,
                                        to + unit_of_stage * (narrow::kSumBytes * narrow::kSumsOfStep<Stage>), lane,
                                        Worker::kSumFactor, p.group_fragments > 0);
    }
    ptx::arrive(ring.summed(place.index));  // each lane for what it stored
  }
}

}  // namespace lowbit::gemm_sm90
