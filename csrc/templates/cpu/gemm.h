// y = x @ dequant(W).T + bias for one decoder and one activation type: which product serves the call.
//
// Contract: as args.h; everything has been checked. Included last in a translation unit that instantiates kernels.
#pragma once
#include "floats.h"
#if defined(LOWBIT_ISA_BYTE_DOT)
#include "bytes.h"
#endif
#if defined(LOWBIT_ISA_TILES)
#include "pieces.h"
#endif

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

template <class D, ActType A>
void matmul(const MatmulArgs& a, ByteForm form) {
  if (a.x.m == 0 || a.w.n == 0) return;
  if constexpr (Uses<D>::kBytes) {
#if defined(LOWBIT_ISA_BYTE_DOT)
    return run_planes<D, kPlanes<A>>(a, form);
#endif
#if defined(LOWBIT_ISA_TILES)
  } else if constexpr (Uses<D>::kPairs) {
    return run_pairs<D, A>(a);
#endif
  } else {
    return run_floats<D>(a, form, copy_token<A>);
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
