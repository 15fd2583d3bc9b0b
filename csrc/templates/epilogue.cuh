// What becomes of a finished sum: its row's factor and bias in fp32, one rounding to y's type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../args.h"

namespace lowbit {

__device__ __forceinline__ float load_bias(const void* bias, FloatType type, int n) {
  if (type == FloatType::kFloat32) return static_cast<const float*>(bias)[n];
  if (type == FloatType::kFloat16) return __half2float(static_cast<const __half*>(bias)[n]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[n]);
}

// What the sums of row n are multiplied by: `factor`, and the row's own where rows have one. p: a struct with
// row_scales (or null).
template <class Problem>
__device__ __forceinline__ float row_factor(const Problem& p, int n, float factor) {
  return p.row_scales ? factor * p.row_scales[n] : factor;
}

// y[token][n] = factor * sum + bias, the row's own factor included; p: a struct with y, y_stride, bias (or null),
// bias_type and row_scales.
template <class Act, class Problem>
__device__ __forceinline__ void store_y(const Problem& p, int n, int token, float sum, float factor) {
  const float bias = p.bias ? load_bias(p.bias, p.bias_type, n) : 0.0f;
  static_cast<Act*>(p.y)[token * p.y_stride + n] = static_cast<Act>(fmaf(sum, row_factor(p, n, factor), bias));
}

}  // namespace lowbit
