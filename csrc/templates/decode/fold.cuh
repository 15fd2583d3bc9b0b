// How the lanes of a token add up what they found in their phases: a lane keeps one half of its floats and gives its
// neighbour the other, until all phases are in. What is left to it are floats of one row tile.
#pragma once
#include <cstdint>

namespace lowbit::decode {

// Rows: row tiles side by side, of each of which a lane has two floats: of rows g and g + 8.
template <int Tokens, int Rows>
struct Fold {
  static constexpr bool kAny = Tokens < 4;  // phases
  static constexpr int kKept = Tokens == 1 || Rows == 1 ? 1 : 2;

  // Which row tile a lane's kept floats are of, and where they are among its sums: [row g][token][half].
  struct Kept {
    int tile, float_number;
  };
  static __device__ __forceinline__ Kept kept(int lane) {
    const int t = lane % 4, first = t / Tokens % 2, second = Tokens == 1 ? t / 2 : 0;  // halves that it kept
    const int item = lane / 4 * Tokens + t % Tokens;
    return {Rows == 2 ? first : 0, item * 2 + (Rows == 2 ? second : first)};
  }
  // Whether no other lane has the same.
  static __device__ __forceinline__ bool is_first(int lane) { return Rows == 2 || Tokens == 2 || lane % 4 < 2; }

  // values: [row tile][half]; those that are kept come first.
  static __device__ __forceinline__ void add_up(int lane, float (&values)[2 * Rows]) {
    int count = 2 * Rows;
#pragma unroll
    for (int lanes = Tokens; lanes < 4; lanes *= 2) {
      const bool upper = (lane & lanes) != 0;
      const int half = count / 2;  // 0: both lanes add up the one that is left
#pragma unroll
      for (int i = 0; i < (half ? half : 1); ++i) {
        const float own = half && upper ? values[half + i] : values[i];
        values[i] = own + __shfl_xor_sync(~0u, half && !upper ? values[half + i] : values[i], lanes);
      }
      if (half) count = half;
    }
  }
};

}  // namespace lowbit::decode
