// Op registration only, for tensors on CUDA: the schemas stand in lowbit/ops/schema.py, the functions in the files
// here.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace lowbit::cuda {

using torch::stable::Tensor;

// matmul.cpp
void matmul_out(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
                const std::optional<Tensor>& bias, int64_t n, int64_t k, int64_t weight, int64_t group_size,
                int64_t zero_kind, int64_t act, const Tensor& out, const std::optional<Tensor>& codebook,
                const std::optional<Tensor>& row_scales);
void dequantize_out(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t n, int64_t k,
                    int64_t weight, int64_t group_size, int64_t zero_kind, int64_t row_begin, const Tensor& out,
                    const std::optional<Tensor>& codebook, const std::optional<Tensor>& row_scales);
// pack.cpp
void pack_codes(const Tensor& codes, int64_t n, int64_t k, int64_t bits, int64_t layout, const Tensor& out);
void unpack_codes(const Tensor& packed, int64_t n, int64_t k, int64_t bits, int64_t layout, const Tensor& out);

}  // namespace lowbit::cuda

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) {
  m.impl("matmul_out", TORCH_BOX(&lowbit::cuda::matmul_out));
  m.impl("dequantize_out", TORCH_BOX(&lowbit::cuda::dequantize_out));
  m.impl("pack_codes", TORCH_BOX(&lowbit::cuda::pack_codes));
  m.impl("unpack_codes", TORCH_BOX(&lowbit::cuda::unpack_codes));
}
