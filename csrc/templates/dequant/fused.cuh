// Integers without zeros to scaled values by one fused multiply-add each, where scales are even.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../halves.cuh"
#include "int.cuh"

namespace lowbit {

// The bits of a code alone are code * 2^q * 2^-24 in fp16 (int.cuh). A factor of scale * 2^(24 - q) / unit and an
// addend of -offset * scale / unit make (code - offset) * scale / unit of them, rounded once: the addend is exact
// while it is no subnormal number, since the offset of a type is a power of two. Why a unit: factors must stay below
// 65504 and scaled values above the subnormal numbers of fp16, which leaves some six binades for scales. Whether those
// of a weight lie there is found out when it is packed (lowbit/pack/known.py).
template <class Weight>
struct FusedDecoder {
  using Codes = planes::Codes<Weight::kBits>;
  using Words = typename Codes::Source;

  struct Group {
    uint32_t scale, addend;  // each a pair, of rows g and g + 8
  };

  const float step, base;

  // step_of_units: the step of struct Affine / unit; zero_base = offset / step of it.
  __device__ FusedDecoder(float step_of_units, float zero_base, float /*zero_on_code*/)
      : step(step_of_units), base(-zero_base) {}

  // scales: of rows g and g + 8.
  __device__ __forceinline__ Group group(float2 scales, float2 /*zeros*/, bool /*is_min*/) const {
    constexpr float kFirst = 0x1p24f / (1 << Codes::code_bit(0)), kSecond = 0x1p24f / (1 << Codes::code_bit(1));
    const float first = scales.x * step, second = scales.y * step;
    return {pack_pair<__half>(first * kFirst, second * kSecond), pack_pair<__half>(first * base, second * base)};
  }

  __device__ __forceinline__ void fragment(const Words& from, int f, const Group& group, uint32_t (&a)[4]) const {
    Codes::fragment(from, f, a);
    const uint32_t scale[2] = {ptx::twice<0>(group.scale), ptx::twice<1>(group.scale)};
    const uint32_t addend[2] = {ptx::twice<0>(group.addend), ptx::twice<1>(group.addend)};
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = ptx::multiply_add<__half>(a[r], scale[r % 2], addend[r % 2]);
  }
};

}  // namespace lowbit
