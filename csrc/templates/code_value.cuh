// The value of a code as an exact fp32 number, from a word that holds four codes, one a byte.
//
// Compiles for the host too, so that the tests can hold it against lowbit/dtypes.py.
#pragma once
#include <cstdint>
#include <cstring>

#include "../args.h"
#include "layout.cuh"
#include "types.cuh"

namespace lowbit {

template <class Weight>
struct CodeValue;

namespace code_value {

LOWBIT_HOST_DEVICE inline float as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// `base` with byte `place` of codes at byte `at`; the other bytes of base must be 0, or lie above it. One instruction.
template <int at>
LOWBIT_HOST_DEVICE inline uint32_t with_byte(uint32_t codes, int place, uint32_t base) {
#ifdef __CUDA_ARCH__
  return __byte_perm(codes, base, (0x7654 & ~(0xF << (4 * at))) | place << (4 * at));
#else
  return base | ((codes >> (8 * place)) & 0xFFu) << (8 * at);
#endif
}

}  // namespace code_value

template <int Bits>
struct CodeValue<Int<Bits>> {
  float step, minus;

  LOWBIT_HOST_DEVICE explicit CodeValue(Affine affine)
      : step(affine.step), minus(-(32768.0f * affine.step + affine.offset)) {}

  // Why 2^15: a code in the second byte of its mantissa is 2^15 + code, and step and offset of every type go off
  // exactly.
  LOWBIT_HOST_DEVICE float operator()(uint32_t codes, int place) const {
    const float biased = code_value::as_float(code_value::with_byte<1>(codes, place, 0x47000000u));
#ifdef __CUDA_ARCH__
    return __fmaf_rn(step, biased, minus);
#else
    return step * biased + minus;
#endif
  }
};

// Why no mask after the shift: codes hold nothing above the code of a byte.
template <int Bits>
struct CodeValue<Codebook<Bits>> {
  const float* table;  // [2^Bits], on a device in shared memory

  LOWBIT_HOST_DEVICE explicit CodeValue(const float* values) : table(values) {}

  LOWBIT_HOST_DEVICE float operator()(uint32_t codes, int place) const {
    return table[code_value::with_byte<0>(codes, place, 0)];
  }
};

template <int Exponent, int Mantissa>
struct CodeValue<Float<Exponent, Mantissa>> {
  using Type = Float<Exponent, Mantissa>;

  LOWBIT_HOST_DEVICE explicit CodeValue(Affine) {}

  LOWBIT_HOST_DEVICE float operator()(uint32_t codes, int place) const {
    // The sign at bit 31, then a shift that repeats it and leaves exponent and mantissa where those of fp32 meet.
    const uint32_t top = code_value::with_byte<3>(codes << (8 - Type::kBits), place, 0);
    constexpr uint32_t kMagnitude = ((1u << (Exponent + Mantissa)) - 1) << (23 - Mantissa);
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(top) >> (8 - Exponent));
    const float small = code_value::as_float(bits & (0x80000000u | kMagnitude));
    // Subnormals of the type are subnormals here; this is exact while nothing flushes them to 0.
    return small * code_value::as_float(static_cast<uint32_t>(254 - Type::kBias) << 23);  // 2^(127 - bias)
  }
};

}  // namespace lowbit
