#include "expanded.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "device.h"

namespace lowbit::cuda {
namespace {

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

int64_t element_bytes(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

// A matrix [rows, columns] of the type of `like`, of new memory; every row starts at a multiple of 16 bytes.
// Why not a tensor of the padded shape: views cost a call each, and the shims make any strides at once.
Tensor empty_rows(int64_t rows, int64_t columns, int device, const Tensor& like) {
  const std::array<int64_t, 2> sizes = {rows, columns}, strides = {round_up(columns, 8), 1};
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes.data(), strides.data(), raw_dtype(like),
                                                         aoti_torch_device_type_cuda(), device, &made));
  return Tensor(made);
}

// Memory seen as a tensor of the type of `like`; it must outlive the tensor.
Tensor view(const void* data, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides, int device,
            const Tensor& like) {
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob_v2(
      const_cast<void*>(data), static_cast<int64_t>(sizes.size()), sizes.begin(), strides.begin(), 0, raw_dtype(like),
      aoti_torch_device_type_cuda(), device, &made, aoti_torch_layout_strided(), nullptr, 0));
  return Tensor(made);
}

// y = x * w^T + bias by torch, which adds the bias before it rounds.
void linear_out(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y) {
  using torch::stable::detail::from;
  std::array<StableIValue, 4> stack = {from(x), from(w), from(bias), from(y)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // a handle of y, to be released
}

// How many rows to expand at a time: chunks alike in size, so that the last one isn't a sliver.
int64_t chunk_rows(int64_t n, int64_t row_bytes) {
  const int64_t most = std::max<int64_t>(kScratchBytes / row_bytes / 16 * 16, 16);
  const int64_t chunks = (n + most - 1) / most;
  return std::min(round_up((n + chunks - 1) / chunks, 128), most);
}

}  // namespace

Tensor empty_bytes(int64_t count, int device) {
  const int64_t stride = 1;
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &count, &stride, aoti_torch_dtype_uint8(),
                                                         aoti_torch_device_type_cuda(), device, &made));
  return Tensor(made);
}

void multiply_expanded(const MatmulArgs& args, const DequantRow& kernel, const Launch& launch, const Tensor& out,
                       const std::optional<Tensor>& bias) {
  const Weight& w = args.w;
  const int64_t bytes = element_bytes(args.x.type), pitch = round_up(w.k, 8);
  const int64_t step = chunk_rows(w.n, pitch * bytes);
  const Tensor x = view(args.x.data, {args.x.m, w.k}, {args.x.row_stride, 1}, launch.device, out);
  const Tensor rows = empty_rows(std::min(step, w.n), w.k, launch.device, out);
  std::optional<Tensor> addend = bias;
  if (bias && args.y.bias_type != args.x.type) {
    addend = empty_rows(1, w.n, launch.device, out);
    torch::stable::copy_(*addend, *bias);
  }
  const auto* addend_data = addend ? static_cast<const char*>(addend->const_data_ptr()) : nullptr;

  for (int64_t first = 0; first < w.n; first += step) {
    const int64_t count = std::min(step, w.n - first);
    const DequantArgs part = {w, first, count, rows.mutable_data_ptr(), pitch, args.x.type};
    check(kernel.run(part, launch), "expanding a weight");
    const Tensor weight = view(part.out, {count, w.k}, {pitch, 1}, launch.device, out);
    const Tensor y = view(static_cast<char*>(args.y.data) + first * bytes, {args.x.m, count}, {args.y.row_stride, 1},
                          launch.device, out);
    std::optional<Tensor> added;
    if (addend) added = view(addend_data + first * bytes, {count}, {1}, launch.device, out);
    linear_out(x, weight, added, y);
  }
}

void expand(const Weight& w, int64_t row_begin, const DequantRow& kernel, const Launch& launch, const Tensor& out) {
  const FloatType type = float_type(out, "out");
  const Rows to = check_rows(out, "out", w.k);
  void* data = out.mutable_data_ptr();
  // Why k % 8: the kernel writes whole vectors of 16 bytes, and behind k may lie a neighbour.
  if (w.k % 8 == 0 && to.stride % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0) {
    check(kernel.run({w, row_begin, to.count, data, to.stride, type}, launch), "expanding a weight");
    return;
  }
  const int64_t pitch = round_up(w.k, 8), step = chunk_rows(to.count, pitch * element_bytes(type));
  Tensor rows = empty_rows(std::min(step, to.count), w.k, launch.device, out);
  for (int64_t first = 0; first < to.count; first += step) {
    const int64_t count = std::min(step, to.count - first);
    check(kernel.run({w, row_begin + first, count, rows.mutable_data_ptr(), pitch, type}, launch),
          "expanding a weight");
    Tensor place = view(static_cast<char*>(data) + first * to.stride * element_bytes(type), {count, w.k},
                        {to.stride, 1}, launch.device, out);
    torch::stable::copy_(place, view(rows.const_data_ptr(), {count, w.k}, {pitch, 1}, launch.device, out));
  }
}

Tensor align_rows(Input& x, int64_t k, int device, const Tensor& tensor) {
  Tensor copy = empty_rows(x.m, k, device, tensor);
  torch::stable::copy_(copy, view(x.data, {x.m, k}, {x.row_stride, 1}, device, tensor));
  x.data = copy.const_data_ptr();
  x.row_stride = round_up(k, 8);
  return copy;
}

}  // namespace lowbit::cuda
