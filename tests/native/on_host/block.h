// A block of CUDA threads, or a cluster of them, on a CPU: fibers of one thread, each of which runs until it must meet
// others.
//
// Shared memory begins as NaN. Asynchronous copies are made at once, or (emulated::late) when they are waited for: what
// reads too early fails in one of the two. A place that is no part of shared memory, or not aligned, aborts, and so do
// a barrier that nobody made and a block that waits forever.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "on_host/byte_perm.h"

namespace emulated {

struct Index {
  unsigned x;
};
inline Index thread_index, block_index;
inline bool late = false;

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

// Fibers that wait for each other.
struct Meeting {
  int arrived = 0, turn = 0;
};

// A barrier that counts arrivals and bytes, with the copies that they are to come with.
struct Barrier {
  int threads = 0, left = 0;
  int64_t bytes = 0;   // that were announced and not asked for yet
  uint32_t phase = 0;  // phases that have ended
  std::vector<Copy> copies;
};

constexpr int kMostBlocks = 2, kMostWarps = 32 * kMostBlocks;  // of a cluster

inline std::map<uint32_t, Barrier> barriers[kMostBlocks];  // by address
inline uint8_t* memory;                                    // what the kernel calls shared memory, for each block
inline uint32_t memory_bytes;
inline std::vector<Fiber> fibers;
inline ucontext_t home;
inline int current, threads, first_block, cluster_blocks;  // current: of the cluster's threads
inline Meeting of_block[kMostBlocks], of_number[kMostBlocks], of_warp[kMostWarps];
inline int arrived_in_cluster;
inline uint32_t exchange[kMostWarps][32][8];  // what the lanes of a warp show each other
inline std::function<void()> body;

inline int rank() { return current / threads; }
inline void be(int fiber) { current = fiber, thread_index.x = fiber % threads, block_index.x = first_block + rank(); }

[[noreturn]] inline void fail(const char* what, uint32_t at) {
  std::printf("WRONG: %s at %u, thread %d of block %u\n", what, at, current, block_index.x);
  std::exit(1);
}

// Lets the others run.
inline void pause() {
  const int self = current;
  swapcontext(&fibers[self].context, &home);
  be(self);
}

inline void meet(Meeting& meeting, int count) {
  const int turn = meeting.turn;
  if (++meeting.arrived == count) {
    meeting.arrived = 0, ++meeting.turn;
    return;
  }
  while (meeting.turn == turn) pause();
}
inline void meet_block() { meet(of_block[rank()], threads); }
inline void meet_warp() { meet(of_warp[current / 32], 32); }

template <class T>
T& shared(uint32_t at, uint32_t align = sizeof(T)) {
  if (at % align || at + sizeof(T) > memory_bytes) fail("a bad address of shared memory", at);
  return *reinterpret_cast<T*>(&memory[rank() * memory_bytes + at]);
}

inline void apply(const Copy& copy) {
  if (copy.bytes < 0 || copy.bytes > 16 || reinterpret_cast<uintptr_t>(copy.from) % 16) fail("a bad copy", copy.to);
  uint8_t* to = &shared<uint8_t>(copy.to, 16);
  shared<uint8_t>(copy.to + 15);
  std::memset(to, 0, 16);
  std::memcpy(to, copy.from, copy.bytes);
}
inline void copy(uint32_t to, const void* from, int bytes) {
  late ? fibers[current].open.push_back({to, from, bytes}) : apply({to, from, bytes});
}
inline void commit() {
  Fiber& fiber = fibers[current];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}
inline void wait(int pending) {
  auto& groups = fibers[current].groups;
  for (; static_cast<int>(groups.size()) > pending; groups.pop_front())
    for (const Copy& one : groups.front()) apply(one);
}

inline Barrier& barrier(uint32_t at, int block = rank()) {
  const auto found = barriers[block].find(at);
  if (found == barriers[block].end()) fail("no barrier", at);
  return found->second;
}
inline void make_barrier(uint32_t at, int count) {
  shared<uint64_t>(at);
  barriers[rank()][at] = {count, count, 0, 0, {}};
}
inline void end_phase(Barrier& found) {
  if (found.left == 0 && found.bytes == 0) found.left = found.threads, ++found.phase;
}
inline void arrive(uint32_t at) {
  Barrier& found = barrier(at);
  --found.left;
  end_phase(found);
}
inline void expect(uint32_t at, int bytes) {
  barrier(at).bytes += bytes;
  arrive(at);
}
// That many of the bytes that were announced have been asked for.
inline void count_bytes(uint32_t at, int bytes, int block = rank()) {
  Barrier& found = barrier(at, block);
  found.bytes -= bytes;
  end_phase(found);
}
// Once all copies of this thread up to now have come.
inline void arrive_with_copies(uint32_t at) {
  Fiber& fiber = fibers[current];
  if (!fiber.groups.empty()) fail("copies of a group at a barrier", at);
  Barrier& found = barrier(at);
  found.copies.insert(found.copies.end(), fiber.open.begin(), fiber.open.end());
  fiber.open.clear();
  arrive(at);
}
// Until the phase of this parity has ended.
inline void wait_arrivals(uint32_t at, uint32_t parity) {
  Barrier& found = barrier(at);
  for (int round = 0; found.phase % 2 == parity; ++round) {
    if (round == 1 << 20) fail("a wait without end", at);
    pause();
  }
  for (const Copy& one : found.copies) apply(one);
  found.copies.clear();
}

inline void enter() {
  body();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &home);
}

// All clusters of a launch, one after the other.
inline void launch(const std::function<void()>& function, int blocks, int count, int shared_bytes, int cluster = 1) {
  body = function, threads = count, cluster_blocks = cluster;
  fibers.resize(cluster * count);
  for (first_block = 0; first_block < blocks; first_block += cluster) {
    memory_bytes = shared_bytes;
    std::memset(memory, 0xFF, cluster * memory_bytes);
    arrived_in_cluster = 0;
    for (auto& of : barriers) of.clear();
    for (Meeting& one : of_block) one = {};
    for (Meeting& one : of_number) one = {};
    for (Meeting& one : of_warp) one = {};
    for (Fiber& fiber : fibers) {
      fiber.stack.resize(1 << 16), fiber.done = false;
      fiber.groups.clear(), fiber.open.clear();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, enter, 0);
    }
    const int all = cluster * count;
    int left = all;
    for (int round = 0; left; ++round) {
      left = 0;
      for (int i = 0; i < all; ++i) {
        be(round % 2 ? all - 1 - i : i);  // Why both ways: the first to run must not always be the same
        if (fibers[current].done) continue;
        Fiber& fiber = fibers[current];
        swapcontext(&home, &fiber.context);
        left += !fiber.done;
      }
    }
  }
}

// ---- instructions of a warp, from the register ownership that the PTX ISA documents

template <class Act>
float half_of(uint32_t pair, int j) {
  const uint16_t bits = pair >> (16 * j);
  Act value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
  const int warp = current / 32, lane = current % 32;
  exchange[warp][lane][0] = row;
  meet_warp();
  for (int i = 0; i < 4; ++i)
    to[i] = shared<uint32_t>(exchange[warp][8 * i + lane / 4][0] + lane % 4 * 4, lane % 4 ? 4 : 16);
  meet_warp();
}

// The operands of this lane's part of a product, to the other lanes.
inline void show(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& own = exchange[current / 32][current % 32];
  std::copy(a, a + 4, own);
  own[4] = b0, own[5] = b1;
  meet_warp();
}

template <class Act>
void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int warp = current / 32, lane = current % 32;
  show(a, b0, b1);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, token = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      sum[i] += half_of<Act>(exchange[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                half_of<Act>(exchange[warp][token * 4 + k % 8 / 2][4 + k / 8], k % 2);
  }
  meet_warp();
}

// Unsigned bytes times signed ones: m16n8k32.
inline void mma_bytes(int (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int warp = current / 32, lane = current % 32;
  show(a, b0, b1);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k) {
      const uint32_t of_a = exchange[warp][row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
      const uint32_t of_b = exchange[warp][column * 4 + k % 16 / 4][4 + k / 16];
      sum[i] += static_cast<uint8_t>(of_a >> k % 4 * 8) * static_cast<int8_t>(of_b >> k % 4 * 8);
    }
  }
  meet_warp();
}

template <class T>
T of_lane(T value, int lane) {
  static_assert(sizeof(T) == 4);
  const int warp = current / 32;
  std::memcpy(&exchange[warp][current % 32][7], &value, 4);
  meet_warp();
  std::memcpy(&value, &exchange[warp][lane][7], 4);
  meet_warp();
  return value;
}

inline uint32_t transpose(uint32_t pair) {
  const int warp = current / 32, lane = current % 32;
  exchange[warp][lane][6] = pair;
  meet_warp();
  uint32_t turned = 0;
  for (int j = 0; j < 2; ++j)
    turned |= (exchange[warp][(lane % 4 * 2 + j) * 4 + lane / 8][6] >> (16 * (lane / 4 % 2)) & 0xFFFF) << (16 * j);
  meet_warp();
  return turned;
}

}  // namespace emulated

// What the headers of kernels expect of nvcc.
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
#define __dp4a emulated::dp4a
#define __habs2 emulated::magnitudes
#define __hmax2_nan emulated::largest
