// What scales and zeros of a group are worth to sums of its products.
//
// Of fine groups a warp finds those of its row tile together, a lane those of two rows, and leaves them for all of its
// lanes in shared memory: room (Ring::groups, Stage::kGroups) for four pieces of K, each as long as a group but no more
// than so many fragments, [warp][piece][g][kPitch]. Why: lanes of four share rows, and each would take 6 instructions a
// group, 20 with zeros. Stage: scales and zeros [row tile][group][16] behind its codes. Problem: what load.cuh needs,
// zero_base, zero_on_code, zero_on_value, stage_groups, group_fragments.
#pragma once
#include <cstdint>

#include "../dequant/load.cuh"
#include "../ptx/async.cuh"

namespace lowbit::narrow {

// Of which type scales and zeros are, of fp16 if none is set.
struct ScaleTypes {
  bool bf16_scales, fp32_scales;
};

template <class Decoder, class Stage>
struct Groups {
  static constexpr bool kMade = Stage::kGroups > 0;
  static constexpr int kPitch = Stage::kZeros ? 16 : 8;  // bytes of two rows
  static constexpr int kRaw = Stage::kCodesAt + Stage::kCodes;

  // Of rows g and g + 8, and with zeros what sums of x are worth beside, total += scale * sum + on_x * x_sum, or of
  // whole ones what the decoder adds.
  struct Group {
    float scale[2], on_x[2];
    uint32_t addends;  // a pair
  };

  // Of the rows whose scales and zeros, of these types, lie at `from`, for the lane `number`.
  template <class Problem, class Types>
  static __device__ __forceinline__ Group find(const Problem& p, const Types& types, uint32_t from, int number) {
    const float2 scales = load_pair<Stage>(types, from, number);
    Group found{{scales.x, scales.y}, {}, {}};
    if constexpr (Stage::kWhole) {
      const float2 zeros = load_pair<Stage>(types, from + Stage::kScales, number);
      found.addends =
          Decoder::addends_of(fmaf(zeros.x, p.zero_on_code, p.zero_base), fmaf(zeros.y, p.zero_on_code, p.zero_base));
    } else if constexpr (Stage::kZeros) {
      const float2 zeros = load_pair<Stage>(types, from + Stage::kScales, number);
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

  // Where a lane finds group `index` of a stage, counted over its row tiles; where groups are made, the one that is its
  // own to make of four pieces of at most so many fragments, of which the first begins at that group.
  template <int Fragments, class Problem>
  static __device__ __forceinline__ uint32_t at(const Problem& p, int index, int lane) {
    if constexpr (!kMade) {
      return kRaw + index * group_bytes<Stage>(p);
    } else {
      const int own = index + (lane / 8 >> max(p.group_fragments - Fragments / 2, 0));
      return kRaw + own * group_bytes<Stage>(p) + lane % 8 * (group_bytes<Stage>(p) / 8);
    }
  }

  // A warp's room: where a lane leaves what it makes, and where it finds that of its rows.
  static constexpr int kRoom = 4 * 8 * kPitch;
  static __device__ __forceinline__ uint32_t made_at(uint32_t room, int lane) { return room + lane * kPitch; }
  static __device__ __forceinline__ uint32_t found_at(uint32_t room, int lane) { return room + lane / 4 * kPitch; }

  // Leaves the group whose scales and zeros lie at `from`. All lanes come here; no lane may still read others. Apart:
  // whether by a branch for each type of these. A choice takes twice the instructions, but nothing is moved over a
  // branch.
  template <bool Apart, class Problem>
  static __device__ __forceinline__ void make(const Problem& p, uint32_t from, uint32_t to) {
    const auto leave = [&](const auto& types) {
      const Group found = find(p, types, from, 0);
      __syncwarp();
      if constexpr (Stage::kWhole) {
        ptx::store_shared(to, {found.scale[0], found.scale[1], __uint_as_float(found.addends), 0.0f});
      } else if constexpr (Stage::kZeros) {
        ptx::store_shared(to, {found.scale[0], found.scale[1], found.on_x[0], found.on_x[1]});
      } else {
        ptx::store_shared(to, found.scale);
      }
    };
    bool fp32 = false;
    if constexpr (Stage::kFloatScales) fp32 = p.fp32_scales;
    if (!Apart) {
      leave(p);
    } else if (fp32) {
      leave(ScaleTypes{false, true});
    } else if (p.bf16_scales) {
      leave(ScaleTypes{true, false});
    } else {
      leave(ScaleTypes{false, false});
    }
    __syncwarp();
  }

  // That of a piece, for this lane's rows, which lie at `from`.
  static __device__ __forceinline__ Group load(uint32_t from, int piece) {
    from += piece * (8 * kPitch);
    Group loaded{};
    if constexpr (Stage::kZeros) {
      float all[4];
      ptx::load_shared(from, all);
      loaded.scale[0] = all[0], loaded.scale[1] = all[1];
      if constexpr (Stage::kWhole) {
        loaded.addends = __float_as_uint(all[2]);
      } else {
        loaded.on_x[0] = all[2], loaded.on_x[1] = all[3];
      }
    } else {
      ptx::load_shared(from, loaded.scale);
    }
    return loaded;
  }
};

}  // namespace lowbit::narrow
