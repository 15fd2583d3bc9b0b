// The ops pack_codes and unpack_codes for CUDA: tensors to checked pointers, and the kernels on torch's current stream.
#include "pack.h"

#include "check_packing.h"
#include "device.h"

namespace lowbit::cuda {
namespace {

void run(const Tensor& stream, const Tensor& packed, int64_t n, int64_t k, int64_t bits, int64_t which, bool unpack) {
  STD_TORCH_CHECK(stream.is_cuda(), "the bit stream must be on a CUDA device");
  const int device = stream.get_device_index();
  check_packing({true, device}, stream, packed, n, k, bits, which);
  STD_TORCH_CHECK(which == static_cast<int64_t>(Layout::kNvidia), "CUDA kernels pack layout nvidia alone, got ", which);
  const Tensor& from = unpack ? packed : stream;
  const Tensor& to = unpack ? stream : packed;
  const auto* source = static_cast<const uint8_t*>(from.const_data_ptr());
  auto* destination = static_cast<uint8_t*>(to.mutable_data_ptr());
  const void* codes = unpack ? static_cast<const void*>(source) : destination;
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(codes) % 16 == 0,
                  "the packed codes must start at a multiple of 16 bytes");

  const DeviceScope scope(device);
  check(lowbit_cuda_pack(source, destination, n, k, static_cast<int>(bits), unpack, current_stream(device)),
        unpack ? "unpacking a weight" : "packing a weight");
}

}  // namespace

void pack_codes(const Tensor& codes, int64_t n, int64_t k, int64_t bits, int64_t layout, const Tensor& out) {
  run(codes, out, n, k, bits, layout, false);
}

void unpack_codes(const Tensor& packed, int64_t n, int64_t k, int64_t bits, int64_t layout, const Tensor& out) {
  run(out, packed, n, k, bits, layout, true);
}

}  // namespace lowbit::cuda
