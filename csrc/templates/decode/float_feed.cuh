// The floats of one warp on their way into its ring: codes step by step (a stage), scales chunk by chunk.
//
// Every lane copies 16 bytes at a time; a commit group is one stage. fetch() is called once a stage also when nothing
// is left, so that the count of groups in flight stays what the caller waits for.
#pragma once
#include <cstdint>

#include "../dequant/planes.cuh"
#include "../ptx/async.cuh"
#include "tile.cuh"
#include "walk.cuh"

namespace lowbit::decode {

// What goes into a ring: stages, a step of kRows row tiles each, plane by plane; and scales of chunks.
template <class Weight, class Tile>
struct FloatRing {
  static constexpr int kBits = Weight::kBits;
  static constexpr RingSizes kSizes = float_ring_of<Tile>(kBits);
  static constexpr int kRows = kSizes.rows, kSteps = kSizes.steps;
  static constexpr int kTileBytes = kSizes.tile_bytes, kTileScaleBytes = kSizes.tile_scales;
  static constexpr int kChunk = kTileScaleBytes / 32;  // steps whose scales come together, with the first stage
  static constexpr int kStageBytes = kTileBytes * kRows, kScaleBytes = kTileScaleBytes * kRows;
  static constexpr int kDepth = kSizes.depth;  // stages
  // Why as many: a chunk may be one stage.
  static constexpr int kScaleSlots = kDepth;
  static constexpr int kBytes = kDepth * kStageBytes + kScaleSlots * kScaleBytes;
};

template <class Weight, class Tile>
struct FloatFeed {
  using Ring = FloatRing<Weight, Tile>;
  static constexpr int kBits = Weight::kBits;
  static constexpr int kPlanes = planes::plane_count(kBits);

  const Problem& p;
  const int lane;
  const uint32_t ring;
  // The next stage: `left` steps of its chunk are still to come, then comes the chunk at `chunk`.
  Walk walk;
  const uint8_t* codes[kPlanes];  // this lane's bytes of each plane, widest first
  int rows, chunk, left;
  int to_come, left_for_next;  // stages, of all chunks; and when the next kernel may begin
  uint32_t to, scales_to;

  __device__ FloatFeed(const Position& at, uint32_t ring_address)
      : p(at.p),
        lane(at.lane),
        ring(ring_address),
        walk(at),
        chunk(walk.first_step),
        left(0),
        to_come(walk.stages(Ring::kRows, 1)),
        left_for_next(Tile::kFeedsTell ? Walk::left_for_next(to_come, p.next_after) : -1),
        to(ring_address),
        scales_to(ring_address + Ring::kDepth * Ring::kStageBytes) {}

  // Finds the codes of a chunk and fetches its scales: lanes of the lower half do.
  __device__ __forceinline__ void open_chunk() {
    left = 0;
    if (walk.tile >= walk.end_tile) return;
    left = min(Ring::kChunk, walk.end_step - chunk);
    const int64_t code = static_cast<int64_t>(walk.tile) * p.columns + chunk * kStepK;
#pragma unroll
    for (int width = 8; width >= 1; width /= 2)
      if (kBits & width)
        codes[planes::plane_index(kBits, width)] =
            p.codes + p.plane_stride * layout::plane_low(kBits, width) + code * 2 * width + lane * 16;

    const int last_k = min((chunk + left) * kStepK, p.k) - 1;
    const int group = chunk * kStepK >> p.group_shift;
    const int bytes = ((last_k >> p.group_shift) - group + 1) * 32 - lane * 16;
    const uint8_t* from = p.scales + (static_cast<int64_t>(walk.tile) * p.groups + group) * 32 + lane * 16;
    rows = min(Ring::kRows, walk.end_tile - walk.tile);
    static_assert(Ring::kTileScaleBytes == 256);
#pragma unroll
    for (int r = 0; r < Ring::kRows; ++r) {
      if (r >= rows) break;
      if (lane < 16 && bytes > 0)
        ptx::copy_async(scales_to + r * Ring::kTileScaleBytes + lane * 16,
                        from + static_cast<int64_t>(r) * p.groups * 32);
    }
    scales_to += Ring::kScaleBytes;
    if (scales_to == ring + Ring::kBytes) scales_to -= Ring::kScaleSlots * Ring::kScaleBytes;

    chunk += Ring::kChunk;
    if (chunk >= walk.end_step) {
      walk.next(Ring::kRows);
      chunk = walk.first_step;
    }
  }

  __device__ __forceinline__ bool is_done() const { return to_come <= 0; }

  __device__ __forceinline__ void fetch() {
    // Why not when the chunk before ends: its scales would come into a slot that may still be read.
    if (left <= 0) open_chunk();
    if (left > 0) {
      uint32_t stage = to + lane * 16;
#pragma unroll
      for (int width = 8; width >= 1; width /= 2) {
        if (!(kBits & width)) continue;
        const uint8_t*& from = codes[planes::plane_index(kBits, width)];
#pragma unroll
        for (int r = 0; r < Ring::kRows; ++r) {
          if (r >= rows) break;
          const uint8_t* tile_from = from + static_cast<int64_t>(r) * p.columns * 2 * width;
#pragma unroll
          for (int i = 0; i * 512 < 256 * width; ++i)
            if (width > 1 || lane < 16) ptx::copy_async(stage + r * Ring::kTileBytes + i * 512, tile_from + i * 512);
        }
        stage += 256 * width;
        from += 256 * width;
      }
      to += Ring::kStageBytes;
      if (to == ring + Ring::kDepth * Ring::kStageBytes) to = ring;
      --left;
    }
    ptx::commit();
    if (--to_come == left_for_next && Tile::kFeedsTell) ptx::launch_dependents();
  }
};

}  // namespace lowbit::decode
