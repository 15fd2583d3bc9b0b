// The weights of one warp on their way into its ring: codes stage by stage, scales chunk by chunk.
//
// Every lane copies 16 bytes at a time; a commit group is one stage. fetch() is called once a stage also when nothing
// is left, so that the count of groups in flight stays what the caller waits for.
#pragma once
#include <cstdint>

#include "../ptx/async.cuh"
#include "shape.cuh"

namespace lowbit::decode {

template <class Weight, class Tile, bool Fine, bool Zeros>
struct Feed {
  using Ring = decode::Ring<Weight, Tile, Fine, Zeros>;
  static constexpr int kBits = Weight::kBits;
  static constexpr int kPlanes = (kBits & 1) + (kBits >> 1 & 1) + (kBits >> 2 & 1) + kBits / 8;

  const Problem& p;
  const int lane, first_step, end_step, end_tile;
  const uint32_t ring;
  // The next stage: of row tile `tile`, `left` steps of its chunk are still to come, then comes the chunk at `chunk`.
  const uint8_t* planes[kPlanes];  // this lane's bytes
  int tile, rows, chunk, left;
  uint32_t to, scales_to;

  // Planes are met widest first: loops run over widths 8, 4, 2, 1 and pass over those that a code does not have.
  static constexpr __host__ __device__ int plane_index(int width) {
    return (width < 8 && kBits & 8) + (width < 4 && kBits & 4) + (width < 2 && kBits & 2);
  }

  __device__ Feed(const Position& at, uint32_t ring_address)
      : p(at.p),
        lane(at.lane),
        first_step(at.first_step),
        end_step(at.end_step),
        end_tile(at.end_tile),
        ring(ring_address),
        tile(at.first_step < at.end_step ? at.first_tile : at.end_tile),
        chunk(at.first_step),
        left(0),
        to(ring_address),
        scales_to(ring_address + Ring::kDepth * Ring::kStageBytes) {}

  // Finds the codes of a chunk and fetches its scales: lanes of the lower half do, those of the upper half fetch zeros.
  __device__ __forceinline__ void open_chunk() {
    left = 0;
    if (tile >= end_tile) return;
    left = min(Ring::kChunk, end_step - chunk);
    const int64_t code = static_cast<int64_t>(tile) * p.columns + chunk * kStepK;
#pragma unroll
    for (int width = 8; width >= 1; width /= 2)
      if (kBits & width)
        planes[plane_index(width)] =
            p.codes + p.plane_stride * (kBits & ~(2 * width - 1)) + code * 2 * width + lane * 16;

    const int last_k = min((chunk + left) * kStepK, p.k) - 1;
    const int group = chunk * kStepK >> p.group_shift;
    const int bytes = ((last_k >> p.group_shift) - group + 1) * 32 - lane % 16 * 16;
    const uint8_t* from =
        (lane < 16 ? p.scales : p.zeros) + (static_cast<int64_t>(tile) * p.groups + group) * 32 + lane % 16 * 16;
    const uint32_t place = scales_to + lane % 16 * 16 + (lane < 16 ? 0 : Ring::kGroupBytes);
    rows = min(Ring::kRows, end_tile - tile);
#pragma unroll
    for (int r = 0; r < Ring::kRows; ++r) {
      if (r >= rows) break;
#pragma unroll
      for (int i = 0; i < Ring::kGroupBytes / 256; ++i)
        if (i * 256 < bytes && (Zeros || lane < 16))
          ptx::copy_async(place + r * Ring::kTileScaleBytes + i * 256,
                          from + static_cast<int64_t>(r) * p.groups * 32 + i * 256);
    }
    scales_to += Ring::kScaleBytes;
    if (scales_to == ring + Ring::kBytes) scales_to -= Ring::kScaleSlots * Ring::kScaleBytes;

    chunk += Ring::kChunk;
    if (chunk >= end_step) chunk = first_step, tile += Ring::kRows;
  }

  __device__ __forceinline__ void fetch() {
    // Why not when the chunk before ends: its scales would come into a slot that may still be read.
    if (left <= 0) open_chunk();
    if (left > 0) {
      uint32_t stage = to + lane * 16;
#pragma unroll
      for (int width = 8; width >= 1; width /= 2) {
        if (!(kBits & width)) continue;
        constexpr int kStage = Ring::kSteps * 256;
        const uint8_t*& from = planes[plane_index(width)];
        // A stage may be the last of its slice, and short.
        const int bytes = Ring::kSteps == 1 ? kStage * width : min(left, Ring::kSteps) * 256 * width;
#pragma unroll
        for (int r = 0; r < Ring::kRows; ++r) {
          if (r >= rows) break;
          const uint8_t* tile_from = from + static_cast<int64_t>(r) * p.columns * 2 * width;
#pragma unroll
          for (int i = 0; i * 512 < kStage * width; ++i)
            if ((Ring::kSteps == 1 && i * 512 + 512 <= kStage * width) || i * 512 + lane * 16 < bytes)
              ptx::copy_async(stage + r * Ring::kTileBytes + i * 512, tile_from + i * 512);
        }
        stage += kStage * width;
        from += kStage * width;
      }
      to += Ring::kStageBytes;
      if (to == ring + Ring::kDepth * Ring::kStageBytes) to = ring;
      left -= Ring::kSteps;
    }
    ptx::commit();
  }

  __device__ __forceinline__ void prefetch() const {}
};

}  // namespace lowbit::decode
