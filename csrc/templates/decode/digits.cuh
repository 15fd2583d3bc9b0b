// x of a block in shared memory as 8-bit integers: block floating point, an exponent for 128 k of a token.
//
//   x = 2^e * (256 * high + low), both digits in -128 .. 127, |x| < 2^15 * 2^e
//
// Of fp16 and bf16 values all bits are kept down to 1/16 of the largest of the 128; smaller ones are off by at most
// 2^-16 of that one, less than its own rounding. Infinity and NaN make the exponent one, and with it every sum they are
// part of.
//
//   x       [step][token][kRowBytes]: digits, 0 beyond k; [64 k][low, high][t][4 fragments][k 2t, 2t+8, 2t+1, 2t+9],
//           fragments in order or, where EvenFirst, as 0, 2, 1, 3
//   table   [step][Tile::kTokens] pairs of floats: 2^e, and the sum of 256 * high + low
#pragma once
#include <type_traits>

#include "../ptx/async.cuh"
#include "activations.cuh"
#include "shape.cuh"

namespace lowbit::decode {

template <class Act>
__device__ __forceinline__ float2 unpack_x(uint32_t pair) {
  if constexpr (std::is_same<Act, __half>::value) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  }
}

// The largest |x| of 8 pairs, as the bits of a float; NaN is the largest.
template <class Act>
__device__ __forceinline__ int largest(const uint32_t (&pairs)[8]) {
  using Pair = typename std::conditional<std::is_same<Act, __half>::value, __half2, __nv_bfloat162>::type;
  Pair most = __habs2(reinterpret_cast<const Pair&>(pairs[0]));
#pragma unroll
  for (int i = 1; i < 8; ++i) most = __hmax2_nan(most, __habs2(reinterpret_cast<const Pair&>(pairs[i])));
  const float2 both = unpack_x<Act>(reinterpret_cast<const uint32_t&>(most));
  return max(__float_as_int(both.x) & 0x7FFFFFFF, __float_as_int(both.y) & 0x7FFFFFFF);
}

// Digits of 16 k: words t of the low and of the high ones. Returns the sum of the 16 integers.
template <class Act>
__device__ __forceinline__ int split_digits(const uint32_t (&pairs)[8], float inverse, uint32_t (&low)[4],
                                            uint32_t (&high)[4]) {
  // Added to a float below 2^22 this leaves its integer in the low bits. Why 128 more: the low digit is signed.
  constexpr float kMagic = 12582912.0f + 128.0f;
  int sum = 0;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float2 a = unpack_x<Act>(pairs[t]), b = unpack_x<Act>(pairs[4 + t]);  // k 2t, 2t + 1; 2t + 8, 2t + 9
    const auto integer = [&](float x) { return __float_as_uint(fmaf(x, inverse, kMagic)); };
    const uint32_t first = __byte_perm(integer(a.x), integer(b.x), 0x5140);
    const uint32_t second = __byte_perm(integer(a.y), integer(b.y), 0x5140);
    low[t] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
    high[t] = __byte_perm(first, second, 0x7632);
    sum = __dp4a(static_cast<int>(low[t]), 0x01010101, sum);
    sum += 256 * __dp4a(static_cast<int>(high[t]), 0x01010101, 0);
  }
  return sum;
}

// The 16 values of a fragment from k on, in pairs; 0 where k >= end.
__device__ __forceinline__ void load_x_pairs(const uint8_t* from, int k, int end, uint32_t (&pairs)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 values = {0, 0, 0, 0};
    // Why two ways: the short one is straight code, so that all loads of a lane are under way at once.
    if (end % 8 == 0) {
      if (k + 8 * half < end) values = ptx::load_x(from + 16 * half);
    } else {
      values = load_x_chunk(from + 16 * half, k + 8 * half, end);
    }
    pairs[4 * half] = values.x, pairs[4 * half + 1] = values.y;
    pairs[4 * half + 2] = values.z, pairs[4 * half + 3] = values.w;
  }
}

// All threads of the block bring x to `x` and its exponents and sums to `table`; the caller synchronizes.
// between() is called once, while the first of x is on its way.
template <class Act, class Tile, bool EvenFirst, class Between>
__device__ __forceinline__ void bring_digits(const Position& at, uint32_t x, uint32_t table, Between between) {
  const Problem& p = at.p;
  const int first = at.block_step(at.rank), rows = (at.block_step(at.rank + 1) - first) * p.m;
  const float tokens = 1.0f / static_cast<float>(p.m);
  const auto step_of = [&](int row) {
    return Tile::kTokens == 1 ? row : static_cast<int>((static_cast<float>(row) + 0.5f) * tokens);
  };
  // Eight lanes bring a row of 128 k, a fragment each.
  constexpr int kBatch = 2, kRows = Tile::kThreads / 8;
  const int f = at.lane % 8, place = EvenFirst ? f % 2 * 2 + f / 2 % 2 : f % 4;
  if (at.warp * 4 >= rows) between();
#pragma unroll 1
  for (int warp_start = at.warp * 4; warp_start < rows; warp_start += kBatch * kRows) {
    const int start = warp_start + at.lane / 8;
    uint32_t pairs[kBatch][8];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = start + i * kRows, step = step_of(row), k = (first + step) * kStepK + f * 16;
      load_x_pairs(p.x + 2 * ((row - step * p.m) * p.x_stride + k), k, row < rows ? p.k : 0, pairs[i]);
    }
    if (warp_start == at.warp * 4) between();
    // Why each step for all rows before the next: a row alone is a chain of instructions that wait for each other.
    int most[kBatch], sum[kBatch];
    float unit[kBatch];
    uint32_t low[kBatch][4], high[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) most[i] = largest<Act>(pairs[i]);
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2)
#pragma unroll
      for (int i = 0; i < kBatch; ++i) most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], lanes));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // Why a little more: 256 * high + low must stay below 32640, or the high digit would be 128.
      int top = __float_as_int(__int_as_float(most[i]) * 1.00396f) & 0x7F800000;
      top = max(top, 32 << 23);                                   // so that the inverse is a number
      const float inverse = __uint_as_float((268u << 23) - top);  // 2^14 / 2^top
      unit[i] = __int_as_float(top) * 6.103515625e-5f;            // infinity stays infinity
      sum[i] = split_digits<Act>(pairs[i], inverse, low[i], high[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = start + i * kRows;
      if (row >= rows) continue;
      const uint32_t to = x + row * kRowBytes + f / 4 * 128 + place * 4;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        ptx::store_shared(to + t * 16, low[i][t]);
        ptx::store_shared(to + t * 16 + 64, high[i][t]);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2)
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], lanes);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = start + i * kRows, step = step_of(row);
      if (row < rows && f == 0)
        ptx::store_shared(table + (step * Tile::kTokens + row - step * p.m) * 8, {unit[i], static_cast<float>(sum[i])});
    }
  }
}

}  // namespace lowbit::decode
