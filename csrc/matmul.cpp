// The op matmul_out: tensors to checked MatmulArgs, the kernel for them, and torch's threads to run it on.
#include "check_product.h"
#include "cpu_isa.h"
#include "registry.h"
#include "threads.h"

namespace lowbit {
namespace {

void parallel_for(int64_t count, int64_t grain, ParallelBody body, void* context) {
  parallel(count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

int threads() { return forked() ? 1 : static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace

void matmul_out(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& zeros,
                const std::optional<Tensor>& bias, int64_t n, int64_t k, int64_t weight, int64_t group_size,
                int64_t zero_kind, int64_t act, const Tensor& out, const std::optional<Tensor>& codebook,
                const std::optional<Tensor>& row_scales) {
  const Weight w =
      check_weight(Layout::kCpu, kCpu, codes, scales, zeros, codebook, row_scales, n, k, weight, group_size, zero_kind);
  MatmulArgs args = check_product(w, kCpu, x, bias, out);
  check_act(act, args.x.type);
  const KernelRow* row = find(current_isa(), kernel_type(w, weight), static_cast<int>(act), args.x.m);
  STD_TORCH_CHECK(row != nullptr, "this build has no kernel for weight type ", weight,
                  w.codebook ? " and a codebook" : "", " with activation type ", act, " on ", isa(current_isa()).name,
                  " or a lower instruction set");
  if (args.x.m == 0) return;
  args.run = {parallel_for, threads()};
  row->run(args);
}

}  // namespace lowbit
