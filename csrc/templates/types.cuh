// Names of weight types in CUDA templates, and the words that kernels share.
//
//   tokens      rows of x (M); row tile   16 rows of the weight (N); fragment   16 rows x 16 k, the A operand of an mma
//   lane        4g + t: owner of rows g and g + 8 and of k 2t, 2t + 1, 2t + 8, 2t + 9 of a fragment
#pragma once

namespace lowbit {

// Codes of int b and uint b: value = step * code - offset, both numbers given at run time (struct Affine).
template <int Bits>
struct Int {
  static constexpr int kBits = Bits;
  static constexpr bool kFloat = false;
  static constexpr bool kCodebook = false;
};

// Codes of a table that comes with the weight: Weight::codebook.
template <int Bits>
struct Codebook {
  static constexpr int kBits = Bits;
  static constexpr bool kFloat = true;  // it means values, not steps from an offset
  static constexpr bool kCodebook = true;
};

// Sign, exponent, mantissa from the top bit; bias 2^(Exponent-1) - 1; subnormals. Codes of NaN and infinity never come.
template <int Exponent, int Mantissa>
struct Float {
  static constexpr int kBits = 1 + Exponent + Mantissa;
  static constexpr bool kFloat = true;
  static constexpr bool kCodebook = false;
  static constexpr int kBias = (1 << (Exponent - 1)) - 1;
};

}  // namespace lowbit
