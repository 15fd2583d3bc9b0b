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
// Those that this thread made, or knows of.
inline void publish_to_cluster() {
  for (auto& [at, made] : emulated::barriers[emulated::rank()]) made.published |= emulated::knows_barrier(at);
}
inline void barrier_init(uint32_t barrier) {
  emulated::make_barrier(barrier, 1);
  publish_to_cluster();
}
inline void barrier_expect(uint32_t barrier, int bytes) { emulated::expect(barrier, bytes); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulated::wait_arrivals(barrier, parity); }

struct PlaceInCluster {
  uint32_t to, counts, block;
};
inline PlaceInCluster place_in_cluster(uint32_t to, uint32_t barrier, uint32_t block) { return {to, barrier, block}; }
template <int Count>
void store_behind(const PlaceInCluster& place, int offset, const float (&v)[Count]) {
  const uint32_t to = place.to + offset;
  std::memcpy(emulated::place(to, sizeof(v), sizeof(v), place.block), v, sizeof(v));
  emulated::use_barrier(place.counts, place.block);
  emulated::written_by(emulated::barrier(place.counts, place.block).engine, to, sizeof(v), place.block);
  emulated::tell_with_bytes(place.counts, sizeof(v), place.block);
}

}  // namespace lowbit::ptx
