// Loops over accumulators, unrolled by the front end.
//
// Why: an array of accumulators stays in registers only when every index is a constant before the optimizer splits
// arrays up; gcc 12 unrolls `for` loops after that and then keeps all 24 accumulators in memory (measured: 3x slower).
#pragma once

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

template <int From, class Fn, int... I>
LOWBIT_INLINE void unrolled_impl(Fn&& fn, std::integer_sequence<int, I...>) {
  (fn(std::integral_constant<int, From + I>{}), ...);
}
// Calls fn(i) for i = From .. To - 1, i being a compile-time constant.
template <int From, int To, class Fn>
LOWBIT_INLINE void unrolled(Fn&& fn) {
  if constexpr (To > From) unrolled_impl<From>(fn, std::make_integer_sequence<int, To - From>{});
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
