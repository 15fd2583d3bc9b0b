// torch's threads, safe after a fork.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace lowbit {

// The process that loaded the library.
inline const pid_t loaded_in = getpid();

// Why: OpenMP's workers do not survive a fork, and a parallel region in the child waits for them for ever.
inline bool forked() { return getpid() != loaded_in; }

// Calls body(begin, end) over [0, count) in pieces of at least `grain`; in a forked child on its one thread.
template <class Body>
void parallel(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain || forked()) return body(0, count);
  torch::stable::parallel_for(0, count, std::max<int64_t>(grain, 1), body);
}

}  // namespace lowbit
