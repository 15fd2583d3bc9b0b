// Codes of a codebook to the A operand of a product, 128 k of a row tile at a time.
//
// Shared memory has both values of each pair of codes, 256 words, once for every lane: [pair][lane], so that whatever
// codes lanes look up, they never meet in a bank. Values are those of the codebook over a power of two (`unit`), so
// that the largest lies in [1, 2) and fp16 holds them with 11 digits.
#pragma once
#include "../parts.cuh"
#include "../ptx/async.cuh"
#include "scaled.cuh"

namespace lowbit {

template <int Bits, class Act>
struct CodebookTable {
  static_assert(Bits == 4, "a byte has a pair of codes");
  static constexpr int kPairs = 256, kPitch = 128;  // bytes of a pair, for all lanes
  static constexpr int kUnit = kPairs * kPitch;     // where the power of two is kept

  // All warps of a block make it together; a barrier must follow. table: a multiple of 128; codebook: 16 values in
  // memory, written before any kernel that may still run.
  static __device__ __forceinline__ void make(uint32_t table, const float* codebook, int warp, int warps, int lane) {
    const float value = ptx::load_float(codebook + lane % 16);
    float largest = fabsf(value);
#pragma unroll
    for (int apart = 8; apart; apart /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
    // The power of two below it; of a table that is 0, or next to it, 2^-100.
    const uint32_t power = min(max(__float_as_uint(largest), 27u << 23), 253u << 23) & 0xFF800000u;
    const float number = value * __uint_as_float((254u << 23) - power);
#pragma unroll 1
    for (int pair = warp; pair < kPairs; pair += warps)
      ptx::store_shared(table + pair * kPitch + lane * 4,
                        pack_pair<Act>(__shfl_sync(~0u, number, pair % 16), __shfl_sync(~0u, number, pair / 16)));
    if (warp == 0 && lane == 0) ptx::store_shared(table + kUnit, power);
  }
};

template <int Bits, class Act>
struct Decoder<Codebook<Bits>, Act> : ValueDecoder {
  using Table = CodebookTable<Bits, Act>;
  using Words = planes::Words<Bits>;
  static constexpr uint32_t kOne = std::is_same<Act, __half>::value ? 0x3C003C00u : 0x3F803F80u;
  static constexpr float kUnit = 1.0f;

  const uint32_t own;  // this lane's column of the table

  __device__ Decoder(uint32_t table, int lane) : own(table + lane * 4) {}

  // What values of the table are to be multiplied by.
  __device__ __forceinline__ float unit() const {
    return __uint_as_float(ptx::load_shared((own & ~127u) + Table::kUnit));
  }

  __device__ __forceinline__ void fragment(const Words& from, int f, uint32_t (&a)[4]) const {
    // Codes of both row halves: bytes (j=0, c=0), (j=0, c=1), (j=1, c=0), (j=1, c=1), row half 0 in the low nibbles.
    const uint32_t word = from.of(4, 2 * f);
    // Those of (j=0, h=1) and (j=1, h=0) change places: a byte then has the two codes of a register.
    const uint32_t apart = (word ^ word >> 12) & 0x0000F0F0u, paired = word ^ apart ^ apart << 12;
    a[0] = ptx::look_up(own + (paired << 7 & 0x7F80u));
    a[2] = ptx::look_up(own + (paired >> 1 & 0x7F80u));
    a[1] = ptx::look_up(own + (paired >> 9 & 0x7F80u));
    a[3] = ptx::look_up(own + (paired >> 17 & 0x7F80u));
  }
};

template <int Bits, class Act, bool Tiny>
struct ExactDecoder<Codebook<Bits>, Act, Tiny> : Decoder<Codebook<Bits>, Act> {
  using Base = Decoder<Codebook<Bits>, Act>;
  static constexpr float kFactor = 1.0f;

  // Of numbers that are to stay exact the caller applies the factor: 1, or 0 where a group is left out.
  LastStep last{{Base::kOne, Base::kOne}, {}};

  __device__ ExactDecoder(uint32_t table, int lane) : Base(table, lane) {}
  __device__ __forceinline__ void fragment(const typename Base::Words& from, int f, const LastStep&,
                                           uint32_t (&a)[4]) const {
    Base::fragment(from, f, a);
  }
};

// The decoder of a weight for a lane: of a codebook whose table was made, or else of `numbers`.
template <class Weight, class Decoder, class... Numbers>
__device__ __forceinline__ Decoder make_decoder(uint32_t table, int lane, Numbers... numbers) {
  if constexpr (Weight::kCodebook) {
    return Decoder(table, lane);
  } else {
    return Decoder(numbers...);
  }
}

}  // namespace lowbit
