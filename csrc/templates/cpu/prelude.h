// Everything that a kernel needs from outside, included BEFORE a target region opens.
//
// Why: an inline function of a standard header that is first seen inside the region would be compiled for that CPU,
// and the linker may keep this copy for all callers, also on older CPUs.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../../args.h"
#include "../../scratch.h"

#define LOWBIT_FORCE_INLINE __attribute__((always_inline))
#define LOWBIT_INLINE static inline LOWBIT_FORCE_INLINE

namespace lowbit::cpu {

// The layout's constants (lowbit/pack/layout.py): a row block, a chunk of k, and a quad, the unit of a byte product.
constexpr int kRows = 16;
constexpr int kChunk = 32;
constexpr int kQuad = 4;
constexpr int kQuads = kChunk / kQuad;
constexpr int kVector = kRows * kQuad;  // bytes of one vector of a plane, and of one quad of unpacked codes

// How a byte stands for a value: value = (byte - offset) / 2^shift.
struct ByteForm {
  int shift;
  int offset;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace lowbit::cpu
