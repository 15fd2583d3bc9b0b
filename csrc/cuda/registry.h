// Every CUDA kernel of this build, and which one serves given types.
#pragma once
#include <vector>

#include "args.h"
#include "plan.h"

namespace lowbit::cuda {

// weight, act: indices into KERNEL_TYPES and ACT_TYPES of lowbit/dtypes.py.
struct ProductRow {
  const char* name;
  Family family;
  int weight, act;
  int tokens;  // rows of x in a tile
  ProductFn run;
};

struct DequantRow {
  const char* name;
  int weight, act;  // act: the type it writes
  DequantFn run;
};

// The kernels for products of given types, the smallest tile first, of equal ones the later family; none when this
// build has none, or when an index is out of range. A table look-up, as is the next.
const std::vector<const ProductRow*>& product_tiles(int weight, int act);
// Null when this build has no such kernel, or when an index is out of range.
const DequantRow* find_dequant(int weight, int act);

}  // namespace lowbit::cuda

// Called from Python through ctypes: the names of all rows, separated by newlines; lives as long as the library.
extern "C" __attribute__((visibility("default"))) const char* lowbit_cuda_kernel_rows();
