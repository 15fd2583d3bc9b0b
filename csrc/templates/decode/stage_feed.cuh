// The weights of one warp on their way into its ring, a stage at a time, with their scales.
//
// A stage holds kSteps steps of kRows row tiles, plane by plane, then scales of the same steps, then their zeros: of a
// step one for each row, or, where groups are fine, one for each unit of it, of which only the first of a group is
// filled. Every lane copies 16 bytes at a time; a commit group is one stage. fetch() is called once a stage also when
// nothing is left, so that the count of groups in flight stays what the caller waits for. It is a third of what few
// tokens execute, so what can be is kept as it goes, not found again.
#pragma once
#include <cstdint>

#include "../dequant/planes.cuh"
#include "../ptx/async.cuh"
#include "tile.cuh"
#include "walk.cuh"

namespace lowbit::decode {

template <class Weight, class Tile, class Form>
struct StageRing {
  static constexpr int kBits = Weight::kBits, kUnits = Form::kUnits;
  static constexpr RingSizes kSizes = ring_of<Tile>(kBits, kUnits, Form::kZeros);
  static constexpr int kRows = kSizes.rows, kSteps = kSizes.steps;
  static constexpr int kTileBytes = kSizes.tile_bytes, kTileScales = kSizes.tile_scales;
  static constexpr int kScales = kTileBytes * kRows;  // where they begin in a stage
  static constexpr int kStageBytes = kSizes.stage_bytes, kDepth = kSizes.depth, kBytes = kSizes.bytes();
};

template <class Weight, class Tile, class Form>
struct StageFeed {
  using Ring = StageRing<Weight, Tile, Form>;
  static constexpr int kBits = Weight::kBits, kRows = Ring::kRows, kSteps = Ring::kSteps;
  static constexpr int kPlanes = planes::plane_count(kBits);
  static constexpr int kUnits = Ring::kUnits;
  static constexpr int kScaleCopies = 2 * kUnits * kSteps * kRows;  // of 16 bytes; zeros take as many more
  static constexpr int kCopies = (Form::kZeros ? 2 : 1) * kScaleCopies;

  const Problem& p;
  const int lane;
  const uint32_t ring;
  Walk walk;                      // the next tiles
  const uint8_t* codes[kPlanes];  // this lane's bytes of each plane at step 0, widest first
  const uint8_t* scales;          // of this lane's row
  int step;                       // the next stage begins with it; walk.end_step: there is none
  int own_step;                   // of a stage, whose scales this lane copies; many: none
  int left, left_for_next;        // stages to come, and when the next kernel may begin
  uint32_t rows_apart;            // 0 where there is no second row tile: the first comes twice then
  uint32_t to;                    // where it goes

  __device__ StageFeed(const Position& position, uint32_t ring_address)
      : p(position.p),
        lane(position.lane),
        ring(ring_address),
        walk(position),
        step(position.end_step),
        own_step(lane < kCopies ? lane / (2 * kUnits) % kSteps : 1 << 30),
        left(walk.stages(kRows, kSteps)),
        left_for_next(Tile::kFeedsTell ? Walk::left_for_next(left, p.next_after) : -1),
        to(ring_address) {}

  __device__ __forceinline__ bool is_done() const { return left == 0; }

  // Of two that are not negative, by one instruction.
  static __device__ __forceinline__ uint64_t wide_product(int a, int b) {
    return static_cast<uint64_t>(static_cast<uint32_t>(a)) * static_cast<uint32_t>(b);
  }

  __device__ __forceinline__ void open_tiles() {
    step = walk.first_step;
    rows_apart = walk.tile + 1 < walk.end_tile ? p.columns : 0;
    const uint64_t code = wide_product(walk.tile, p.columns);
#pragma unroll
    for (int width = 8; width >= 1; width /= 2)
      if (kBits & width)
        codes[planes::plane_index(kBits, width)] =
            p.codes + p.plane_stride * layout::plane_low(kBits, width) + code * 2 * width + lane * 16;
    const int own = lane % kScaleCopies, row = min(walk.tile + own / (2 * kUnits * kSteps), walk.end_tile - 1);
    scales = (lane < kScaleCopies ? p.scales : p.zeros) + wide_product(row, p.groups) * 32 + own % 2 * 16;
    walk.next(kRows);
  }

  __device__ __forceinline__ void fetch() {
    if (is_done()) return ptx::commit();  // Why at once: small products come here when they are in a hurry
    if (step >= walk.end_step) open_tiles();
    const uint32_t own = to + lane * 16;
    uint32_t stage = own;
#pragma unroll
    for (int width = 8; width >= 1; width /= 2) {
      if (!(kBits & width)) continue;
      // Why from step 0: one multiplication, where a pointer that goes on takes four instructions.
      const uint8_t* from = codes[planes::plane_index(kBits, width)] + wide_product(step, 256 * width);
      constexpr int kBytes = kSteps * 256;  // times width
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* row = from + (r ? static_cast<uint64_t>(rows_apart) * (2 * width) : 0);
#pragma unroll
        for (int i = 0; i * 512 < kBytes * width; ++i) {
          // Why compare: a stage may be the last of its slice, and short.
          const bool wanted = kSteps == 1  ? i * 512 + 512 <= 256 * width || lane < 16
                              : width >= 2 ? 2 * i < width || step + 2 * i / width < walk.end_step
                                           : step + 2 * i + lane / 16 < walk.end_step;
          if (wanted) ptx::copy_async(stage + r * Ring::kTileBytes + i * 512, row + i * 512);
        }
      }
      stage += kBytes * width;
    }
    fetch_scales(own + Ring::kScales);
    step += kSteps;
    to += Ring::kStageBytes;
    ptx::commit();
    if (--left == left_for_next && Tile::kFeedsTell) ptx::launch_dependents();
  }

  // Of the stage that is fetched: a row tile's step, or part of one, by two lanes.
  __device__ __forceinline__ void fetch_scales(uint32_t own) const {
    if (kSteps == 1 && !Form::kFine ? own_step > 0 : step + own_step >= walk.end_step) return;
    if constexpr (!Form::kFine) {
      const auto group = static_cast<uint32_t>(kSteps == 1 ? step : step + own_step) >> p.group_steps;
      ptx::copy_async(own, scales + static_cast<uint64_t>(group) * 32);
    } else {
      static_assert(kScaleCopies <= 32);
      const int unit = (step + own_step) * kUnits + lane / 2 % kUnits, shift = p.group_shift - Form::kUnitShift;
      if (unit & ((1 << shift) - 1)) return;  // not the first of its group
      const uint8_t* from = scales + static_cast<uint64_t>(min(unit >> shift, p.groups - 1)) * 32;
      ptx::copy_async(own, from);
      if constexpr (kCopies > 32) ptx::copy_async(own + 512, from + (p.zeros - p.scales));
    }
  }
};

}  // namespace lowbit::decode
