// Instructions on the two 16-bit halves of a word, and on bits that a mask chooses.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace lowbit::ptx {

// The bits of `a` where the mask is 1, else those of `b`. Why in asm: of bits that are masked away later the compiler
// masks `b` first, and puts codes of two fragments together twice: 103 instructions of 128 k of 3-bit codes, not 74.
__device__ __forceinline__ uint32_t select(uint32_t a, uint32_t b, uint32_t mask) {
#ifdef __CUDA_ARCH__
  asm("lop3.b32 %0, %0, %1, %2, 0xE4;\n" : "+r"(a) : "r"(b), "r"(mask));
  return a;
#else
  return (a & mask) | (b & ~mask);
#endif
}

// (word & mask) | more. Why in asm: the compiler makes two instructions of it.
__device__ __forceinline__ uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t more) {
#ifdef __CUDA_ARCH__
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(made) : "r"(word), "r"(mask), "r"(more));
  return made;
#else
  return (word & mask) | more;
#endif
}

// Byte i is byte w % 8 of high:low, where w is bits 4i and up of `which`; 0 where bit 3 of w is set and that byte is
// less than 128. Why in asm: __byte_perm promises nothing for bit 3.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t which) {
  uint32_t made = 0;
#ifdef __CUDA_ARCH__
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(made) : "r"(low), "r"(high), "r"(which));
#else
  for (int i = 0; i < 4; ++i) {
    const uint32_t of = which >> 4 * i & 0xF, byte = static_cast<uint32_t>((uint64_t{high} << 32 | low) >> of % 8 * 8);
    made |= (of & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte & 0xFF) << 8 * i;
  }
#endif
  return made;
}

// Half `Half` of a pair twice. Why in asm: what multiplies it then chooses the half itself, and this is no instruction;
// of a permutation of bytes it would be one.
template <int Half>
__device__ __forceinline__ uint32_t twice(uint32_t pair) {
  static_assert(Half == 0 || Half == 1);
  if constexpr (Half == 0) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %0;\nmov.b32 %0, {low, low};\n}\n" : "+r"(pair));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %0;\nmov.b32 %0, {high, high};\n}\n" : "+r"(pair));
  }
  return pair;
}

constexpr uint32_t kMinusZeros = 0x80008000u;  // plus these is nothing

// a * b + c, rounded once.
template <class Act>
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  if constexpr (std::is_same<Act, __half>::value) {
    asm("fma.rn.f16x2 %0, %0, %1, %2;\n" : "+r"(a) : "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %0, %1, %2;\n" : "+r"(a) : "r"(b), "r"(c));
  }
  return a;
}

// Why not mul of bf16x2: 8.x has fused multiply-add alone. -0 changes nothing.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kFusedOnly = true;
#else
constexpr bool kFusedOnly = false;
#endif

template <class Act>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  if constexpr (std::is_same<Act, __half>::value) {
    asm("mul.rn.f16x2 %0, %0, %1;\n" : "+r"(a) : "r"(b));
  } else if constexpr (kFusedOnly) {
    a = multiply_add<Act>(a, b, kMinusZeros);
  } else {
    asm("mul.rn.bf16x2 %0, %0, %1;\n" : "+r"(a) : "r"(b));
  }
  return a;
}

}  // namespace lowbit::ptx
