// Which kernel a product on CUDA tries first: that of a table of measured times, else the one that plan.h predicts to
// be the fastest. Both are looked up in a small memory of the calling thread; nothing here takes a lock for a product.
#pragma once
#include <cstdint>
#include <vector>

#include "plan.h"
#include "registry.h"

namespace lowbit::cuda {

// The question that products of a weight are; w: its shape and groups. weight, act: as in struct ProductRow.
Question question(const Weight& w, int weight, int act, int64_t m, int capability, const int* clusters);

// A kernel and the microseconds that it would take, about.
struct Candidate {
  float us;
  const ProductRow* row;
};

// Those of this build that are for the device, the fastest first.
std::vector<Candidate> candidates(int weight, int act, const Question& q);

// What is tried first; no row: no kernel is for the product. tuned: because of lowbit_cuda_tune.
struct Choice {
  const ProductRow* row;
  bool tuned;
};
Choice choose(int weight, int act, const Question& q);

// A line of lowbit_cuda_tune, for weights with scales of 16 bits; lowbit/autotune/tuned.py mirrors it. Products of
// `least` to `most` rows of x with a weight [n, k] run `kernel` on devices of this capability (90 for 9.0) that run so
// many blocks at once. weight, act, zero_kind: indices into WEIGHT_TYPES and ACT_TYPES of lowbit/dtypes.py and
// OP_ZERO_KINDS of lowbit/scheme.py, of which the last is whole zeros: 0 is for even scales and others alike.
struct TunedChoice {
  const char* kernel;
  int64_t weight, act, n, k, group_size, zero_kind, capability, blocks, least, most;
};

}  // namespace lowbit::cuda

// From now on products go by these lines, a later one before an earlier one, and by the plan where none is for them or
// its kernel refuses. They take the place of all that were there before; a count of 0 ends it. Returns how many are in
// use: not those of kernels that this build lacks, that have no code for the product or would round weights that other
// kernels multiply exactly. May be called at any time; products that run meanwhile see the old lines or the new ones.
extern "C" __attribute__((visibility("default"))) int64_t lowbit_cuda_tune(const lowbit::cuda::TunedChoice* lines,
                                                                           int64_t count);

// What a product tries first, with the arguments of lowbit_cuda_plan, and through the same memory as a product: its
// kernel, or an empty text; *tuned is set to 1 where that is because of lowbit_cuda_tune, else to 0. Needs no device.
extern "C" __attribute__((visibility("default"))) const char* lowbit_cuda_choice(int weight, int act, int64_t m,
                                                                                 int64_t n, int64_t k,
                                                                                 int64_t group_size, int zero_kind,
                                                                                 int scale_type, int capability,
                                                                                 int blocks, int pairs, int* tuned);
