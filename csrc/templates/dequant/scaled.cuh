// Codes to scaled values as the A operand of a product: scale * (value - zero) or scale * value + zero, in x's type.
//
// The nearest whole zero is taken away from an integer exactly; its scale, and what the zero is more than whole, follow
// with one rounding: the error is that of a weight expanded to x's type. Zeros of floats take one more. Sums then need
// no scale of their own, however many tokens they hold.
#pragma once

#include "../form.cuh"
#include "float.cuh"

namespace lowbit {

// Codes to numbers value / kFactor / step, exact; step as in struct Affine, 1 for floats. Their last instruction is
// number = bits * factor + addend, of each row half.
struct LastStep {
  uint32_t factor[2], addend[2];
};

// Tiny: numbers that are never scaled themselves may be as small as fp16 has them.
template <class Weight, class Act, bool Tiny>
struct ExactDecoder;

// fp16 integers: `1024 + code * 2^q` is one lop3, then a fused multiply-add takes 1024 and the offset away. Tiny ones
// are bits alone, code * 2^q * 2^-24, that it brings to (code - offset) * 2^-24. Why: these cost the tensor cores less
// energy, by which products of 128 rows and more are bound: on an H200 8192 x 8192 with n256 and 256 rows takes 2.6%
// (int4) and 3.1% (int8) less than by whole numbers (nvidia-h200/tiny_numbers_20261129.json).
template <int Bits, bool Tiny>
struct ExactDecoder<Int<Bits>, __half, Tiny> {
  using Codes = planes::Codes<Bits>;
  using Words = typename Codes::Source;
  // Why: the offset of int1 is 0.5, and 1024.5 is no fp16 number. Twice the code is made of one that lies a bit higher.
  static constexpr int kLift = Bits == 1 ? 1 : 0;
  static constexpr float kFactor = (Tiny ? 0x1p24f : 1.0f) / (1 << kLift);
  static __host__ __device__ constexpr int code_bit(int h) { return Codes::code_bit(h) + kLift; }

  LastStep last;

  __device__ explicit ExactDecoder(float offset) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      last.factor[h] = planes::halves((15u + kLift - code_bit(h)) << 10);  // 2^(lift - q)
      last.addend[h] = both_halves<__half>(addend(h, offset));
    }
  }
  static __device__ __forceinline__ float addend(int h, float offset) {
    return Tiny ? offset * (-1.0f / kFactor) : -(1024.0f / (1 << code_bit(h)) + offset) * (1 << kLift);
  }

  static __device__ __forceinline__ void fragment(const Words& from, int f, const LastStep& last, uint32_t (&a)[4]) {
    constexpr uint32_t kBase = Tiny ? 0 : 0x64006400u;  // 1024
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t word = Codes::merged(from, f, h, kLift);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t& to = a[h + 2 * c];
        if constexpr (Bits == 8) {
          to = __byte_perm(word, kBase, c ? 0x5351 : 0x5250);
        } else {
          to = ptx::masked_or(c ? word >> 8 : word, planes::halves(((1u << Bits) - 1) << code_bit(h)), kBase);
        }
        to = ptx::multiply_add<__half>(to, last.factor[h], last.addend[h]);
      }
    }
  }
};

// bf16 integers: as those of Decoder.
template <int Bits, bool Tiny>
struct ExactDecoder<Int<Bits>, __nv_bfloat16, Tiny> {
  using Codes = planes::Codes<Bits>;
  using Words = typename Codes::Source;
  static constexpr float kFactor = Decoder<Int<Bits>, __nv_bfloat16>::kUnit;

  LastStep last;

  __device__ explicit ExactDecoder(float offset) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      last.factor[h] = planes::halves((254u - Codes::code_bit(h)) << 7);  // 2^(127 - q)
      last.addend[h] = both_halves<__nv_bfloat16>(addend(h, offset));
    }
  }
  static __device__ __forceinline__ float addend(int /*h*/, float offset) { return offset * (-1.0f / kFactor); }

  static __device__ __forceinline__ void fragment(const Words& from, int f, const LastStep& last, uint32_t (&a)[4]) {
    Codes::fragment(from, f, a);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = ptx::multiply_add<__nv_bfloat16>(a[r], last.factor[r & 1], last.addend[r & 1]);
  }
};

// Floats: the bits of Decoder's number without its factor.
template <int Exponent, int Mantissa, class Act, bool Tiny>
struct ExactDecoder<Float<Exponent, Mantissa>, Act, Tiny> {
  using Base = Decoder<Float<Exponent, Mantissa>, Act>;
  using Words = typename Base::Words;
  static constexpr float kFactor = 1.0f;

  LastStep last;

  __device__ explicit ExactDecoder(float /*offset*/)
      : last{{Base::kFactor, Base::kFactor}, {ptx::kMinusZeros, ptx::kMinusZeros}} {}
  static __device__ __forceinline__ float addend(int /*h*/, float offset) { return -offset; }

  static __device__ __forceinline__ void fragment(const Words& from, int f, const LastStep& last, uint32_t (&a)[4]) {
    Base::bits(from, f, {~0u, ~0u}, a);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = ptx::multiply_add<Act>(a[r], last.factor[r & 1], last.addend[r & 1]);
  }
};

// Whether exact values are bits without a last step, in units of their own: of row halves all are kept, or none.
template <class Weight, class Act>
constexpr bool kBareBits = false;
template <int Exponent, int Mantissa>
constexpr bool kBareBits<Float<Exponent, Mantissa>, __half> = true;

// Exact: values stay numbers value / factor() without scale, and the scale of a group is that of its sums (`on_sums`).
template <class Weight, class Act, ZeroForm Zeros, bool Exact>
struct ScaledDecoder {
  static constexpr bool kAny = Zeros == ZeroForm::kAny, kWhole = Zeros == ZeroForm::kWhole;
  static_assert(!(Exact && kAny), "the difference of a value and any zero is no number with few digits");
  using Numbers = ExactDecoder<Weight, Act, Exact>;
  using Words = typename Numbers::Words;
  static constexpr bool kBare = Exact && kBareBits<Weight, Act>;
  static constexpr bool kTakesPairs = false;  // but scales as floats

  // What one group of rows g and g + 8 needs. Exact values: their last step. Others: their last step's addend where
  // there are zeros, then number * scale + after, each as a pair of rows. Of bare bits the factor is which are kept.
  struct Group {
    LastStep last;
    uint32_t scale, addend, after;
    float on_sums[2];

    // Where values are exact: those of a row half become 0 unless `keep`. Why no branch: after one the compiler no
    // longer knows that a warp goes one way.
    __device__ __forceinline__ void keep(int h, bool keep) {
      last.factor[h] = keep ? last.factor[h] : 0, last.addend[h] = keep ? last.addend[h] : 0;
    }
  };

  // The nearest whole number of one below 2^22. Why not rintf: these are two additions, and that is a conversion, for
  // which there are fewer units.
  static __device__ __forceinline__ float nearest(float number) {
    constexpr float kOnes = 3 << 22;  // a float so large has no digits after the point
    return number + kOnes - kOnes;
  }

  const Numbers numbers;
  // per_step: what a zero takes from codes, 1 / step, or nothing where zeros are not meant to count.
  const float step, per_step, base;

  // zero_base = offset / step of struct Affine.
  __device__ ScaledDecoder(float affine_step, float zero_base, float zero_on_code)
      : numbers(zero_base), step(affine_step), per_step(zero_on_code), base(zero_base) {}
  // Of a codebook, whose table lies in shared memory; two floats are no such.
  ScaledDecoder(float, float) = delete;
  __device__ ScaledDecoder(uint32_t table, int lane)
      : numbers(table, lane), step(numbers.unit()), per_step(1.0f / step), base(0.0f) {}

  // A power of two: what sums of exact values are to be multiplied by.
  __device__ __forceinline__ float factor() const {
    if constexpr (kBare) return step * lowbit::Decoder<Weight, Act>::kUnit;
    return step * Numbers::kFactor;
  }

  // scales, zeros: of rows g and g + 8. is_min: the zero is added after the scale.
  __device__ __forceinline__ Group group(float2 scales, float2 zeros, bool is_min) const {
    const float scale[2] = {scales.x, scales.y}, zero[2] = {zeros.x, zeros.y};
    Group made{};
    float taken[2] = {}, after[2] = {};  // zeros, in codes; what is added to scaled values
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kWhole) taken[h] = zero[h] * per_step;
      if constexpr (kAny) {
        const float on_code = is_min ? 0.0f : zero[h] * per_step;
        taken[h] = Weight::kFloat ? on_code : nearest(on_code);
        after[h] = is_min ? zero[h] : (taken[h] - on_code) * step * scale[h];
      }
    }
    if constexpr (Exact) {
      made.last = numbers.last;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kBare) made.last.factor[h] = ~0u;
        made.on_sums[h] = scale[h];
        if constexpr (kWhole) made.last.addend[h] = both_halves<Act>(Numbers::addend(h, base + taken[h]));
      }
    } else {
      made.scale = pack_pair<Act>(scale[0] * factor(), scale[1] * factor());
      if constexpr (kWhole || kAny)
        made.addend = pack_pair<Act>(Numbers::addend(0, base + taken[0]), Numbers::addend(1, base + taken[1]));
      if constexpr (kAny) made.after = pack_pair<Act>(after[0], after[1]);
    }
    return made;
  }

  // What lane `from` has of its own for a group, where values are scaled. All lanes come here.
  static __device__ __forceinline__ Group of_lane(const Group& group, int from) {
    static_assert(!Exact);
    Group found{};
    found.scale = __shfl_sync(~0u, group.scale, from);
    if constexpr (kWhole || kAny) found.addend = __shfl_sync(~0u, group.addend, from);
    if constexpr (kAny) found.after = __shfl_sync(~0u, group.after, from);
    return found;
  }

  __device__ __forceinline__ void fragment(const Words& from, int f, const Group& group, uint32_t (&a)[4]) const {
    if constexpr (kBare) {
      lowbit::Decoder<Weight, Act>::bits(from, f, group.last.factor, a);
    } else if constexpr (Exact) {
      numbers.fragment(from, f, group.last, a);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if constexpr (Weight::kCodebook) a[r] = ptx::multiply<Act>(a[r], group.last.factor[r % 2]);
    } else {
      LastStep last = numbers.last;
      if constexpr (kWhole || kAny)
        last.addend[0] = ptx::twice<0>(group.addend), last.addend[1] = ptx::twice<1>(group.addend);
      numbers.fragment(from, f, last, a);
      const uint32_t scale[2] = {ptx::twice<0>(group.scale), ptx::twice<1>(group.scale)};
      const uint32_t after[2] = {ptx::twice<0>(group.after), ptx::twice<1>(group.after)};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if constexpr (kAny) {
          a[r] = ptx::multiply_add<Act>(a[r], scale[r % 2], after[r % 2]);
        } else {
          a[r] = ptx::multiply<Act>(a[r], scale[r % 2]);
        }
      }
    }
  }
};

// Integers as exact numbers of which each fragment has a factor of its own, known when this is compiled, and needs no
// shift (ValuesOf).
template <class Weight, class Act, ZeroForm Zeros>
struct PlacedDecoder {
  static constexpr int kBits = Weight::kBits;
  static constexpr bool kTakesPairs = false;
  using Numbers = ValuesOf<kBits, Act>;
  using Words = typename Numbers::Words;

  struct Group {
    uint32_t addend[2], kept[2];  // kept: of codes of a row half, all bits or none
    float on_sums[2];

    __device__ __forceinline__ void keep(int h, bool keep) {
      addend[h] = keep ? addend[h] : 0, kept[h] = keep ? ~0u : 0u;
    }
  };

  const Numbers numbers;
  const float step, per_step, base;

  __device__ PlacedDecoder(float affine_step, float zero_base, float zero_on_code)
      : numbers(zero_base), step(affine_step), per_step(zero_on_code), base(zero_base) {}

  __device__ __forceinline__ float factor() const { return step * Numbers::kUnit; }

  __device__ __forceinline__ Group group(float2 scales, float2 zeros, bool /*is_min*/) const {
    Group made{{numbers.addend, numbers.addend}, {~0u, ~0u}, {scales.x, scales.y}};
    if constexpr (Zeros == ZeroForm::kWhole) {
      made.addend[0] = Numbers::addend_of(base + zeros.x * per_step);
      made.addend[1] = Numbers::addend_of(base + zeros.y * per_step);
    }
    return made;
  }

  // The bits of a row half in every byte of a plane of `width` bits.
  static __host__ __device__ constexpr uint32_t half_of(int width, int h) {
    uint32_t mask = 0;
    for (int u = h; u < 8 / width; u += 2) mask |= ((1u << width) - 1) << Words::bit(width, u);
    return planes::bytes(mask);
  }

  // Codes of row halves that the group does not keep become 0.
  static __device__ __forceinline__ void leave_out(const Group& group, Words& words) {
#pragma unroll
    for (int width = 4; width >= 1; width /= 2) {
      if (!(kBits & width)) continue;
      const uint32_t mask = (group.kept[0] & half_of(width, 0)) | (group.kept[1] & half_of(width, 1));
#pragma unroll
      for (int i = 0; i < 2 * width; ++i) words.word[2 * layout::plane_low(kBits, width) + i] &= mask;
    }
  }

  __device__ __forceinline__ void fragment(const Words& from, int f, const Group& group, uint32_t (&a)[4]) const {
    Numbers::fragment(from, f, group.addend, a);
  }
};

}  // namespace lowbit
