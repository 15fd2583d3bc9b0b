// In place of csrc/templates/ptx/async.cuh.
#pragma once
#include "on_host/warp.h"

namespace lowbit::ptx {

inline uint32_t shared_address(const void*) { return 0; }
inline int block_again() { return blockIdx.x; }
inline int thread_again() { return threadIdx.x; }
inline void keep_apart(const uint8_t*&) {}
inline void copy_async(uint32_t to, const void* from, int bytes = 16) { emulated::copy(to, from, bytes); }
inline void commit() { emulated::commit(); }
template <int Pending>
void wait_groups() {
  emulated::wait(Pending);
}
inline void arrivals_init(uint32_t barrier, int threads) { emulated::make_barrier(barrier, threads); }
inline void arrive(uint32_t barrier) { emulated::arrive(barrier); }
inline void arrive_with_copies(uint32_t barrier) { emulated::arrive_with_copies(barrier); }
inline void wait_arrivals(uint32_t barrier, uint32_t parity) { emulated::wait_arrivals(barrier, parity); }
template <int Threads>
void wait_at_barrier(int number) {
  emulated::meet(emulated::of_number[emulated::rank()][number], Threads);
}
template <int Threads>
void arrive_at_barrier(int number) {
  emulated::come(emulated::of_number[emulated::rank()][number], Threads);
}
inline float reciprocal(float a) { return 1 / a; }
inline void store_matrices_turned(uint32_t row, const uint32_t (&from)[4]) { emulated::store_turned(row, from); }
inline void end_reads() { emulated::races.end_reads(emulated::current); }
inline void launch_dependents() {}
inline void wait_for_previous_kernel() { emulated::wait_for_previous_kernel(); }

inline uint4 load_x(const void* from) { return *static_cast<const uint4*>(from); }
inline void store_global(void* to, uint4 v) { *static_cast<uint4*>(to) = v; }
inline uint32_t load_x_4(const void* from) { return *static_cast<const uint32_t*>(from); }
template <class Value>
inline void hold(Value&) {}
template <int Below>
inline void hold_below(int&) {}
inline int always_zero() { return 0; }
inline int found_here(int value) { return value; }
template <class Value>
inline void hold_common(Value&, int) {}
inline uint32_t load_x_16(const void* from) { return *static_cast<const uint16_t*>(from); }
template <int Stride>
void load_four(const void* from, int count, uint4 (&to)[4]) {
  for (int i = 0; i < 4; ++i)
    to[i] = i < count ? load_x(static_cast<const uint8_t*>(from) + i * Stride) : uint4{0, 0, 0, 0};
}

inline void load_matrices(uint32_t (&to)[4], uint32_t row) { emulated::load_matrices(to, row); }
inline uint32_t load_shared(uint32_t from) { return emulated::load<uint32_t>(from); }
inline void load_shared(uint32_t from, uint32_t& a, uint32_t& b) {
  a = emulated::load<uint32_t>(from, 8), b = load_shared(from + 4);
}
inline void load_shared(uint32_t from, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  a = emulated::load<uint32_t>(from, 16), b = load_shared(from + 4);
  c = load_shared(from + 8), d = load_shared(from + 12);
}
inline float load_float(const float* from) { return *from; }
inline uint32_t look_up(uint32_t from) { return load_shared(from); }
inline uint2 load_one_or_two(uint32_t from, bool two) { return {load_shared(from), two ? load_shared(from + 4) : 0}; }
inline void load_shared(uint32_t from, float (&v)[4]) {
  for (int i = 0; i < 4; ++i) v[i] = emulated::load<float>(from + 4 * i, i ? 4 : 16);
}
inline void load_shared(uint32_t from, float (&v)[2]) {
  v[0] = emulated::load<float>(from, 8), v[1] = emulated::load<float>(from + 4);
}
inline void store_shared(uint32_t to, uint32_t v) { emulated::store(to, v); }
inline void store_shared(uint32_t to, uint4 v) {
  emulated::store(to, v.x, 16), store_shared(to + 4, v.y);
  store_shared(to + 8, v.z), store_shared(to + 12, v.w);
}
inline void store_shared(uint32_t to, const float (&v)[1]) { emulated::store(to, v[0]); }
inline void store_shared(uint32_t to, const float (&v)[2]) {
  emulated::store(to, v[0], 8), emulated::store(to + 4, v[1]);
}
inline void store_shared(uint32_t to, const float (&v)[4]) {
  for (int i = 0; i < 4; ++i) emulated::store(to + 4 * i, v[i], i ? 4 : 16);
}

}  // namespace lowbit::ptx
