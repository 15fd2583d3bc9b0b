// In place of csrc/templates/ptx/cluster.cuh.
#pragma once
#include "on_host/language.h"

namespace lowbit::ptx {

inline uint32_t cluster_rank() { return emulated::rank(); }
// Tells nothing but which barriers were published.
inline void cluster_arrive_early() { emulated::come_to_cluster(); }
inline void cluster_wait() {
  emulated::wait_for_cluster();
  emulated::learn_barriers();
}
inline void publish_to_cluster() {
  for (auto& [at, made] : emulated::barriers[emulated::rank()]) made.published = true;
}
inline void barrier_init(uint32_t barrier) {
  emulated::make_barrier(barrier, 1);
  publish_to_cluster();
}
inline void barrier_expect(uint32_t barrier, int bytes) { emulated::expect(barrier, bytes); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulated::wait_arrivals(barrier, parity); }

inline void tell_in_cluster(uint32_t barrier, uint32_t block) { emulated::arrive(barrier, block); }
inline void load_from_cluster(uint32_t from, uint32_t block, float (&v)[4]) {
  if (emulated::ended_of[block] == emulated::threads) emulated::fail("a read of a block that has ended", from);
  std::memcpy(v, emulated::place(from, sizeof(v), sizeof(v), block), sizeof(v));
  if (emulated::races.reads(emulated::current, block, from, sizeof(v), emulated::current))
    emulated::fail("a read of another block that may be too early", from);
}

template <int Count>
void store_in_cluster(uint32_t to, uint32_t barrier, uint32_t block, const float (&v)[Count]) {
  std::memcpy(emulated::place(to, sizeof(v), sizeof(v), block), v, sizeof(v));
  emulated::use_barrier(barrier, block);
  emulated::written_by(emulated::barrier(barrier, block).engine, to, sizeof(v), block);
  emulated::count_bytes(barrier, sizeof(v), block);
}

}  // namespace lowbit::ptx
