// In place of csrc/templates/dequant/codebook.cuh: no codebooks.
#pragma once
#include "templates/dequant/int.cuh"

namespace lowbit {

template <class Weight, class Decoder, class... Numbers>
Decoder make_decoder(uint32_t, int, Numbers... numbers) {
  static_assert(!Weight::kCodebook, "integers alone");
  return Decoder(numbers...);
}

}  // namespace lowbit
