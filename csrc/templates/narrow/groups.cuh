// What scales and zeros of a group are worth to sums of its products, which warps that help find for all of a block.
//
// Stage: scales and zeros [row tile][group][16] behind its codes, and room (kGroupsAt, kGroups) for what is made of
// them, [row tile][group][g][kPitch]. Why helpers: a worker would take 6 instructions a group, 20 with zeros, each of
// 16 warps its own. Groups of 16 k have no room: workers find theirs themselves.
// Problem: what load.cuh needs, zero_base, zero_on_code, zero_on_value, stage_groups, group_fragments.
#pragma once
#include <cstdint>

#include "../dequant/load.cuh"
#include "../ptx/async.cuh"

namespace lowbit::narrow {

template <class Decoder, class Stage>
struct Groups {
  static constexpr bool kMade = Stage::kGroups > 0;
  static constexpr int kPitch = Stage::kZeros ? 16 : 8;  // bytes of two rows
  static constexpr int kRaw = Stage::kCodesAt + Stage::kCodes;

  // Of rows g and g + 8, and with zeros what sums of x are worth beside, total += scale * sum + on_x * x_sum, or of
  // whole ones what the decoder adds.
  struct Group {
    float scale[2], on_x[2];
    uint32_t addend[2];
  };

  // Whether helpers make those of this weight.
  template <class Problem>
  static __device__ __forceinline__ bool made(const Problem& p) {
    return kMade && !(Stage::kFine && p.group_fragments == 0);
  }

  // Of the rows whose scales and zeros lie at `from`, for the lane `number`.
  template <class Problem>
  static __device__ __forceinline__ Group find(const Problem& p, uint32_t from, int number) {
    const float2 scales = load_pair<Stage>(p, from, number);
    Group found{{scales.x, scales.y}, {}, {}};
    if constexpr (Stage::kWhole) {
      const float2 zeros = load_pair<Stage>(p, from + Stage::kScales, number);
      found.addend[0] = Decoder::addend_of(fmaf(zeros.x, p.zero_on_code, p.zero_base));
      found.addend[1] = Decoder::addend_of(fmaf(zeros.y, p.zero_on_code, p.zero_base));
    } else if constexpr (Stage::kZeros) {
      const float2 zeros = load_pair<Stage>(p, from + Stage::kScales, number);
      const float base = Decoder::kSubtractOffset ? p.zero_base : 0.0f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float zero = h ? zeros.y : zeros.x;
        // Why both factors, of which one is 0: a choice would take twice the instructions.
        found.on_x[h] = static_cast<float>(1 << Decoder::exponent(h)) *
                        fmaf(-found.scale[h], fmaf(zero, p.zero_on_code, base), zero * p.zero_on_value);
      }
    }
    return found;
  }

  // Those of all row tiles of a stage, by one of `threads`.
  template <class Problem>
  static __device__ __forceinline__ void make(const Problem& p, int row_tiles, uint32_t stage, int thread,
                                              int threads) {
    if (!made(p)) return;
    const int all = row_tiles * p.stage_groups * 8;
#pragma unroll 1
    for (int i = thread; i < all; i += threads) {
      const Group found = find(p, stage + kRaw + i * (group_bytes<Stage>(p) / 8), 0);
      const uint32_t to = stage + Stage::kGroupsAt + i * kPitch;
      if constexpr (Stage::kWhole) {
        ptx::store_shared(
            to, {found.scale[0], found.scale[1], __uint_as_float(found.addend[0]), __uint_as_float(found.addend[1])});
      } else if constexpr (Stage::kZeros) {
        ptx::store_shared(to, {found.scale[0], found.scale[1], found.on_x[0], found.on_x[1]});
      } else {
        ptx::store_shared(to, found.scale);
      }
    }
  }

  // Where a lane finds group `index` of a stage, counted over its row tiles.
  template <class Problem>
  static __device__ __forceinline__ uint32_t at(const Problem& p, int index, int lane) {
    return made(p) ? Stage::kGroupsAt + (index * 8 + lane / 4) * kPitch : kRaw + index * group_bytes<Stage>(p);
  }

  // The one `index` groups after that at `first`. Made: by helpers.
  template <bool Made, class Problem>
  static __device__ __forceinline__ Group load(const Problem& p, uint32_t first, int index, int lane) {
    if constexpr (!Made) {
      return find(p, first + index * group_bytes<Stage>(p), lane);
    } else {
      const uint32_t from = first + index * (8 * kPitch);
      Group loaded{};
      if constexpr (Stage::kZeros) {
        float all[4];
        ptx::load_shared(from, all);
        loaded.scale[0] = all[0], loaded.scale[1] = all[1];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (Stage::kWhole) loaded.addend[h] = __float_as_uint(all[2 + h]);
          if (!Stage::kWhole) loaded.on_x[h] = all[2 + h];
        }
      } else {
        ptx::load_shared(from, loaded.scale);
      }
      return loaded;
    }
  }
};

}  // namespace lowbit::narrow
