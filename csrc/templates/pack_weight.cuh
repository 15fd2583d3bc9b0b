// Between the canonical bit stream and layout nvidia, exact both ways (lowbit/pack/layout.py).
//
//   stream  [n, ceil(k * Bits / 8)] bytes, dense, rows at any address; pack ignores the bits behind a row's last code,
//           unpack writes them as 0
//   packed  layout::Packed::nbytes() bytes, 16-byte aligned; pack writes all of them, pad codes as 0
//
// A block takes 16 rows x kBlockK k, a warp kWarpK of these. The bytes of the stream lie in shared memory in between:
//
//   stream --4-byte words, realigned--> rows in shared memory --pairs of codes--> words of a lane --vectors--> packed
//
// Neither kernel is launched with the programmatic attribute and neither triggers early: pack_weight waits for both.
#pragma once
#include <cuda_runtime.h>

#include "lane_vector.cuh"
#include "quad.cuh"
#include "stream_pairs.cuh"

namespace lowbit::packing {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kWarpK = 256, kBlockK = kWarps * kWarpK;

struct Sizes {
  int64_t n, k;
  unsigned pieces;  // blocks that share 16 rows
};

// Rows of the stream in shared memory.
template <int Bits>
struct Rows {
  static constexpr int kWords = kBlockK * Bits / 32;  // of a row
  // Why + 4: the eight rows that a warp reads at a time then start in banks 0, 4, ... 28.
  static constexpr int kPitch = kWords + 4;
  using Words = layout::LaneWords<Bits, kWarpK>;
};

// The block's rows and k, and what of the stream is its own.
template <int Bits>
struct Place {
  int64_t block, k, row_bytes;
  int bits;  // codes of the block's k that exist, in bits; at most kBlockK * Bits

  __device__ explicit Place(const Sizes& sizes)
      : block(blockIdx.x / sizes.pieces),
        k(int64_t{blockIdx.x % sizes.pieces} * kBlockK),
        row_bytes((sizes.k * Bits + 7) / 8),
        bits(static_cast<int>(min(sizes.k - k, int64_t{kBlockK})) * Bits) {}

  __device__ int64_t start(int64_t row) const { return row * row_bytes + k * Bits / 8; }
};

// Four bytes from any address; those from `end` on are anything.
__device__ __forceinline__ uint32_t load_word(const uint8_t* from, const uint8_t* end) {
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 4);
  const uint32_t* word = reinterpret_cast<const uint32_t*>(from - shift);
  // Why two cases: a word that reaches past the end of the memory must not be read whole.
  if (reinterpret_cast<const uint8_t*>(word + 2) <= end)
    return __funnelshift_r(__ldg(word), __ldg(word + 1), 8 * shift);
  uint32_t value = 0;
  for (int i = 0; i < 4 && from + i < end; ++i) value |= static_cast<uint32_t>(__ldg(from + i)) << (8 * i);
  return value;
}

template <int Bits>
__global__ void __launch_bounds__(kThreads)
    pack_rows(const uint8_t* __restrict__ stream, uint8_t* __restrict__ packed, const Sizes sizes) {
  using Rows = packing::Rows<Bits>;
  using Words = typename Rows::Words;
  __shared__ uint32_t rows_smem[layout::kTileRows * Rows::kPitch];
  const layout::Packed form(Layout::kNvidia, sizes.n, sizes.k, Bits);
  const Place<Bits> place(sizes);

  // ---- the stream to shared memory, 0 where there is no code --------------------------------------------------------
  const uint8_t* end = stream + sizes.n * place.row_bytes;
#pragma unroll 4
  for (int i = threadIdx.x; i < layout::kTileRows * Rows::kWords; i += kThreads) {
    const int row = i / Rows::kWords, word = i % Rows::kWords;
    const int64_t n = place.block * layout::kTileRows + row;
    const int left = place.bits - 32 * word;  // bits of this word that are codes, or more
    uint32_t value = 0;
    if (n < sizes.n && left > 0) {
      value = load_word(stream + place.start(n) + 4 * word, end);
      if (left < 32) value &= (1u << left) - 1;
    }
    rows_smem[row * Rows::kPitch + word] = value;
  }
  __syncthreads();

  // ---- pairs of codes to the words of a lane ------------------------------------------------------------------------
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Words words = {};
#pragma unroll
  for (int u = 0; u < Words::kUnits; ++u) {
    const uint32_t* row = rows_smem + (g + u % 2 * 8) * Rows::kPitch + warp * (kWarpK * Bits / 32);
    const int octet = u / 2 * 2;
    words.put_four(
        u, stream::to_four<Bits>(stream::load_pair<Bits>(row, octet, t), stream::load_pair<Bits>(row, octet + 1, t)));
  }

  // ---- one vector a lane and tile -----------------------------------------------------------------------------------
  Words::for_tiles(form, place.block, place.k + warp * kWarpK, lane,
                   [&](int64_t byte, int first, auto count, int64_t k) {
                     if (k < form.cols) store_vector<decltype(count)::value>(packed + byte, words.word + first);
                   });
}

// An octet to its bytes in shared memory.
template <int Bits>
__device__ __forceinline__ void store_octet(uint8_t* to, uint64_t octet) {
  constexpr int kUnit = Bits % 4 == 0 ? 4 : Bits % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < Bits; i += kUnit) {
    const uint32_t part = static_cast<uint32_t>(octet >> (8 * i));
    if constexpr (kUnit == 4)
      *reinterpret_cast<uint32_t*>(to + i) = part;
    else if constexpr (kUnit == 2)
      *reinterpret_cast<uint16_t*>(to + i) = static_cast<uint16_t>(part);
    else
      to[i] = static_cast<uint8_t>(part);
  }
}

template <int Bits>
__global__ void __launch_bounds__(kThreads)
    unpack_rows(const uint8_t* __restrict__ packed, uint8_t* __restrict__ stream, const Sizes sizes) {
  using Rows = packing::Rows<Bits>;
  using Words = typename Rows::Words;
  __shared__ uint32_t rows_smem[layout::kTileRows * Rows::kPitch];
  const layout::Packed form(Layout::kNvidia, sizes.n, sizes.k, Bits);
  const Place<Bits> place(sizes);

  // ---- one vector a lane and tile -----------------------------------------------------------------------------------
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Words words = {};
  Words::for_tiles(form, place.block, place.k + warp * kWarpK, lane,
                   [&](int64_t byte, int first, auto count, int64_t k) {
                     if (k < form.cols) load_vector<decltype(count)::value>(packed + byte, words.word + first);
                   });

  // ---- words of a lane to octets of rows g and g + 8, whose pairs travel in the halves of one word ------------------
#pragma unroll
  for (int q = 0; q < Words::kFragments / 2; ++q) {
    uint32_t pairs[4];
#pragma unroll
    for (int octet = 0; octet < 4; ++octet) {
      const int u = 2 * (2 * q + octet / 2);
      pairs[octet] =
          stream::pair_of<Bits>(words.four(u), octet % 2) | stream::pair_of<Bits>(words.four(u + 1), octet % 2) << 16;
    }
    quad_transpose(pairs, t);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t own[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) own[i] = h ? pairs[i] >> 16 : pairs[i] & 0xFFFFu;
      uint8_t* row = reinterpret_cast<uint8_t*>(rows_smem + (g + 8 * h) * Rows::kPitch);
      store_octet<Bits>(row + (warp * (kWarpK / 8) + 4 * q + t) * Bits, stream::join_pairs<Bits>(own));
    }
  }
  __syncthreads();

  // ---- shared memory to the stream: aligned words, single bytes at the ends of the block's part of a row ------------
  const int bytes = (place.bits + 7) / 8;
  for (int i = threadIdx.x; i < layout::kTileRows * (Rows::kWords + 1); i += kThreads) {
    const int row = i / (Rows::kWords + 1), word = i % (Rows::kWords + 1);
    const int64_t n = place.block * layout::kTileRows + row;
    if (n >= sizes.n) break;
    uint8_t* to = stream + place.start(n);
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 4), at = 4 * word - shift;
    const uint32_t* own = rows_smem + row * Rows::kPitch + word;
    // Byte 0 of `value` goes to to[at]; pad codes are 0, so the bits behind the last code are.
    const uint32_t value = shift ? __funnelshift_r(word ? own[-1] : 0, own[0], 32 - 8 * shift) : own[0];
    if (at >= 0 && at + 4 <= bytes) {
      *reinterpret_cast<uint32_t*>(to + at) = value;
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b)
        if (at + b >= 0 && at + b < bytes) to[at + b] = static_cast<uint8_t>(value >> (8 * b));
    }
  }
}

// Both return a cudaError_t.
template <int Bits>
int run(const uint8_t* from, uint8_t* to, int64_t n, int64_t k, bool unpack, cudaStream_t stream) {
  const layout::Packed form(Layout::kNvidia, n, k, Bits);
  const int64_t blocks = unpack ? (n + 15) / 16 : form.rows / 16, pieces = (form.cols + kBlockK - 1) / kBlockK;
  if (blocks * pieces == 0) return cudaSuccess;
  if (blocks * pieces > INT32_MAX) return cudaErrorInvalidValue;
  const Sizes sizes{n, k, static_cast<unsigned>(pieces)};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks * pieces);
  config.blockDim = kThreads;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, unpack ? unpack_rows<Bits> : pack_rows<Bits>, from, to, sizes);
}

}  // namespace lowbit::packing
