// x of a block in shared memory as 8-bit integers: block floating point, an exponent for 128 k of a token.
//
//   x = 2^e * (256 * high + low), both digits in -128 .. 127, |x| < 2^15 * 2^e
//
// Of fp16 and bf16 values all bits are kept down to 1/16 of the largest of the 128; smaller ones are off by at most
// 2^-16 of that one, less than its own rounding. Infinity and NaN make the exponent one, and with it every sum they are
// part of.
//
//   x       [step][token][kRowBytes]: digits, 0 beyond k; [64 k][low, high][t][4 fragments][k 2t, 2t+8, 2t+1, 2t+9],
//           fragments in the order of Order (bytes::Order)
//   table   [step][Tile::kTokens][Units] pairs of floats: 2^e, and the sum of 256 * high + low of each of so many parts
#pragma once
#include <type_traits>

#include "../dequant/bytes.cuh"
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

// The largest |x| of some pairs, as the bits of a float; NaN is the largest.
template <class Act, int Pairs>
__device__ __forceinline__ int largest(const uint32_t* pairs) {
  using Pair = typename std::conditional<std::is_same<Act, __half>::value, __half2, __nv_bfloat162>::type;
  Pair most = __habs2(reinterpret_cast<const Pair&>(pairs[0]));
#pragma unroll
  for (int i = 1; i < Pairs; ++i) most = __hmax2_nan(most, __habs2(reinterpret_cast<const Pair&>(pairs[i])));
  const float2 both = unpack_x<Act>(reinterpret_cast<const uint32_t&>(most));
  return max(__float_as_int(both.x) & 0x7FFFFFFF, __float_as_int(both.y) & 0x7FFFFFFF);
}

// Digits of the pairs k 2t, 2t + 1 (the first half of `pairs`) and 2t + 8, 2t + 9 (the second) of some t: words t of
// the low and of the high ones. Returns the sum of the integers.
template <class Act, int Words>
__device__ __forceinline__ int split_digits(const uint32_t* pairs, float inverse, uint32_t (&low)[Words],
                                            uint32_t (&high)[Words]) {
  // Added to a float below 2^22 this leaves its integer in the low bits. Why 128 more: the low digit is signed.
  constexpr float kMagic = 12582912.0f + 128.0f;
  int lows = 0, highs = 0;
#pragma unroll
  for (int t = 0; t < Words; ++t) {
    const float2 a = unpack_x<Act>(pairs[t]), b = unpack_x<Act>(pairs[Words + t]);
    const auto integer = [&](float x) { return __float_as_uint(fmaf(x, inverse, kMagic)); };
    const uint32_t first = __byte_perm(integer(a.x), integer(b.x), 0x5140);
    const uint32_t second = __byte_perm(integer(a.y), integer(b.y), 0x5140);
    low[t] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
    high[t] = __byte_perm(first, second, 0x7632);
    lows = __dp4a(static_cast<int>(low[t]), 0x01010101, lows);
    highs = __dp4a(static_cast<int>(high[t]), 0x01010101, highs);
  }
  return lows + 256 * highs;
}

// What a lane does with x of its block: rows of 128 k, each brought by 8 lanes, a fragment each, or by all of a warp
// where there are few: they are one chain of instructions then, which is shorter when more lanes share it, and a warp
// has an instruction for the largest and the sum of its lanes. Where its first row lies is found before the kernel
// before has ended; its next rows are of the same token.
template <class Act, class Tile, class Order, int Units>
struct Digits {
  const Position& at;
  int rows;              // of the block
  int few;               // whether 32 lanes bring a row
  int row;               // this lane's first; rows and more: none
  int steps;             // from one of its rows to the next: those that are brought at once
  int left;              // values from its own on
  const uint8_t* from;   // where these are
  uint32_t to, entry;    // where their digits go, and what is known of the row
  uint32_t pairs[2][8];  // the values of this row and of the next, 0 beyond k

  __device__ Digits(const Position& position, uint32_t x, uint32_t table)
      : at(position), rows((at.block_step(at.rank + 1) - at.block_step(at.rank)) * tokens()) {
    const Problem& p = at.p;
    const int few_steps = quotient(Tile::kWarps);
    few = rows <= 2 * few_steps * tokens() && p.k % kStepK == 0;
    steps = few ? few_steps : quotient(4 * Tile::kWarps);
    row = few ? at.warp : at.warp * 4 + at.lane / 8;
    const int step = quotient(row), token = row - step * tokens();
    const int fragment = few ? at.lane / 4 : at.lane % 8, word = few ? at.lane % 4 : 0;
    const int place = Order::place(fragment), k = (at.block_step(at.rank) + step) * kStepK + fragment * 16 + word * 2;
    from = p.x + 2 * (token * p.x_stride + k);
    to = x + row * kRowBytes + place / 4 * 128 + word * 16 + place % 4 * 4;
    entry = table + ((step * Tile::kTokens + token) * Units + fragment * Units / 8) * 8;
    if (step >= steps) row = rows;
    left = row < rows ? p.k - k : 0;
    ptx::hold(rows), ptx::hold(few), ptx::hold(row), ptx::hold(steps), ptx::hold(left);
    ptx::hold(from), ptx::hold(to), ptx::hold(entry);
  }

  __device__ __forceinline__ int tokens() const { return Tile::kTokens == 1 ? 1 : at.p.m; }
  // Of so many rows by tokens.
  __device__ __forceinline__ int quotient(int number) const {
    return tokens() == 1 ? number : static_cast<int>((number + 0.5f) * ptx::reciprocal(static_cast<float>(tokens())));
  }
  // The same as `steps`, of rows that so many lanes bring.
  template <int Lanes>
  __device__ __forceinline__ int steps_apart() const {
    return Tile::kTokens == 1 ? Tile::kWarps * (32 / Lanes) : steps;
  }

  // Sends for the lane's values of this row and the next. few: 0, 1, 8 and 9 of each, else 0 .. 15.
  __device__ __forceinline__ void ask() {
    if (few) {
      const int apart = steps_apart<32>();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool wanted = row + i * apart * tokens() < rows;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          pairs[i][half] = wanted ? ptx::load_x_4(from + i * apart * (2 * kStepK) + 16 * half) : 0;
      }
      return;
    }
    const int apart = steps_apart<8>();
    const uint8_t* next = from + apart * (2 * kStepK);
    const int next_left = row + apart * tokens() < rows ? left - apart * kStepK : 0;
    ask_row(from, left, pairs[0]), ask_row(next, next_left, pairs[1]);
    if (at.p.k % 8) ask_tail(from, left, pairs[0]), ask_tail(next, next_left, pairs[1]);
  }
  // Eights of a row's values that are whole; others 0.
  static __device__ __forceinline__ void ask_row(const uint8_t* from, int left, uint32_t (&values)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      take(half, left >= 8 * half + 8 ? ptx::load_x(from + 16 * half) : uint4{0, 0, 0, 0}, values);
  }
  static __device__ __forceinline__ void ask_tail(const uint8_t* from, int left, uint32_t (&values)[8]) {
    if (left <= 0 || left >= 16 || left % 8 == 0) return;
    const uint4 tail = load_x_chunk(from + left / 8 * 16, left / 8 * 8, left);
    if (left < 8) {
      take(0, tail, values);
    } else {
      take(1, tail, values);
    }
  }
  static __device__ __forceinline__ void take(int half, const uint4& four, uint32_t (&values)[8]) {
    values[4 * half] = four.x, values[4 * half + 1] = four.y;
    values[4 * half + 2] = four.z, values[4 * half + 3] = four.w;
  }

  // Stores digits of the values that have come, of Batch rows by so many lanes each, and what is known of them.
  template <int Lanes, int Batch>
  __device__ __forceinline__ void store() const {
    constexpr int kWords = 32 / Lanes;
    const int apart = steps_apart<Lanes>(), rows_apart = apart * tokens();
    // Why each step for all rows before the next: a row alone is a chain of instructions that wait for each other.
    int most[Batch], sum[Batch];
    float unit[Batch];
    uint32_t low[Batch][kWords], high[Batch][kWords];
#pragma unroll
    for (int i = 0; i < Batch; ++i) most[i] = largest<Act, 2 * kWords>(pairs[i]);
    if constexpr (Lanes == 32) {
#pragma unroll
      for (int i = 0; i < Batch; ++i) most[i] = __reduce_max_sync(~0u, most[i]);
    }
#pragma unroll
    for (int lanes = 1; lanes < Lanes && Lanes < 32; lanes *= 2)
#pragma unroll
      for (int i = 0; i < Batch; ++i) most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], lanes));
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      // Why a little more: 256 * high + low must stay below 32640, or the high digit would be 128.
      int top = __float_as_int(__int_as_float(most[i]) * 1.00396f) & 0x7F800000;
      top = max(top, 32 << 23);                                   // so that the inverse is a number
      const float inverse = __uint_as_float((268u << 23) - top);  // 2^14 / 2^top
      unit[i] = __int_as_float(top) * 6.103515625e-5f;            // infinity stays infinity
      sum[i] = split_digits<Act>(pairs[i], inverse, low[i], high[i]);
    }
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      if (row + i * rows_apart >= rows) continue;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        ptx::store_shared(to + i * rows_apart * kRowBytes + word * 16, low[i][word]);
        ptx::store_shared(to + i * rows_apart * kRowBytes + word * 16 + 64, high[i][word]);
      }
    }
    constexpr int kEach = Lanes / Units;  // lanes of a unit
    if constexpr (kEach == 32) {
#pragma unroll
      for (int i = 0; i < Batch; ++i) sum[i] = __reduce_add_sync(~0u, sum[i]);
    }
#pragma unroll
    for (int lanes = 1; lanes < kEach && kEach < 32; lanes *= 2)
#pragma unroll
      for (int i = 0; i < Batch; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], lanes);
#pragma unroll
    for (int i = 0; i < Batch; ++i)
      if (row + i * rows_apart < rows && at.lane % kEach == 0)
        ptx::store_shared(entry + i * apart * (8 * Units * Tile::kTokens), {unit[i], static_cast<float>(sum[i])});
  }

  // A lane's digits of a step; row: where its column's begin. Of units those whose columns it has, of others 0.
  static __device__ __forceinline__ void load(uint32_t row, uint32_t zeros, int lane, uint32_t (&digits)[8]) {
    if constexpr (Units == 1) {
      ptx::load_shared(row, digits[0], digits[1], digits[2], digits[3]);
      ptx::load_shared(row + 128, digits[4], digits[5], digits[6], digits[7]);
      return;
    }
    constexpr int kEach = 8 / Units;  // fragments of a unit
#pragma unroll
    for (int unit = 0; unit < Units; ++unit) {
      const uint32_t from = lane / 8 == unit % 4 ? row : zeros;
      const int place = Order::place(kEach * unit);
      if (kEach == 2 && Order::place(kEach * unit + 1) == place + 1) {
        ptx::load_shared(from + place / 4 * 128 + place % 4 * 4, digits[place], digits[place + 1]);
        continue;
      }
#pragma unroll
      for (int f = kEach * unit; f < kEach * (unit + 1); ++f)
        digits[Order::place(f)] = ptx::load_shared(from + Order::place(f) / 4 * 128 + Order::place(f) % 4 * 4);
    }
  }

  // Stores all that the warp brings, the first of which was asked for; the caller synchronizes.
  __device__ __forceinline__ void bring() {
    if (few) {
      if (row < rows) store<32, 2>();
      return;
    }
    const int apart = steps_apart<8>(), rows_apart = apart * tokens();
    int first = at.warp * 4;  // of the warp
#pragma unroll 1
    while (first + rows_apart < rows) {
      store<8, 2>();
      first += 2 * rows_apart;
      if (first >= rows) return;
      row += 2 * rows_apart, to += 2 * rows_apart * kRowBytes, entry += 2 * apart * (8 * Units * Tile::kTokens);
      from += 2 * apart * (2 * kStepK), left = row < rows ? left - 2 * apart * kStepK : 0;
      ask();
    }
    if (first < rows) store<8, 1>();
  }
};

}  // namespace lowbit::decode
