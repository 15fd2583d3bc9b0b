// Work cut into parts that differ by one at most, and what a worker has of tasks whose stages are shared evenly.
//
// Plain arithmetic that compiles for the host too, so that the tests can walk all workers without a GPU.
#pragma once
#include <cstdint>

#include "layout.cuh"

namespace lowbit {

// Part i begins at i * each + min(i, more).
struct Cut {
  int each, more;

  LOWBIT_HOST_DEVICE inline int operator()(int i) const {
#ifdef __CUDA_ARCH__
    return i * each + min(i, more);
#else
    return i * each + (i < more ? i : more);
#endif
  }
  // The part that holds `at`.
  LOWBIT_HOST_DEVICE constexpr int part_of(int at) const {
    const int longer = more * (each + 1);
    return at < longer ? at / (each + 1) : (at - more) / each;
  }
};

// How many of at most `most` workers share the stages of all tasks. Shares that end where tasks do leave few parts to
// add up, or none: if `even`, that is worth some more stages.
LOWBIT_HOST_DEVICE constexpr int workers_for(int tasks, int stages, int most, bool even) {
  const int64_t all = int64_t{tasks} * stages;
  const int longest = static_cast<int>((all + most - 1) / most);
  if (even) {
    const int turns = (tasks + most - 1) / most;
    const int fitting = tasks <= most ? tasks * (most / tasks) : tasks % turns == 0 ? tasks / turns : most;
    if ((all + fitting - 1) / fitting * 20 <= longest * 21 + 20) return fitting < all ? fitting : static_cast<int>(all);
  }
  return static_cast<int>((all + longest - 1) / longest);
}

// A task that a worker has a part of, and which stages of it: begin .. end - 1, counted over all tasks.
struct Part {
  int task, begin, end;
};

// The stages of a worker, counted over all tasks of `stages` each, and the task of the first.
struct Share {
  int begin, end, task;

  LOWBIT_HOST_DEVICE inline Share(const Cut& cut, int stages, int block)
      : begin(cut(block)), end(cut(block + 1)), task(begin / stages) {}

  // Calls body(part) for every task that it has a part of, in order.
  template <class Body>
  LOWBIT_HOST_DEVICE inline void for_parts(int stages, const Body& body) const {
    int from = begin, own = task;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    while (from < end) {
      const int rest = (own + 1) * stages, stop = rest < end ? rest : end;
      body(Part{own, from, stop});
      from = stop, ++own;
    }
  }
};

}  // namespace lowbit
