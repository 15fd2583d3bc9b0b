// Which of a tile's kernels serves a weight: those for scales that change within 128 k are others than those for scales
// that don't, and zeros that are there cost.
#pragma once
#include "../args.h"
#include "layout.cuh"

namespace lowbit {

// Zeros of a weight: none, whole numbers, any. Whole ones cost nothing where values are made one by one: they are part
// of the number that makes a value of a code's bits. What others are beside is added with the scale, as a minimum is,
// or sums of x take it away.
enum class ZeroForm { kNone, kWhole, kAny };

// What a kernel is built for. Fine: groups of less than 128 k, or any.
template <bool Fine, ZeroForm Zeros>
struct Form {
  static constexpr bool kFine = Fine, kZeros = Zeros != ZeroForm::kNone, kWhole = Zeros == ZeroForm::kWhole;
  static constexpr ZeroForm kZeroForm = Zeros;
};

// Whether groups of a weight are shorter than 128 k.
inline bool is_fine(const Weight& w) { return w.group_size > 0 && w.group_size < layout::kStepK; }

// Whether integers in fine groups have a form for whole zeros. Why not of 5 to 7 bits: hardly anyone has such weights.
constexpr bool has_fine_whole(int bits) { return bits <= 4 || bits == 8; }

// Calls run(Form) for the one that serves `w`, or any weight if `fine`; Type: of its codes. All: there is a form for
// every kind of zeros; else with fine groups one for any, which also serves zeros of longer groups that are no whole
// numbers. Why not always, and why floats with zeros have one form for all groups: hardly anyone has such weights, and
// a form is a fifth of the time that a unit takes to compile. Even: the form for no zeros takes even scales alone
// (fuses_values); others go to that for whole zeros, of which each is 0.
template <class Type, bool All, bool Even, class Run>
inline int with_form(const Weight& w, bool fine, const Run& run) {
  const bool uneven = Even && !fine && w.zero_kind == ZeroKind::kNone && w.even_unit < 0;
  if (w.zero_kind == ZeroKind::kNone && !uneven)
    return fine ? run(Form<true, ZeroForm::kNone>{}) : run(Form<false, ZeroForm::kNone>{});
  if constexpr (Type::kFloat) {
    return run(Form<true, ZeroForm::kAny>{});
  } else {
    constexpr bool kFineWhole = All && has_fine_whole(Type::kBits);
    if ((w.whole_zeros || uneven) && !fine) return run(Form<false, ZeroForm::kWhole>{});
    if (w.whole_zeros && kFineWhole) return run(Form<kFineWhole, ZeroForm::kWhole>{});
    return fine ? run(Form<true, ZeroForm::kAny>{}) : run(Form<!All, ZeroForm::kAny>{});
  }
}

// Whether tiles of gemm_sm90 for so many tokens scale integers of `bits` bits one by one, each rounded to fp16,
// although their groups are long. Others multiply exact numbers and scale sums of 128 k. Why: a value's scale takes no
// instruction beside the one that makes the value, those of sums are 8 to 28% of a step's. Why not always: the digits
// of a scale cost the tensor cores energy, the more the fewer a code has, and many rows are bound by that. Measured on
// an H200, three shapes (nvidia-h200/rounds_20261129.json; what is the same in both builds differs by -0.5 to +2.7),
// rounded beside exact, percent: n64 2 to 8 bits +1.8, -3.0, -1.4, -5.5, -4.3, -2.9, +0.7; n96 2 to 5 and 8 bits -0.9,
// -5.4, +2.7, +0.8, +1.6; n128 -3.9, -2.5, -1.3, -2.8, -3.6; from 144 tokens on 2 to 6 and 8 bits -0.5, -0.6, +1.3,
// -1.6, -1.7, +0.9; n32 +3 to +12, n48 +2 to +8. Before, 8192 x 8192, us: 7 bits at 128, 256, 1024, 4096 rows 43.3 to
// 40.2, 68.6 to 67.0, 217 to 209, 879 to 857, 6 bits at 128 rows 35.9 to 34.2. Why not bf16: it has three digits less.
LOWBIT_HOST_DEVICE constexpr bool rounds_values(int bits, int tokens, bool fp16_x) {
  if (!fp16_x || tokens < 64) return false;
  if (tokens == 64) return bits >= 3 && bits <= 7;
  if (tokens == 96) return bits == 3 || bits == 6 || bits == 7;
  if (tokens == 128) return bits > 1;
  return bits >= 5 && bits <= 7;
}

// The same where there are no zeros and scales are even, which takes one instruction a value (dequant/fused.cuh), not
// two; and up to 96 tokens nobody waits for sums to be scaled, nor for a turn. Measured beside what was there, exact or
// by two instructions, 8192 x 8192 and 28672 x 4096, percent (nvidia-h200/fused_20261129*.json; what is the same in
// both builds differs by -2.0 to +0.9): n64 1 to 8 bits -7.7, -7.2, -2.2, -8.3, -3.2, +0.7, -1.9, -0.8; n96 -6.6, -9.6,
// -4.5, -7.9, -10.0, -5.2, -3.7, -7.2; n128 2, 4, 8 bits -1.3, -0.8, -3.8, without turns -0.2, +2.0, +1.6; from 144
// tokens on 2, 4, 8 bits +0.3, +2.0, +0.6. n48 1, 2, 4, 5 bits -9.7, -3.4 to -8.7, -4.9 to +1.0,
// -2.2; with scales as pairs (pairs_20261130*.json) 3, 6, 7, 8 bits -8.1, -5.0, -2.2, -2.8, n32 3, 5, 7, 8 bits -3.3,
// -6.7, -0.5, -0.1. Why not n16, where that gains 0 to 2.5: no product of up to 16 rows rounds weights.
LOWBIT_HOST_DEVICE constexpr bool fuses_values(int bits, int tokens, bool fp16_x) {
  if (tokens == 32) return fp16_x && (bits == 3 || bits == 5);
  if (tokens == 48) return fp16_x;
  return rounds_values(bits, tokens, fp16_x) || (fp16_x && (tokens == 64 || tokens == 96));
}

// How long groups are, in the two units that kernels count in.
struct GroupLength {
  int steps;      // log2 of a group in steps of 128 k, 0 for shorter ones; 26 where a row has one group
  int fragments;  // log2 of a group in fragments of 16 k
};

inline GroupLength group_length(const Weight& w) {
  if (w.group_size < 0) return {26, 29};
  int fragments = 0;
  while (16 << fragments < w.group_size) ++fragments;
  return {fragments > 3 ? fragments - 3 : 0, fragments};
}

inline int64_t groups_of(const Weight& w) { return w.group_size < 0 ? 1 : (w.k + w.group_size - 1) / w.group_size; }

}  // namespace lowbit
