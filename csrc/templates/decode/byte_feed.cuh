// The weights of one warp of a ByteWorker on their way into its ring.
//
// A stage holds kSteps steps of kRows row tiles, plane by plane; scales of the same steps, then their zeros, lie in slots
// of their own, which outlive the stage until its sums are scaled. Every lane copies 16 bytes at a time; a commit group is
// one stage. fetch() is called once a stage also when nothing is left, so that the count of groups in flight stays what
// the caller waits for.
#pragma once
#include <cstdint>

#include "../ptx/async.cuh"
#include "shape.cuh"

namespace lowbit::decode {

template <class Weight, class Tile, bool Zeros>
struct ByteRing {
  static constexpr int kBits = Weight::kBits;
  // Row tiles side by side: they share x. Why not always 2: registers.
  static constexpr int kRows = kBits <= 4 && (Tile::kTokens < 16 || kBits != 3) ? 2 : 1;
  static constexpr int kSteps = kBits == 1 ? 4 : kBits == 2 ? 2 : 1;
  static constexpr int kTileBytes = 256 * kBits * kSteps;  // of one row tile in a stage
  static constexpr int kStageBytes = kTileBytes * kRows;
  static constexpr int kTileScales = 32 * kSteps;
  static constexpr int kSlotBytes = kTileScales * kRows * (Zeros ? 2 : 1);
  static constexpr int kFit = (Tile::kRingBytes - 16 * kSlotBytes) / kStageBytes;
  static constexpr int kDepth = kFit < 2 ? 2 : kFit > 8 ? 8 : kFit;  // stages
  // Scales are read up to 4 stages after their codes.
  static constexpr int kSlots = 16;
  static constexpr int kBytes = (kDepth * kStageBytes + kSlots * kSlotBytes + 127) / 128 * 128;
};

template <class Weight, class Tile, bool Zeros>
struct ByteFeed {
  using Ring = ByteRing<Weight, Tile, Zeros>;
  static constexpr int kBits = Weight::kBits, kRows = Ring::kRows, kSteps = Ring::kSteps;
  static constexpr int kPlanes = (kBits & 1) + (kBits >> 1 & 1) + (kBits >> 2 & 1) + kBits / 8;
  static constexpr int kScaleLanes = 2 * kSteps * kRows;  // that copy scales; as many more copy zeros

  const Problem& p;
  const Position& at;
  const uint32_t ring;
  // The next stage: `left` steps of row tiles `tile` .. are still to come.
  const uint8_t* planes[kPlanes];  // this lane's bytes
  const uint8_t* scales;           // of this lane's row
  int tile, left;
  uint32_t rows_apart;  // 0 where there is no second row tile: the first comes twice then
  uint32_t to, slot;

  // Planes are met widest first: loops run over widths 8, 4, 2, 1 and pass over those that a code does not have.
  static constexpr __host__ __device__ int plane_index(int width) {
    return (width < 8 && kBits & 8) + (width < 4 && kBits & 4) + (width < 2 && kBits & 2);
  }

  __device__ ByteFeed(const Position& position, uint32_t ring_address)
      : p(position.p),
        at(position),
        ring(ring_address),
        tile(position.first_step < position.end_step ? position.first_tile - kRows : position.end_tile),
        left(0),
        to(ring_address),
        slot(0) {}

  __device__ __forceinline__ const uint8_t* codes_of(int row_tile, int width) const {
    const int64_t code = static_cast<int64_t>(row_tile) * p.columns + at.first_step * kStepK;
    return p.codes + p.plane_stride * (kBits & ~(2 * width - 1)) + code * 2 * width;
  }

  __device__ __forceinline__ void open_tiles() {
    tile += kRows;
    if (tile >= at.end_tile) return;
    left = at.end_step - at.first_step;
    rows_apart = tile + 1 < at.end_tile ? p.columns : 0;
#pragma unroll
    for (int width = 8; width >= 1; width /= 2)
      if (kBits & width) planes[plane_index(width)] = codes_of(tile, width) + at.lane * 16;
    const int own = at.lane % kScaleLanes, row = min(tile + own / (2 * kSteps), at.end_tile - 1);
    scales = (at.lane < kScaleLanes ? p.scales : p.zeros) + static_cast<int64_t>(row) * p.groups * 32 + own % 2 * 16;
  }

  __device__ __forceinline__ void fetch() {
    if (left <= 0) open_tiles();
    if (left > 0) {
      uint32_t stage = to + at.lane * 16;
#pragma unroll
      for (int width = 8; width >= 1; width /= 2) {
        if (!(kBits & width)) continue;
        const uint8_t*& from = planes[plane_index(width)];
        constexpr int kBytes = kSteps * 256;  // times width
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const uint8_t* row = from + static_cast<uint64_t>(r ? rows_apart * (2 * width) : 0);
#pragma unroll
          for (int i = 0; i * 512 < kBytes * width; ++i) {
            // Why compare: a stage may be the last of its slice, and short.
            const bool wanted = kSteps == 1 ? i * 512 + 512 <= 256 * width || at.lane < 16
                                            : i * 512 + at.lane * 16 < left * 256 * width;
            if (wanted) ptx::copy_async(stage + r * Ring::kTileBytes + i * 512, row + i * 512);
          }
        }
        stage += kBytes * width;
        from += kBytes * width;
      }
      if (at.lane < (Zeros ? 2 : 1) * kScaleLanes) {
        const int step = min(at.end_step - left + at.lane / 2 % kSteps, at.end_step - 1);
        ptx::copy_async(ring + Ring::kDepth * Ring::kStageBytes + slot + at.lane * 16,
                        scales + static_cast<uint32_t>(step >> p.group_steps) * 32u);
      }
      slot = (slot + Ring::kSlotBytes) % (Ring::kSlots * Ring::kSlotBytes);
      to += Ring::kStageBytes;
      if (to == ring + Ring::kDepth * Ring::kStageBytes) to = ring;
      left -= kSteps;
    }
    ptx::commit();
  }

  // Asks for what the ring does not hold yet, so that memory has work while the kernel before this one computes.
  __device__ __forceinline__ void prefetch() const {
    const int steps = at.end_step - at.first_step;
    if (at.lane || steps <= 0) return;
    int budget = Tile::kPrefetchBytes;
#pragma unroll 1
    for (int row = at.first_tile; row < at.end_tile && budget > 0; ++row) {
#pragma unroll
      for (int width = 8; width >= 1; width /= 2)
        if (kBits & width) ptx::prefetch(codes_of(row, width), steps * 256 * width);
      budget -= steps * 256 * kBits;
    }
  }
};

}  // namespace lowbit::decode
