// Checks of tensors that come from Python, and what the checked values mean in args.h.
//
// Every message names the argument, what was expected and what came. Nothing here asks a tensor for its ScalarType:
// that throws for the newest float types, the raw number does not.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "args.h"

namespace lowbit {

using torch::stable::Tensor;

inline int32_t raw_dtype(const Tensor& t) {
  int32_t dtype = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

inline std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
}

// Shape, for a tensor that must be dense in row-major order.
inline void check_dense(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  std::string expected = "[";
  int64_t d = 0;
  for (int64_t size : shape) {
    same = same && t.size(d) == size;
    if (!same) break;
    ++d;
  }
  if (!same)
    for (int64_t size : shape) expected += (expected.size() > 1 ? ", " : "") + std::to_string(size);
  STD_TORCH_CHECK(same, name, " must have shape ", expected, "], got ", shape_text(t));
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

// The device whose kernels read a tensor.
struct Place {
  bool cuda;
  int32_t index;  // of the CUDA device
};

constexpr Place kCpu = {false, 0};

inline void check_place(const Tensor& t, const char* name, Place place) {
  if (!place.cuda) {
    STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU, like the packed weight");
    return;
  }
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == place.index, name, " must be on cuda:", place.index,
                  ", like the packed weight");
}

inline void check_bytes(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(raw_dtype(t) == aoti_torch_dtype_uint8(), name, " must be uint8, got type number ", raw_dtype(t));
}

// The float type of t, one of fp32, fp16 and bf16.
inline FloatType float_type(const Tensor& t, const char* name) {
  const int32_t dtype = raw_dtype(t);
  if (dtype == aoti_torch_dtype_float32()) return FloatType::kFloat32;
  if (dtype == aoti_torch_dtype_float16()) return FloatType::kFloat16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_bfloat16(), name, " must be float32, float16 or bfloat16, got type number ",
                  dtype);
  return FloatType::kBFloat16;
}

// The type of scales, of 8 bits too.
inline ScaleType scale_type(const Tensor& t, const char* name) {
  const int32_t dtype = raw_dtype(t);
  // Why not the shim's number: torch before 2.12 has none for this type.
  if (dtype == static_cast<int32_t>(torch::headeronly::ScalarType::Float8_e8m0fnu)) return ScaleType::kFloat8E8m0fnu;
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return ScaleType::kFloat8E4m3fn;
  switch (float_type(t, name)) {
    case FloatType::kFloat32:
      return ScaleType::kFloat32;
    case FloatType::kFloat16:
      return ScaleType::kFloat16;
    default:
      return ScaleType::kBFloat16;
  }
}

// A matrix in memory: rows of adjacent columns, `stride` elements apart.
struct Rows {
  int64_t count, stride;
};

// t [..., columns] as rows: dense, or two-dimensional with adjacent columns.
inline Rows check_rows(const Tensor& t, const char* name, int64_t columns) {
  const int64_t dims = t.dim();
  STD_TORCH_CHECK(dims >= 1 && t.size(dims - 1) == columns, name, " must end in ", columns, " columns, got shape ",
                  shape_text(t));
  if (t.is_contiguous()) return {t.numel() / columns, columns};
  STD_TORCH_CHECK(dims == 2 && (columns == 1 || t.stride(1) == 1), name,
                  " must be contiguous, or have two dimensions and stride 1 in the last one, got shape ",
                  shape_text(t));
  // Why: the stride of a dimension of size 1 says nothing; kernels want a true distance.
  return {t.size(0), t.size(0) == 1 ? columns : t.stride(0)};
}

inline const void* data_or_null(const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; }

}  // namespace lowbit
