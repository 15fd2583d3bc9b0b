// In place of csrc/templates/dequant/scaled.cuh: scaled integers.
#pragma once
#include "templates/dequant/int.cuh"
#include "templates/form.cuh"

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
    on_host::fragment<Act>(from, f, a, [&](int code, int h) {
      float value = step * (code - base);
      if (kZeros && !group.is_min) value -= group.zero[h];
      value *= group.scale[h];
      if (kZeros && group.is_min) value += group.zero[h];
      return value;
    });
  }
};

}  // namespace lowbit
