// In place of csrc/templates/dequant/scaled.cuh, which is made of instructions: integers by the layout's formula.
#pragma once
#include "on_host/block.h"
#include "templates/dequant/planes.cuh"
#include "templates/form.cuh"
#include "templates/types.cuh"

namespace lowbit {

template <class Weight, class Act, ZeroForm Zeros, bool /*Exact*/>
struct ScaledDecoder {
  static constexpr bool kZeros = Zeros != ZeroForm::kNone;
  using Words = planes::Words<Weight::kBits>;
  struct Group {
    float scale[2], zero[2];
    bool is_min;
  };
  float step, base;

  ScaledDecoder(float affine_step, float zero_base) : step(affine_step), base(zero_base) {}

  Group group(float2 scales, float2 zeros, bool is_min) const {
    return {{scales.x, scales.y}, {zeros.x, zeros.y}, is_min};
  }

  void fragment(const Words& from, int f, const Group& group, uint32_t (&a)[4]) const {
    for (int r = 0; r < 4; ++r) {
      const int h = r % 2, c = r / 2, u = 2 * f + h;
      a[r] = 0;
      for (int j = 0; j < 2; ++j) {
        int code = 0;
        for (int width = 8; width >= 1; width /= 2)
          if (Weight::kBits & width)
            code |= (from.of(width, u) >> (16 * j + 8 * c + Words::bit(width, u)) & ((1 << width) - 1))
                    << layout::plane_low(Weight::kBits, width);
        float value = step * (code - base);
        if (kZeros && !group.is_min) value -= group.zero[h];
        value *= group.scale[h];
        if (kZeros && group.is_min) value += group.zero[h];
        const Act rounded(value);
        uint16_t bits;
        std::memcpy(&bits, &rounded, 2);
        a[r] |= uint32_t{bits} << (16 * j);
      }
    }
  }
};

}  // namespace lowbit
