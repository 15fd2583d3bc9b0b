// The weights of one warp on their way into its ring, a stage at a time, with their scales.
//
// A stage holds kSteps steps of kRows row tiles, plane by plane; scales of the same steps, then their zeros, lie in
// slots of their own, which outlive the stage until its sums are scaled: of a step one for each row, or, where groups
// are fine, one for each unit of it, of which only the first of a group is filled. Every lane copies 16 bytes at a
// time; a commit group is one stage. fetch() is called once a stage also when nothing is left, so that the count of
// groups in flight stays what the caller waits for.
#pragma once
#include <cstdint>

#include "../dequant/planes.cuh"
#include "../ptx/async.cuh"
#include "walk.cuh"

namespace lowbit::decode {

template <class Weight, class Tile, class Form>
struct StageRing {
  static constexpr int kBits = Weight::kBits, kUnits = Form::kUnits;
  // Row tiles side by side: they share x. Why not of more bits: few stages would fit. Blocks of half a multiprocessor
  // have room for them, and small weights, which are theirs, are not brought as fast as they are multiplied.
  static constexpr int kRows = kBits <= (Tile::kKind == Kind::kHalf && Tile::kTokens <= 2 ? 6 : 4) ? 2 : 1;
  // Why fewer with fine groups: lanes copy their scales in two turns at most.
  static constexpr int kSteps = kBits > 2 ? 1 : Form::kFine ? 2 : 4 / kBits;
  static constexpr int kTileBytes = 256 * kBits * kSteps;  // of one row tile in a stage
  static constexpr int kStageBytes = kTileBytes * kRows;
  static constexpr int kTileScales = 32 * kUnits * kSteps;
  static constexpr int kSlotBytes = kTileScales * kRows * (Form::kZeros ? 2 : 1);
  // Scales are read up to so many stages after their codes: where few tokens leave columns for several steps.
  static constexpr int kLate = Form::kFine || 4 / Tile::kTokens <= kSteps ? 1 : 4 / Tile::kTokens / kSteps;
  // Why less for 4 tokens: narrow codes need no more, and longer rows of x fit.
  static constexpr int kOwn =
      kBits <= 2 && Tile::kKind == Kind::kWhole && Tile::kTokens == 4 ? Tile::kRingBytes * 5 / 8 : Tile::kRingBytes;
  // Why more: zeros would cost these a stage. Measured on an H200, 4096 x 4096, uint4 at one row: 4.13 to 3.56 us.
  static constexpr bool kMore =
      Form::kZeros && Tile::kKind == Kind::kHalf && Tile::kTokens <= 2 && (kBits == 4 || kBits == 5);
  static constexpr int kRoom = kMore ? kOwn + kOwn / 25 : kOwn;
  static constexpr int kFit = (kRoom - kLate * kSlotBytes) / (kStageBytes + kSlotBytes);
  static constexpr int kDepth = kFit < 2 ? 2 : kFit > 8 ? 8 : kFit;  // stages
  static constexpr int kSlots = kDepth + kLate, kSlotsBytes = kSlots * kSlotBytes;
  static constexpr int kBytes = (kDepth * kStageBytes + kSlotsBytes + 127) / 128 * 128;

  // A place among the slots that may have passed their end.
  static __device__ __forceinline__ uint32_t wrapped(uint32_t slot) {
    return slot >= kSlotsBytes ? slot - kSlotsBytes : slot;
  }
};

template <class Weight, class Tile, class Form>
struct StageFeed {
  using Ring = StageRing<Weight, Tile, Form>;
  static constexpr int kBits = Weight::kBits, kRows = Ring::kRows, kSteps = Ring::kSteps;
  static constexpr int kPlanes = planes::plane_count(kBits);
  static constexpr int kUnits = Ring::kUnits;
  static constexpr int kScaleCopies = 2 * kUnits * kSteps * kRows;  // of 16 bytes; zeros take as many more

  const Problem& p;
  const int lane;
  const uint32_t ring;
  Walk walk;  // the next tiles
  // The next stage: `left` steps of the slice are still to come.
  const uint8_t* codes[kPlanes];  // this lane's bytes of each plane, widest first
  const uint8_t* scales;          // of this lane's row
  int left;
  int before_next;      // stages until the next kernel may begin
  uint32_t rows_apart;  // 0 where there is no second row tile: the first comes twice then
  uint32_t to, slot;

  __device__ StageFeed(const Position& position, uint32_t ring_address)
      : p(position.p),
        lane(position.lane),
        ring(ring_address),
        walk(position),
        left(0),
        before_next(walk.last_before_next(p.next_after, kRows, kSteps)),
        to(ring_address),
        slot(0) {}

  __device__ __forceinline__ void open_tiles() {
    if (walk.tile >= walk.end_tile) return;
    left = walk.end_step - walk.first_step;
    rows_apart = walk.tile + 1 < walk.end_tile ? p.columns : 0;
    const int64_t code = static_cast<int64_t>(walk.tile) * p.columns + walk.first_step * kStepK;
#pragma unroll
    for (int width = 8; width >= 1; width /= 2)
      if (kBits & width)
        codes[planes::plane_index(kBits, width)] =
            p.codes + p.plane_stride * (kBits & ~(2 * width - 1)) + code * 2 * width + lane * 16;
    const int own = lane % kScaleCopies, row = min(walk.tile + own / (2 * kUnits * kSteps), walk.end_tile - 1);
    scales = (lane < kScaleCopies ? p.scales : p.zeros) + static_cast<int64_t>(row) * p.groups * 32 + own % 2 * 16;
    walk.next(kRows);
  }

  __device__ __forceinline__ void fetch() {
    if (left <= 0) open_tiles();
    if (left <= 0) return ptx::commit();  // Why so early: small products come here when they are in a hurry
    uint32_t stage = to + lane * 16;
#pragma unroll
    for (int width = 8; width >= 1; width /= 2) {
      if (!(kBits & width)) continue;
      const uint8_t*& from = codes[planes::plane_index(kBits, width)];
      constexpr int kBytes = kSteps * 256;  // times width
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* row = from + static_cast<uint64_t>(r ? rows_apart * (2 * width) : 0);
#pragma unroll
        for (int i = 0; i * 512 < kBytes * width; ++i) {
          // Why compare: a stage may be the last of its slice, and short.
          const bool wanted =
              kSteps == 1 ? i * 512 + 512 <= 256 * width || lane < 16 : i * 512 + lane * 16 < left * 256 * width;
          if (wanted) ptx::copy_async(stage + r * Ring::kTileBytes + i * 512, row + i * 512);
        }
      }
      stage += kBytes * width;
      from += kBytes * width;
    }
    fetch_scales();
    left -= kSteps;
    slot = Ring::wrapped(slot + Ring::kSlotBytes);
    to += Ring::kStageBytes;
    if (to == ring + Ring::kDepth * Ring::kStageBytes) to = ring;
    ptx::commit();
    if (--before_next == 0) ptx::launch_dependents();
  }

  // Of the stage that is fetched: a row tile's step, or part of one, by two lanes.
  __device__ __forceinline__ void fetch_scales() const {
    constexpr int kCopies = (Form::kZeros ? 2 : 1) * kScaleCopies;
    const uint32_t to_own = ring + Ring::kDepth * Ring::kStageBytes + slot + lane * 16;
    if (lane >= kCopies) return;
    const int step = min(walk.end_step - left + lane / (2 * kUnits) % kSteps, walk.end_step - 1);
    if constexpr (!Form::kFine) {
      ptx::copy_async(to_own, scales + static_cast<uint32_t>(step >> p.group_steps) * 32u);
    } else {
      static_assert(kScaleCopies <= 32);
      const int unit = step * kUnits + lane / 2 % kUnits, shift = p.group_shift - Form::kUnitShift;
      if (unit & ((1 << shift) - 1)) return;  // not the first of its group
      const uint8_t* from = scales + static_cast<uint32_t>(min(unit >> shift, p.groups - 1)) * 32u;
      ptx::copy_async(to_own, from);
      if constexpr (kCopies > 32) ptx::copy_async(to_own + 512, from + (p.zeros - p.scales));
    }
  }
};

}  // namespace lowbit::decode
