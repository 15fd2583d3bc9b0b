// A block of CUDA threads, or a cluster of them, on a CPU: fibers of one thread, each of which runs until it must meet
// others.
//
// Shared memory begins as NaN. Asynchronous copies are made at once, or (emulated::late) when they are waited for: what
// reads too early fails in one of the two. A place that is no part of shared memory, or not aligned, aborts, and so do
// a barrier that nobody made, a block that waits forever, and two accesses that nothing puts in order (races.h). The
// kernel before ends when all threads wait for it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
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
#include "on_host/races.h"

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

// Copies that a thread waits for at once.
struct Group {
  std::vector<Copy> copies;
  uint32_t count = 0;  // what the thread's engine has done by then
};

struct Fiber {
  ucontext_t begin;
  jmp_buf place;  // where it left
  std::vector<char> stack;
  bool begun, done;
  bool (*may_go_on)(const void* asks);  // what it waits for, none if it does not
  const void* asks;
  uint32_t at;   // its barrier
  int asked;     // how many times it did not come true
  int turn = 0;  // of the cluster's barrier, when it came there last
  std::deque<Group> groups;
  Group open;
};

// Fibers that wait for each other. told: by those of this turn; known: to all after the one before.
struct Meeting {
  int arrived = 0, turn = 0;
  Clock told, known;
};

// A barrier that counts arrivals and bytes, with the copies that they are to come with.
struct Barrier {
  int threads = 0, left = 0;
  int64_t bytes = 0;   // that were announced and not asked for yet
  uint32_t phase = 0;  // phases that have ended
  std::vector<Copy> copies;
  uint32_t engine = 0;     // the actor whose copies it counts
  bool published = false;  // to the cluster
  Clock told, known;       // by those that arrived; to those that waited
};

constexpr int kMostBlocks = 8, kMostWarps = 32 * kMostBlocks;  // of a cluster
constexpr int kMostBarriers = 64;                              // of a block

inline std::map<uint32_t, Barrier> barriers[kMostBlocks];  // by address
inline uint8_t* memory;                                    // what the kernel calls shared memory, for each block
inline uint32_t memory_bytes;
inline std::vector<Fiber> fibers;
inline jmp_buf home;
inline int current, threads, first_block, cluster_blocks;  // current: of the cluster's threads
inline Meeting of_block[kMostBlocks], of_warp[kMostWarps], of_lanes[kMostWarps];
inline std::map<int, Meeting> of_number[kMostBlocks];
inline Meeting of_cluster;
inline int ended_in_cluster;                // threads
inline int moved;                           // waits that ended, and threads, since the threads had their turn last
inline bool previous_ended;                 // the kernel before
inline std::function<void()> hide, reveal;  // what that kernel leaves: called when a cluster begins, and when it ended
inline uint32_t exchange[kMostWarps][32][8];  // what the lanes of a warp show each other
inline std::function<void()> body;

inline int rank() { return current / threads; }
inline void be(int fiber) { current = fiber, thread_index.x = fiber % threads, block_index.x = first_block + rank(); }

[[noreturn]] inline void fail(const char* what, uint32_t at) {
  std::printf("WRONG: %s at %u, thread %d of block %u\n", what, at, current, block_index.x);
  std::exit(1);
}

// From a fiber to `launch` and back. Why not swapcontext: it asks the kernel for a mask of signals each time, with
// which wide tiles took 157 s, so 121. Not inlined: what setjmp returns to twice is to keep nothing in registers.
[[gnu::noinline]] inline void leave() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(home, 1);
}
[[gnu::noinline]] inline void go_on() {
  if (_setjmp(home) != 0) return;
  Fiber& fiber = fibers[current];
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
}

// Whether the current fiber has its turn.
inline bool may_go_on() {
  Fiber& fiber = fibers[current];
  if (fiber.may_go_on == nullptr) return true;
  if (!fiber.may_go_on(fiber.asks)) {
    if (++fiber.asked == 1 << 18) fail("a wait without end", fiber.at);
    return false;
  }
  fiber.may_go_on = nullptr;
  return true;
}

// Lets the others run.
template <class Done>
void wait_until(const Done& done, uint32_t at = 0) {
  if (!done()) {
    Fiber& fiber = fibers[current];
    fiber.may_go_on = [](const void* asks) { return static_cast<bool>((*static_cast<const Done*>(asks))()); };
    fiber.asks = &done, fiber.at = at, fiber.asked = 0;
    leave();
  }
  ++moved;
}

inline void come(Meeting& meeting, int count) {
  races.tell(current, meeting.told);
  if (++meeting.arrived < count) return;
  meeting.arrived = 0, ++meeting.turn;
  std::swap(meeting.told, meeting.known);
  meeting.told.clear();
}
inline void meet(Meeting& meeting, int count) {
  const int turn = meeting.turn;
  come(meeting, count);
  wait_until([&] { return meeting.turn != turn; });
  learn(races.known[current], meeting.known);
}
inline void meet_block() { meet(of_block[rank()], threads); }
inline void meet_warp() { meet(of_warp[current / 32], 32); }
// Lanes that show each other something, as instructions of a warp do: nothing is told of memory.
inline void wait_for_lanes() {
  Meeting& meeting = of_lanes[current / 32];
  const int turn = meeting.turn;
  if (++meeting.arrived == 32) meeting.arrived = 0, ++meeting.turn;
  wait_until([&] { return meeting.turn != turn; });
}

inline uint8_t* place(uint32_t at, uint32_t bytes, uint32_t align, int block = rank()) {
  if (at % align || at + bytes > memory_bytes) fail("a bad address of shared memory", at);
  return &memory[block * memory_bytes + at];
}
template <class T>
T load(uint32_t at, uint32_t align = sizeof(T)) {
  T value;
  std::memcpy(&value, place(at, sizeof(T), align), sizeof(T));
  if (races.reads(current, rank(), at, sizeof(T), current)) fail("a read that may be too early", at);
  return value;
}
template <class T>
void store(uint32_t at, T value, uint32_t align = sizeof(T)) {
  std::memcpy(place(at, sizeof(T), align), &value, sizeof(T));
  if (races.writes(current, rank(), at, sizeof(T), current)) fail("a write that may be too early", at);
}

// By an engine that this thread asks.
inline void written_by(uint32_t engine, uint32_t at, int bytes, int block = rank()) {
  if (races.writes(current, block, at, bytes, engine)) fail("a copy that may be too early", at);
}
// Engines: of barriers, of warps, of threads.
constexpr int kFirstOfWarps = kMostBarriers * kMostBlocks, kFirstOfThreads = kFirstOfWarps + kMostWarps;
inline uint32_t own_engine() { return static_cast<uint32_t>(fibers.size()) + kFirstOfThreads + current; }

inline void apply(const Copy& copy, int block = rank()) {
  if (copy.bytes < 0 || copy.bytes > 16 || reinterpret_cast<uintptr_t>(copy.from) % 16) fail("a bad copy", copy.to);
  uint8_t* to = place(copy.to, 16, 16, block);
  std::memset(to, 0, 16);
  std::memcpy(to, copy.from, copy.bytes);
}
inline void copy(uint32_t to, const void* from, int bytes) {
  Group& open = fibers[current].open;
  place(to, 16, 16);
  written_by(own_engine(), to, 16);
  open.count = races.engine[own_engine()];
  late ? open.copies.push_back({to, from, bytes}) : apply({to, from, bytes});
}
inline void commit() {
  Fiber& fiber = fibers[current];
  fiber.groups.push_back(fiber.open);
  fiber.open.copies.clear();
}
inline void wait(int pending) {
  auto& groups = fibers[current].groups;
  for (; static_cast<int>(groups.size()) > pending; groups.pop_front()) {
    for (const Copy& one : groups.front().copies) apply(one);
    races.known[current][own_engine()] = groups.front().count;
  }
}

inline Barrier& barrier(uint32_t at, int block = rank()) {
  const auto found = barriers[block].find(at);
  if (found == barriers[block].end()) fail("no barrier", at);
  return found->second;
}
inline void make_barrier(uint32_t at, int count) {
  auto& own = barriers[rank()];
  store<uint64_t>(at, 0);
  if (own.size() == kMostBarriers) fail("too many barriers", at);
  const uint32_t engine = static_cast<uint32_t>(fibers.size() + rank() * kMostBarriers + own.size());
  own[at] = {count, count, 0, 0, {}, engine, false, races.nothing, races.nothing};
}
inline void end_phase(Barrier& found) {
  if (found.left || found.bytes) return;
  found.left = found.threads, ++found.phase;
  found.told[found.engine] = races.engine[found.engine];
  learn(found.known, found.told);
}
// Whether this thread knows that a barrier of its block was made.
inline bool knows_barrier(uint32_t at) { return races.knows(current, races.of[rank()][at / 4].written); }
// Whoever uses a barrier must know that it was made; in another block that it was published.
inline std::vector<bool> sees_cluster;  // by thread
inline void learn_barriers() { sees_cluster[current] = true; }
inline void use_barrier(uint32_t at, int block = rank()) {
  const bool known = block == rank() ? knows_barrier(at) : sees_cluster[current] && barrier(at, block).published;
  if (!known) fail("a barrier that may be made later", at);
}
inline void arrive(uint32_t at, int block = rank()) {
  Barrier& found = barrier(at, block);
  use_barrier(at, block);
  races.tell(current, found.told);
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
// The same of what a thread stores behind a barrier (st.async): its count is a release, so whoever waits knows what the
// thread did before. Of boxes the copy engine alone is known.
inline void tell_with_bytes(uint32_t at, int bytes, int block) {
  races.tell(current, barrier(at, block).told);
  count_bytes(at, bytes, block);
}
// Boxes on their way, where copies come late: the newest comes first, when nothing else can go on. Why: the copy engine
// promises no order, and a thread that waits for its second turn at a barrier before the first has ended goes on at
// once.
struct Box {
  uint32_t barrier;
  int bytes, block;
};
inline std::vector<Box> under_way;
inline void let_one_come() {
  const Box newest = under_way.back();
  under_way.pop_back();
  count_bytes(newest.barrier, newest.bytes, newest.block);
}
// Once all copies of this thread up to now have come.
inline void arrive_with_copies(uint32_t at) {
  Fiber& fiber = fibers[current];
  if (!fiber.groups.empty()) fail("copies of a group at a barrier", at);
  Barrier& found = barrier(at);
  found.copies.insert(found.copies.end(), fiber.open.copies.begin(), fiber.open.copies.end());
  fiber.open.copies.clear();
  found.told[own_engine()] = fiber.open.count;
  arrive(at);
}
// Until the phase of this parity has ended.
inline void wait_arrivals(uint32_t at, uint32_t parity) {
  Barrier& found = barrier(at);
  use_barrier(at);
  wait_until([&] { return found.phase % 2 != parity; }, at);
  learn(races.known[current], found.known);
  for (const Copy& one : found.copies) apply(one);
  found.copies.clear();
}

// At the cluster's barrier those that have ended are not waited for.
inline void end_turn_of_cluster() {
  const int all = static_cast<int>(fibers.size());
  if (of_cluster.arrived == 0 || of_cluster.arrived + ended_in_cluster < all) return;
  of_cluster.arrived = 0, ++of_cluster.turn;
}
inline void come_to_cluster() {
  fibers[current].turn = of_cluster.turn;
  ++of_cluster.arrived;
  end_turn_of_cluster();
}
inline void wait_for_cluster() {
  wait_until([] { return of_cluster.turn != fibers[current].turn; });
}

inline void enter() {
  body();
  fibers[current].done = true;
  ++ended_in_cluster;
  end_turn_of_cluster();
  leave();
}

inline void wait_for_previous_kernel() {
  wait_until([] { return previous_ended; });
}

// All clusters of a launch, one after the other.
inline void launch(const std::function<void()>& function, int blocks, int count, int shared_bytes, int cluster = 1) {
  body = function, threads = count, cluster_blocks = cluster;
  fibers.resize(cluster * count);
  for (first_block = 0; first_block < blocks; first_block += cluster) {
    memory_bytes = shared_bytes;
    std::memset(memory, 0xFF, cluster * memory_bytes);
    of_cluster = {}, ended_in_cluster = 0, under_way.clear();
    for (auto& of : barriers) of.clear();
    for (Meeting& one : of_block) one = {};
    for (auto& of : of_number) of.clear();
    for (Meeting& one : of_warp) one = {};
    for (Meeting& one : of_lanes) one = {};
    sees_cluster.assign(cluster * count, false);
    races.begin(cluster * count, kFirstOfThreads + cluster * count, cluster, shared_bytes);
    for (Fiber& fiber : fibers) {
      fiber.stack.resize(1 << 16), fiber.begun = fiber.done = false, fiber.may_go_on = nullptr;
      fiber.groups.clear(), fiber.open = {};
      getcontext(&fiber.begin);
      fiber.begin.uc_stack.ss_sp = fiber.stack.data(), fiber.begin.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.begin, enter, 0);
    }
    previous_ended = false;
    if (hide) hide();
    const int all = cluster * count;
    int left = all;
    for (int round = 0; left; ++round) {
      left = moved = 0;
      for (int i = 0; i < all; ++i) {
        be(round % 2 ? all - 1 - i : i);  // Why both ways: the first to run must not always be the same
        if (fibers[current].done) continue;
        Fiber& fiber = fibers[current];
        if (may_go_on()) go_on();
        left += !fiber.done, moved += fiber.done;
      }
      if (moved) continue;
      if (!under_way.empty()) {
        let_one_come();
      } else if (!previous_ended) {  // as late as can be: nothing else goes on without it
        previous_ended = true;
        if (reveal) reveal();
      }
    }
  }
}

}  // namespace emulated
