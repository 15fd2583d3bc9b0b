// What a packing op was given, checked: the same for every device.
#pragma once
#include <utility>

#include "check.h"
#include "templates/layout.cuh"

namespace lowbit {

// The bit stream of an [n, k] weight and its packed form, apart in memory, both at `place`.
inline layout::Packed check_packing(Place place, const Tensor& stream, const Tensor& packed, int64_t n, int64_t k,
                                    int64_t bits, int64_t which) {
  STD_TORCH_CHECK(n >= 0 && n < kSizeLimit && k >= 0 && k < kSizeLimit, "n and k must be 0 to 2^31 - 512, got ", n,
                  " and ", k);
  STD_TORCH_CHECK(bits >= 1 && bits <= 8, "bits must be 1 to 8, got ", bits);
  STD_TORCH_CHECK(which == 0 || which == 1, "layout must be 0 (cpu) or 1 (nvidia), got ", which);
  const layout::Packed form(static_cast<Layout>(which), n, k, static_cast<int>(bits));
  for (const auto& [tensor, name] : {std::pair(&stream, "the bit stream"), std::pair(&packed, "the packed codes")}) {
    check_place(*tensor, name, place);
    check_bytes(*tensor, name);
  }
  check_dense(stream, "the bit stream", {n, (k * bits + 7) / 8});
  if (form.layout == Layout::kCpu)
    check_dense(packed, "the packed codes", {form.rows / 16, form.cols / 32, 64 * bits});
  else
    check_dense(packed, "the packed codes", {form.nbytes()});
  const auto* a = static_cast<const uint8_t*>(stream.const_data_ptr());
  const auto* b = static_cast<const uint8_t*>(packed.const_data_ptr());
  STD_TORCH_CHECK(a + stream.numel() <= b || b + packed.numel() <= a || !stream.numel() || !packed.numel(),
                  "input and output must not share memory");
  return form;
}

}  // namespace lowbit
