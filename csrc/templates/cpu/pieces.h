// x as bfloat16 pieces, and the M > 1 call on bfloat16 panels: for floats that no byte holds, on an ISA with tiles.
//
// Every weight of at most 8 bits is a bfloat16 number, and an fp32 number is the sum of three (fp16: of two), so the
// products are exact and only their fp32 sums round. k is stored in the order 0, 2, 1, 3 of each quad, which is how
// Simd::decode_pairs leaves the weights.
#pragma once
#include "bytes.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

template <ActType A>
constexpr int kPieces = A == ActType::kFloat32   ? 3
                        : A == ActType::kFloat16 ? 2
                                                 : 1;

template <ActType A>
void split_token(const Input& x, int64_t token, int64_t k, const Planes& out) {
  using F = Simd::F;
  const char* row = row_of(x, token);
  constexpr int kStep = Simd::kLanes;
  constexpr int P = kPieces<A>;
  float scale = 1;
  if constexpr (A == ActType::kInt8) scale = int8_scale(row, x.type, k, out.k_padded);
  uint16_t* pieces = reinterpret_cast<uint16_t*>(out.digits) + token * P * out.pitch;
  for (int64_t b = 0; b < out.blocks; ++b) {
    const int64_t end = std::min((b + 1) * out.block, out.k_padded);
    F sum = Simd::zero();
    for (int64_t i = b * out.block; i < end; i += kStep) {
      F v = load_row(row, x.type, i, k);
      if constexpr (A == ActType::kInt8) v = int8_value(v, scale);
      sum = Simd::add(sum, v);
      unrolled<0, P>([&](auto p) LOWBIT_FORCE_INLINE { v = Simd::split_pairs(v, pieces + p * out.pitch + i); });
    }
    out.scale[b * out.tokens + token] = scale;
    out.sum[b * out.tokens + token] = Simd::reduce_add(sum) * scale;
  }
}

template <class D, ActType A>
void run_pairs(const MatmulArgs& a) {
  constexpr int P = kPieces<A>;
  run_slabs<P, 2>(
      a, [&](const Input& input, int64_t t, const Planes& x) { split_token<A>(input, t, a.w.k, x); },
      [&](const Planes& x, int64_t token) {
        run_panels(
            a, x, token, 2, 0,
            [&](const PlanesPanel& p) {
              unpack_panel<D>(a.w, p, 2, [&](Simd::B quad, uint8_t* out) LOWBIT_FORCE_INLINE {
                Simd::I even, odd;
                Simd::decode_pairs<typename D::LookUp>(quad, even, odd);
                Simd::store_bytes(out, even);
                Simd::store_bytes(out + kVector, odd);
              });
            },
            [](const PlanesPanel& p) { pairs_product(p); });
      });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
