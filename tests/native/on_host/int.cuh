// In place of csrc/templates/dequant/int.cuh, which is made of instructions: integers by the layout's formula.
#pragma once
#include "on_host/block.h"
#include "templates/dequant/planes.cuh"
#include "templates/types.cuh"

namespace lowbit {
namespace on_host {

// Fragment f of the A operand; value(code, h): of a code in row half h.
template <class Act, int Bits, class Value>
void fragment(const planes::Words<Bits>& from, int f, uint32_t (&a)[4], const Value& value) {
  for (int r = 0; r < 4; ++r) {
    const int h = r % 2, c = r / 2, u = 2 * f + h;
    a[r] = 0;
    for (int j = 0; j < 2; ++j) {
      int code = 0;
      for (int width = 8; width >= 1; width /= 2)
        if (Bits & width)
          code |= (from.of(width, u) >> (16 * j + 8 * c + planes::Words<Bits>::bit(width, u)) & ((1 << width) - 1))
                  << layout::plane_low(Bits, width);
      const Act rounded(value(code, h));
      uint16_t bits;
      std::memcpy(&bits, &rounded, 2);
      a[r] |= uint32_t{bits} << (16 * j);
    }
  }
}

}  // namespace on_host

// fp16 as on a GPU: codes, times a power of two of the row half. bf16: codes too, here without one.
template <class Weight, class Act>
struct Decoder {
  using Words = planes::Words<Weight::kBits>;
  static constexpr bool kSubtractOffset = true;
  static constexpr uint32_t kOne = std::is_same<Act, __half>::value ? 0x3C003C00u : 0x3F803F80u;
  static constexpr float kUnit = 1.0f;
  static constexpr int exponent(int h) { return h; }

  explicit Decoder(float) {}
  void fragment(const Words& from, int f, uint32_t (&a)[4]) const {
    on_host::fragment<Act>(from, f, a, [](int code, int h) { return static_cast<float>(code << h); });
  }
};

}  // namespace lowbit
