// What the headers of kernels expect of nvcc: words of the language, and functions of one thread or a block.
#pragma once
#include "on_host/warp.h"

#undef __launch_bounds__
#undef __maxnreg__
#undef __grid_constant__
#undef __shared__
#undef __global__
#undef __device__
#undef __forceinline__
#undef __align__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __shared__
#define __global__
#define __device__
#define __forceinline__ inline
#define __align__(bytes)
#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
using std::max;
using std::min;
inline void __syncthreads() { emulated::meet_block(); }
inline void __syncwarp() { emulated::meet_warp(); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated::of_lane(value, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::of_lane(value, emulated::current % 32 ^ mask);
}
template <class T, class Of>
T of_all_lanes(T value, const Of& of) {
  for (int mask = 1; mask < 32; mask *= 2) value = of(value, emulated::of_lane(value, emulated::current % 32 ^ mask));
  return value;
}
inline int __reduce_max_sync(unsigned, int value) {
  return of_all_lanes(value, [](int one, int other) { return std::max(one, other); });
}
inline int __reduce_add_sync(unsigned, int value) { return of_all_lanes(value, std::plus<int>()); }

// Others of one thread. Why macros: CUDA's headers declare some of them.
namespace emulated {
template <class To, class From>
To as(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline int dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return sum;
}
template <class Pair, class Of>
Pair halves(Pair a, Pair b, const Of& of) {
  const uint32_t first = as<uint32_t>(a), second = as<uint32_t>(b);
  uint32_t made = 0;
  for (int i = 0; i < 32; i += 16) made |= static_cast<uint32_t>(of(first >> i & 0xFFFF, second >> i & 0xFFFF)) << i;
  return as<Pair>(made);
}
template <class Pair>
Pair magnitudes(Pair a) {
  return halves(a, a, [](uint32_t bits, uint32_t) { return bits & 0x7FFF; });
}
// Of magnitudes, whose order is that of their bits, NaN above all.
template <class Pair>
Pair largest(Pair a, Pair b) {
  return halves(a, b, [](uint32_t one, uint32_t other) { return std::max(one, other); });
}
}  // namespace emulated
#define __uint_as_float emulated::as<float, uint32_t>
#define __int_as_float emulated::as<float, int>
#define __float_as_uint emulated::as<uint32_t, float>
#define __float_as_int emulated::as<int, float>
#define __byte_perm emulated::byte_perm
#define __umulhi emulated::multiply_high
#define __dp4a emulated::dp4a
#define __habs2 emulated::magnitudes
#define __hmax2_nan emulated::largest
