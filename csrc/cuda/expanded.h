// Family dequant and what follows it: the weight as floats, some rows at a time, for the vendor's product to read.
#pragma once
#include "check.h"
#include "registry.h"

namespace lowbit::cuda {

// Most bytes of float weight at a time; a single block of 16 rows may take more.
constexpr int64_t kScratchBytes = int64_t{64} << 20;

// Bytes of new memory from torch's allocator.
Tensor empty_bytes(int64_t count, int device);

// y = x * W^T + bias: rows of W are expanded by `kernel` into memory from torch's allocator, torch multiplies. `out`
// and `bias` are the tensors behind args.y; m >= 1.
void multiply_expanded(const MatmulArgs& args, const DequantRow& kernel, const Launch& launch, const Tensor& out,
                       const std::optional<Tensor>& bias);

// Rows row_begin .. row_begin + out.size(0) - 1 of a weight to out [rows, k], dense or with adjacent columns.
void expand(const Weight& w, int64_t row_begin, const DequantRow& kernel, const Launch& launch, const Tensor& out);

// Rows of x behind each other at multiples of 16 bytes: a copy of them; x then says where it lies.
Tensor align_rows(Input& x, int64_t k, int device, const Tensor& tensor);

}  // namespace lowbit::cuda
