// The op matmul_out: tensors to checked MatmulArgs, the kernel for them, and torch's threads to run it on.
#include "check.h"
#include "cpu_isa.h"
#include "registry.h"
#include "threads.h"
#include "types.inc"

namespace lowbit {
namespace {

void parallel_for(int64_t count, int64_t grain, ParallelBody body, void* context) {
  parallel(count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

int threads() { return forked() ? 1 : static_cast<int>(torch::stable::get_num_threads()); }

Weight check_weight(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t n, int64_t k,
                    int64_t weight, int64_t group_size, int64_t zero_kind) {
  // Why 2^31: every product of padded sizes below then fits in 64 bits.
  constexpr int64_t kLimit = int64_t{1} << 31;
  STD_TORCH_CHECK(n >= 1 && n < kLimit && k >= 1 && k < kLimit, "n and k must be 1 to 2^31 - 1, got ", n, " and ", k);
  STD_TORCH_CHECK(weight >= 0 && weight < kWeightTypes, "weight must be 0 to ", kWeightTypes - 1, ", got ", weight);
  const bool whole_row = group_size == -1;
  STD_TORCH_CHECK(whole_row || (group_size >= 16 && group_size <= 256 && (group_size & (group_size - 1)) == 0),
                  "group_size must be -1, 16, 32, 64, 128 or 256, got ", group_size);
  STD_TORCH_CHECK(zero_kind >= 0 && zero_kind <= static_cast<int64_t>(ZeroKind::kMin),
                  "zero_kind must be 0, 1 or 2, got ", zero_kind);
  STD_TORCH_CHECK((zero_kind == 0) == !zeros, "zeros go with zero_kind 1 and 2 and only with them, got ", zero_kind);

  const int64_t blocks = (n + 15) / 16, chunks = (k + 31) / 32;
  const int64_t groups = whole_row ? 1 : (k + group_size - 1) / group_size;
  check_cpu(codes, "codes");
  check_bytes(codes, "codes");
  check_dense(codes, "codes", {blocks, chunks, 64 * kWeightBits[weight]});
  check_cpu(scales, "scales");
  check_dense(scales, "scales", {blocks, groups, 16});
  if (zeros) {
    check_cpu(*zeros, "zeros");
    check_dense(*zeros, "zeros", {blocks, groups, 16});
    STD_TORCH_CHECK(raw_dtype(*zeros) == raw_dtype(scales), "zeros must have the type of scales");
  }
  return {static_cast<const uint8_t*>(codes.const_data_ptr()),
          scales.const_data_ptr(),
          data_or_null(zeros),
          n,
          k,
          group_size,
          scale_type(scales, "scales"),
          static_cast<ZeroKind>(zero_kind)};
}

}  // namespace

void matmul_out(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
                const std::optional<Tensor>& bias, int64_t n, int64_t k, int64_t weight, int64_t group_size,
                int64_t zero_kind, int64_t act, const Tensor& out) {
  MatmulArgs args{};
  args.w = check_weight(codes, scales, zeros, n, k, weight, group_size, zero_kind);

  check_cpu(x, "x");
  const FloatType type = float_type(x, "x");
  const Rows from = check_rows(x, "x", k);
  args.x = {nullptr, from.count, from.stride, type};

  check_cpu(out, "out");
  const Rows to = check_rows(out, "out", n);
  STD_TORCH_CHECK(float_type(out, "out") == type, "out must have the type of x");
  STD_TORCH_CHECK(to.count == from.count, "out must have the rows of x, ", from.count, ", got ", to.count);
  STD_TORCH_CHECK(to.count <= 1 || to.stride >= n, "out must not overlap itself, got row stride ", to.stride);
  args.y = {nullptr, to.stride, nullptr, FloatType::kFloat32};
  if (bias) {
    check_cpu(*bias, "bias");
    check_dense(*bias, "bias", {n});
    args.y.bias = bias->const_data_ptr();
    args.y.bias_type = float_type(*bias, "bias");
  }

  STD_TORCH_CHECK(act == static_cast<int64_t>(type) || act == static_cast<int64_t>(ActType::kInt8),
                  "act must be the number of x's type, ", static_cast<int>(type), ", or that of int8, got ", act);
  const KernelRow* row = find(current_isa(), static_cast<int>(weight), static_cast<int>(act));
  STD_TORCH_CHECK(row != nullptr, "this build has no kernel for weight type ", weight, " with activation type ", act,
                  " on ", isa(current_isa()).name, " or a lower instruction set");
  if (from.count == 0) return;
  args.x.data = x.const_data_ptr();
  args.y.data = out.mutable_data_ptr();
  args.run = {parallel_for, threads()};
  row->run(args);
}

}  // namespace lowbit
