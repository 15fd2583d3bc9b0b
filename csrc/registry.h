// Every CPU kernel of this build, and which one serves a given ISA, weight type and activation type.
#pragma once
#include "args.h"

namespace lowbit {

struct KernelRow {
  const char* name;
  const char* isa;
  int weight;  // index into KERNEL_TYPES of lowbit/dtypes.py
  int act;     // index into ACT_TYPES of lowbit/dtypes.py
  MatmulFn run;
};

struct KernelRows {
  const KernelRow *first, *last;
  const KernelRow* begin() const { return first; }
  const KernelRow* end() const { return last; }
};

KernelRows kernel_rows();

// The kernel for isa (index into cpu_isa.inc), or of the next usable ISA below it that has one and takes so few rows of
// x; null when this build has none, or when an index is out of range. A table look-up.
const KernelRow* find(int isa, int weight, int act, int64_t rows);

}  // namespace lowbit

// Called from Python through ctypes: the names of all rows, separated by newlines; lives as long as the library.
extern "C" __attribute__((visibility("default"))) const char* lowbit_kernel_rows();
