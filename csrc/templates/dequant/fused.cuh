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

  static constexpr bool kTakesPairs = true;  // scales as they are stored, of fp16
  // Fragments whose codes lie at places of their own, and have a factor for each.
  static constexpr int kPlaces = Weight::kBits == 1 ? 4 : Weight::kBits == 2 || Weight::kBits == 3 ? 2 : 1;

  struct Group {
    uint32_t scale[kPlaces], addend;  // each a pair, of rows g and g + 8
  };

  // What brings scales to a middling size, 2^9 of a unit, and what makes addends of those. Why the size: 2^24 is no
  // number of fp16.
  const uint32_t middling, offset;

  // step_of_units: the step of struct Affine / unit; zero_base = offset / step of it.
  __device__ FusedDecoder(float step_of_units, float zero_base, float /*zero_on_code*/)
      : middling(both_halves<__half>(step_of_units * 0x1p9f)), offset(both_halves<__half>(zero_base * -0x1p-9f)) {}

  // scales: of rows g and g + 8, in fp16. All are multiplied by powers of two, which is exact but for subnormal
  // numbers.
  __device__ __forceinline__ Group group(uint32_t scales) const {
    Group made;
    const uint32_t found = ptx::multiply<__half>(scales, middling);
#pragma unroll
    for (int f = 0; f < kPlaces; ++f) {
      const uint32_t factors = (30u - Codes::place(f, 0)) << 10 | (30u - Codes::place(f, 1)) << 26;  // 2^(15 - q)
      made.scale[f] = ptx::multiply<__half>(found, factors);
    }
    made.addend = ptx::multiply<__half>(found, offset);
    return made;
  }

  __device__ __forceinline__ void fragment(const Words& from, int f, const Group& group, uint32_t (&a)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) Codes::alone(Codes::placed(from, f, h), Codes::place(f, h), h, a);
    const uint32_t own = group.scale[f % kPlaces];
    const uint32_t scale[2] = {ptx::twice<0>(own), ptx::twice<1>(own)};
    const uint32_t addend[2] = {ptx::twice<0>(group.addend), ptx::twice<1>(group.addend)};
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = ptx::multiply_add<__half>(a[r], scale[r % 2], addend[r % 2]);
  }
};

}  // namespace lowbit
