// What the helping warps of a block do: one brings the stages, three add up x where offsets and zeros need its sums.
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
  const int group = Stage::kFine ? step * 8 >> p.group_fragments : step >> p.group_steps;
  const int word = group * (Stage::kFloatScales ? p.group_bytes / 8 : 4);
  ptx::copy_box(to, p.maps[kMapOfScales], word, tile, barrier, policy);
  if (Stage::kZeros) ptx::copy_box(to + Stage::kScales, p.maps[kMapOfZeros], word, tile, barrier, policy);
}

// One thread asks for all stages of a block, one after the other.
template <class Weight, class Tile, class Form>
struct Producer {
  using Stage = gemm_sm90::Stage<Weight, Tile, Form>;
  using Map = gemm_sm90::Map<Stage>;

  const PosedOf<Stage>& p;
  const uint32_t base;
  const int count, early;  // stages
  const int worker;
  const Cursor first;
  const uint64_t once = ptx::make_policy<ptx::Keep::kFirstOut>(), again = ptx::make_policy<ptx::Keep::kLastOut>();

  __device__ Producer(const PosedOf<Stage>& problem, int own_worker, const Parts& parts, uint32_t shared)
      : p(problem),
        base(shared),
        count(parts.stages),
        early(min(Map::kEarly, max(count / 4, 1))),
        worker(own_worker),
        first(problem, own_worker) {}

  __device__ __forceinline__ void ask_for_weights(const Cursor& at, int place) const {
    ask_for_rows<Stage, Tile>(p, at.stage, at.row_block * Tile::kRowTiles, base + place * Stage::kBytes + Stage::kX,
                              base + Map::kFull + 8 * place, 2 * Stage::kSteps * 128 * p.tile_tokens, once);
  }

  __device__ __forceinline__ void ask_for_x(const Cursor& at, int place) const {
#pragma unroll
    for (int i = 0; i < 2 * Stage::kSteps; ++i)
      ptx::copy_box(base + place * Stage::kBytes + i * Stage::kXBox, p.maps[kMapOfX],
                    (at.stage * 2 * Stage::kSteps + i) * 64, at.token, base + Map::kFull + 8 * place, again);
  }

  // Before the kernel before has ended: weights alone.
  __device__ __forceinline__ void start() const {
    Cursor at = first;
#pragma unroll 1
    for (int i = 0; i < early; ++i) {
      ask_for_weights(at, i);
      at.next(p, worker);
    }
  }

  // After.
  __device__ __forceinline__ void go_on() const {
    Cursor at = first;
    Place<Map::kDepth> place;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      // The first round finds all places empty.
      if (i >= Map::kDepth) ptx::wait_arrivals(base + Map::kEmpty + 8 * place.index, place.parity ^ 1);
      if (i >= early) ask_for_weights(at, place.index);
      ask_for_x(at, place.index);
      at.next(p, worker);
      place.next();
    }
  }
};

// Sums of x, in units of 1 / Decoder::kUnit. A warp takes every third of the steps and columns of a stage.
template <class Act, class Stage, class Tile>
__device__ __forceinline__ void add_up_x(const Problem& p, int stages, uint32_t base, int summer, int lane,
                                         float unit) {
  using Map = gemm_sm90::Map<Stage>;
  Place<Map::kDepth> place;
#pragma unroll 1
  for (int at = 0; at < stages; ++at, place.next()) {
    ptx::wait_arrivals(base + Map::kFull + 8 * place.index, place.parity);
#pragma unroll 2
    for (int unit_of_stage = summer; unit_of_stage < Stage::kSteps * Tile::kColumns; unit_of_stage += kSummers) {
      const int step = unit_of_stage / Tile::kColumns, column = unit_of_stage % Tile::kColumns;
      narrow::add_up_column<Act, Stage>(
          base + place.index * Stage::kBytes + 2 * step * Stage::kXBox + column * 1024,
          base + Map::kSums + place.index * Stage::kSums + unit_of_stage * (32 * narrow::kSumsOfStep<Stage>), lane,
          unit, p.group_fragments > 0);
    }
    if (lane < narrow::kSumLanes) ptx::arrive(base + Map::kSummed + 8 * place.index);
  }
}

}  // namespace lowbit::gemm_sm90
