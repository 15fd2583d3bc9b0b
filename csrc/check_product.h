// What a product op was given, checked, as the arguments of a kernel: the same for every device.
#pragma once
#include <optional>

#include "check.h"
#include "templates/layout.cuh"
#include "types.inc"

namespace lowbit {

// The number of a zero kind, as ops get it: that of ZeroKind, or one more for zeros that are all whole numbers, or from
// kEvenScales on for none and even scales, plus their unit (lowbit/pack/known.py).
constexpr int64_t kWholeZeros = 3, kEvenScales = 4, kEvenUnits = 16;

inline void set_zero_kind(Weight& w, int64_t zero_kind) {
  const bool even = zero_kind >= kEvenScales;
  w.whole_zeros = zero_kind == kWholeZeros;
  w.even_unit = even ? static_cast<int>(zero_kind - kEvenScales) : -1;
  w.zero_kind = even ? ZeroKind::kNone : w.whole_zeros ? ZeroKind::kZero : static_cast<ZeroKind>(zero_kind);
}

// The tensors of a packed weight in `which` layout, all at `place`.
inline Weight check_weight(Layout which, Place place, const Tensor& codes, const Tensor& scales,
                           const std::optional<Tensor>& zeros, const std::optional<Tensor>& codebook,
                           const std::optional<Tensor>& row_scales, int64_t n, int64_t k, int64_t weight,
                           int64_t group_size, int64_t zero_kind) {
  STD_TORCH_CHECK(n >= 1 && n < kSizeLimit && k >= 1 && k < kSizeLimit, "n and k must be 1 to 2^31 - 512, got ", n,
                  " and ", k);
  STD_TORCH_CHECK(weight >= 0 && weight < kWeightTypes, "weight must be 0 to ", kWeightTypes - 1, ", got ", weight);
  const bool whole_row = group_size == -1;
  STD_TORCH_CHECK(whole_row || (group_size >= 16 && group_size <= 256 && (group_size & (group_size - 1)) == 0),
                  "group_size must be -1, 16, 32, 64, 128 or 256, got ", group_size);
  STD_TORCH_CHECK(zero_kind >= 0 && zero_kind < kEvenScales + kEvenUnits, "zero_kind must be 0 to ",
                  kEvenScales + kEvenUnits - 1, ", got ", zero_kind);
  STD_TORCH_CHECK((zero_kind >= 1 && zero_kind <= kWholeZeros) == zeros.has_value(), "zeros go with zero_kind 1 to ",
                  kWholeZeros, " and only with them, got ", zero_kind);

  const layout::Packed packed(which, n, k, kWeightBits[weight]);
  const int64_t blocks = packed.rows / layout::kTileRows;
  const int64_t groups = whole_row ? 1 : (k + group_size - 1) / group_size;
  check_place(codes, "codes", place);
  check_bytes(codes, "codes");
  if (which == Layout::kCpu)
    check_dense(codes, "codes", {blocks, packed.cols / 32, 64 * packed.bits});
  else
    check_dense(codes, "codes", {packed.nbytes()});
  check_place(scales, "scales", place);
  check_dense(scales, "scales", {blocks, groups, 16});
  if (zeros) {
    check_place(*zeros, "zeros", place);
    check_dense(*zeros, "zeros", {blocks, groups, 16});
    STD_TORCH_CHECK(raw_dtype(*zeros) == raw_dtype(scales), "zeros must have the type of scales");
  }
  if (codebook) {
    STD_TORCH_CHECK(kCodebookTypes[weight] >= 0, "a codebook goes with uint types, got weight type ", weight);
    check_place(*codebook, "codebook", place);
    STD_TORCH_CHECK(raw_dtype(*codebook) == aoti_torch_dtype_float32(), "codebook must be float32, got type number ",
                    raw_dtype(*codebook));
    check_dense(*codebook, "codebook", {int64_t{1} << kWeightBits[weight]});
  }
  if (row_scales) {
    check_place(*row_scales, "row_scales", place);
    STD_TORCH_CHECK(raw_dtype(*row_scales) == aoti_torch_dtype_float32(),
                    "row_scales must be float32, got type number ", raw_dtype(*row_scales));
    check_dense(*row_scales, "row_scales", {n, 1});
  }
  const ScaleType type = scale_type(scales, "scales");
  STD_TORCH_CHECK(which == Layout::kCpu || (type != ScaleType::kFloat8E8m0fnu && type != ScaleType::kFloat8E4m3fn),
                  "scales of 8 bits must be packed as 16-bit floats for a GPU");
  Weight w{static_cast<const uint8_t*>(codes.const_data_ptr()),
           scales.const_data_ptr(),
           data_or_null(zeros),
           n,
           k,
           group_size,
           type,
           ZeroKind::kNone,
           false,
           static_cast<const float*>(data_or_null(codebook)),
           static_cast<const float*>(data_or_null(row_scales))};
  set_zero_kind(w, zero_kind);
  STD_TORCH_CHECK(w.even_unit < 0 || type == ScaleType::kFloat16, "zero_kind from ", kEvenScales,
                  " on goes with scales of fp16, got ", zero_kind);
  return w;
}

// The type whose kernels serve a checked weight of a weight type.
inline int kernel_type(const Weight& w, int64_t weight) {
  return w.codebook ? kCodebookTypes[weight] : static_cast<int>(weight);
}

// x [..., k], bias [n] or none, out [..., n] for a checked weight. How to run is left to the caller.
inline MatmulArgs check_product(const Weight& w, Place place, const Tensor& x, const std::optional<Tensor>& bias,
                                const Tensor& out) {
  check_place(x, "x", place);
  const FloatType type = float_type(x, "x");
  const Rows from = check_rows(x, "x", w.k);
  check_place(out, "out", place);
  const Rows to = check_rows(out, "out", w.n);
  STD_TORCH_CHECK(float_type(out, "out") == type, "out must have the type of x");
  STD_TORCH_CHECK(to.count == from.count, "out must have the rows of x, ", from.count, ", got ", to.count);
  STD_TORCH_CHECK(to.count <= 1 || to.stride >= w.n, "out must not overlap itself, got row stride ", to.stride);

  MatmulArgs args{};
  args.w = w;
  args.x = {x.const_data_ptr(), from.count, from.stride, type};
  args.y = {out.mutable_data_ptr(), to.stride, nullptr, FloatType::kFloat32};
  if (bias) {
    check_place(*bias, "bias", place);
    check_dense(*bias, "bias", {w.n});
    args.y.bias = bias->const_data_ptr();
    args.y.bias_type = float_type(*bias, "bias");
  }
  return args;
}

inline void check_act(int64_t act, FloatType x) {
  STD_TORCH_CHECK(act == static_cast<int64_t>(x) || act == static_cast<int64_t>(ActType::kInt8),
                  "act must be the number of x's type, ", static_cast<int>(x), ", or that of int8, got ", act);
}

}  // namespace lowbit
