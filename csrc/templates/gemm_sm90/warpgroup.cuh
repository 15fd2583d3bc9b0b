// What both kernels of wgmma have: warpgroups that take turns, and sums in units of a scale.
#pragma once
#include <type_traits>

#include "../columns.cuh"
#include "../ptx/async.cuh"
#include "../ptx/wgmma.cuh"

namespace lowbit::gemm_sm90 {

// The two warpgroups of a block multiply in turns, a step each: while one has the tensor cores to itself, the other
// scales its sums and makes operands. All threads of both go through begin, as many turns as the others (the first
// perhaps one more), and end.
struct Turns {
  static constexpr int kThreads = 256, kFirst = 1;  // kFirst: the barrier of the first warpgroup, then the second's
  const int own, other;

  __device__ explicit Turns(int warp) : own(kFirst + (warp >= 4)), other(kFirst + (warp < 4)) {}

  __device__ __forceinline__ void begin() const {
    if (own != kFirst) ptx::arrive_at_barrier<kThreads>(other);
  }
  __device__ __forceinline__ void take() const { ptx::wait_at_barrier<kThreads>(own); }
  __device__ __forceinline__ void give() const { ptx::arrive_at_barrier<kThreads>(other); }
  // Nobody waits for the turn that was given last: by the second one, or by the first if that had one more (`odd`).
  __device__ __forceinline__ void end(bool odd = false) const {
    if ((own == kFirst) != odd) ptx::wait_at_barrier<kThreads>(own);
  }
};

// Calls body(std::integral_constant<int, columns>()) for what columns_of is of a tile with so many tokens. Why so
// written: two branches lead to each, in front of products that the tensor cores wait for.
template <class Tile, class Body>
__device__ __forceinline__ void with_columns(int tokens, const Body& body) {
  constexpr int kTokens = Tile::kTokens;
  static_assert(kColumnSteps == 4, "as many as there are here");
  if constexpr (columns_of(kTokens, 1) == kTokens) {
    body(std::integral_constant<int, kTokens>());
  } else if (tokens > kTokens - 2 * kColumnStep) {
    if (tokens > kTokens - kColumnStep) {
      body(std::integral_constant<int, kTokens>());
    } else {
      body(std::integral_constant<int, kTokens - kColumnStep>());
    }
  } else if (tokens > kTokens - 3 * kColumnStep) {
    body(std::integral_constant<int, kTokens - 2 * kColumnStep>());
  } else {
    body(std::integral_constant<int, kTokens - 3 * kColumnStep>());
  }
}

// What the sums of a lane's row halves are counted in: the scale of the group that was added last. So values stay exact
// numbers, and a scale costs a multiplication of the sums, not of each value. At the next group:
// sum = sum * (last scale / next scale) + what is added.
struct Units {
  static constexpr float kLeast = 0x1p-64f, kNormal = 0x1p-126f;
  float now[2] = {0.0f, 0.0f};  // 0: nothing was added yet

  // Moves on to the scales of `group`: what sums are to be multiplied by. A group is left out where its scale is 0, or
  // so much smaller than the one before that it can't be seen beside that, but sums might overflow. Scales from 2^126
  // on (bf16) are too large for this.
  template <class Group>
  __device__ __forceinline__ void move_on(Group& group, float (&ratio)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = group.on_sums[h], quotient = now[h] * ptx::reciprocal(next);
      const bool counts = !(fabsf(next) <= fmaf(fabsf(now[h]), kLeast, kNormal));  // a scale that is NaN does
      ratio[h] = counts ? quotient : 1.0f;
      now[h] = counts ? next : now[h];
      group.keep(h, counts);
    }
  }

  // Of sums whose products are done.
  template <int Count>
  __device__ __forceinline__ static void scale(const float (&ratio)[2], float (&sum)[Count]) {
    ptx::settle(sum);
#pragma unroll
    for (int i = 0; i < Count; ++i) sum[i] *= ratio[i / 2 % 2];
  }
};

}  // namespace lowbit::gemm_sm90
