// Proof that one packed weight serves every matrix instruction: three small kernels that multiply its codes by x.
//
//   wgmma_f16   wgmma m64n16k16, A in registers: fp16 codes,  x fp16 in natural order
//   mma_s8      mma m16n8k32:                    8-bit codes, x int8 in the order stored_k inside each 16 k
//   wgmma_s8    wgmma m64n16k32, A in registers: 8-bit codes, x int8 in that order
//
//   codes  layout nvidia, as lowbit.pack_weight writes it; x [16 tokens, cols] in natural order, 0 beyond k
//   y      [16, n]: fp32, int32, int32; the products of the bare codes, exact for small integers
//
// B of wgmma lies in shared memory without swizzle, as core matrices of 8 tokens x 16 bytes of k:
//
//              k bytes 0..15   16..31
//   token 0..7  | matrix 0    | matrix 1 |    kAlongK bytes from one to the next along k,
//   token 8..15 | matrix 2    | matrix 3 |    kAlongTokens along the tokens
#include <cuda_fp16.h>

#include "templates/layout.cuh"

namespace {

namespace layout = lowbit::layout;

constexpr int kTokens = 16;
constexpr int kAlongK = 128, kAlongTokens = 256;

__device__ int thread_in_warp() { return threadIdx.x % 32; }
__device__ int group_id() { return thread_in_warp() / 4; }
__device__ int thread_in_group() { return thread_in_warp() % 4; }

// ---- the packed weight ----------------------------------------------------------------------------------------------

// One lane's view of 16 rows of a packed weight.
template <int Bits>
struct Codes {
  const uint8_t* bytes_of_planes;
  layout::Packed packed;
  int64_t row_block;

  // The word of a plane that holds row half h of a fragment, shifted to its step.
  template <int Width>
  __device__ uint32_t word(int fragment, int h) const {
    constexpr int kPerTile = layout::tile_k(lowbit::Layout::kNvidia, Width) / 16, kSteps = 8 / Width;
    const int64_t tile = packed.tile_start(row_block, fragment / kPerTile, Width);
    const int unit = fragment % kPerTile * 2 + h;
    const auto* words =
        reinterpret_cast<const uint32_t*>(bytes_of_planes + tile + thread_in_warp() * layout::lane_bytes(Width));
    return words[unit / kSteps] >> layout::step_bit(Width, unit % kSteps);
  }

  template <int Width>
  __device__ uint32_t fields(int fragment, int h, int shift, uint32_t mask) const {
    if constexpr ((Bits & Width) == 0) {
      return 0;
    } else {
      return ((word<Width>(fragment, h) >> shift) & mask) << layout::plane_low(Bits, Width);
    }
  }

  // Register h + 2c of a 16-bit fragment: two halves.
  __device__ uint32_t halves(int fragment, int h, int c) const {
    const uint32_t pair =
        fields<8>(fragment, h, 8 * c, layout::half_mask(8)) | fields<4>(fragment, h, 8 * c, layout::half_mask(4)) |
        fields<2>(fragment, h, 8 * c, layout::half_mask(2)) | fields<1>(fragment, h, 8 * c, layout::half_mask(1));
    const __half2 values = __halves2half2(__ushort2half_rn(pair & 0xFFFF), __ushort2half_rn(pair >> 16));
    return reinterpret_cast<const uint32_t&>(values);
  }

  // Register h + 2 * (fragment % 2) of an 8-bit pair of fragments: four bytes.
  __device__ uint32_t bytes(int fragment, int h) const {
    return fields<8>(fragment, h, 0, layout::byte_mask(8)) | fields<4>(fragment, h, 0, layout::byte_mask(4)) |
           fields<2>(fragment, h, 0, layout::byte_mask(2)) | fields<1>(fragment, h, 0, layout::byte_mask(1));
  }
};

// ---- x in shared memory ---------------------------------------------------------------------------------------------

__device__ uint64_t descriptor(const void* tile) {
  const uint64_t address = static_cast<uint64_t>(__cvta_generic_to_shared(tile));
  return (address & 0x3FFFF) >> 4 | static_cast<uint64_t>(kAlongK >> 4) << 16 |
         static_cast<uint64_t>(kAlongTokens >> 4) << 32;
}

// Where byte `k` (0..31) of a token lies in its tile.
__device__ int place(int token, int k) { return k / 16 * kAlongK + token / 8 * kAlongTokens + token % 8 * 16 + k % 16; }

// What is written to shared memory is seen by wgmma, which reads it through another proxy.
__device__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}

// x as the kernels for 8-bit activations are given it: place i of each 16 holds k = stored_k(i).
__device__ int8_t stored(const int8_t* x, int64_t cols, int token, int64_t at) {
  return x[token * cols + at / 16 * 16 + layout::stored_k(at % 16)];
}

// ---- instructions ---------------------------------------------------------------------------------------------------

__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void finish_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

__device__ void wgmma(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "%12, add, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ void wgmma(int32_t (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "%12, add;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ void mma(int32_t* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// All three leave sums alike: d[4j + 2r + i] is row g + 8r of the warp's 16, token 8j + 2t + i.
template <class Sum>
__device__ void store(const Sum (&d)[8], Sum* y, int64_t n, int64_t row_block) {
  for (int j = 0; j < 2; ++j) {
    for (int r = 0; r < 2; ++r) {
      const int64_t row = row_block * 16 + group_id() + 8 * r;
      for (int i = 0; i < 2 && row < n; ++i) {
        y[(8 * j + 2 * thread_in_group() + i) * n + row] = d[4 * j + 2 * r + i];
      }
    }
  }
}

// ---- kernels: a block of four warps takes 64 rows -------------------------------------------------------------------

template <int Bits>
__global__ void wgmma_f16(const uint8_t* codes, const __half* x, float* y, int64_t n, int64_t k) {
  __shared__ __align__(128) uint8_t tile[2 * kAlongTokens];
  const int64_t row_block = blockIdx.x * 4 + threadIdx.x / 32;
  const Codes<Bits> weight{codes, layout::Packed(lowbit::Layout::kNvidia, n, k, Bits), row_block};
  float d[8] = {};
  for (int fragment = 0; fragment < weight.packed.cols / 16; ++fragment) {
    for (int i = threadIdx.x; i < kTokens * 16; i += blockDim.x) {
      const int token = i / 16, at = i % 16;
      *reinterpret_cast<__half*>(tile + place(token, 2 * at)) = x[token * weight.packed.cols + 16 * fragment + at];
    }
    publish();
    uint32_t a[4];
    for (int r = 0; r < 4; ++r) a[r] = weight.halves(fragment, r % 2, r / 2);
    begin_products();
    wgmma(d, a, descriptor(tile));
    finish_products();
    __syncthreads();  // the tile has been read
  }
  store(d, y, n, row_block);
}

template <int Bits>
__global__ void wgmma_s8(const uint8_t* codes, const int8_t* x, int32_t* y, int64_t n, int64_t k) {
  __shared__ __align__(128) uint8_t tile[2 * kAlongTokens];
  const int64_t row_block = blockIdx.x * 4 + threadIdx.x / 32;
  const Codes<Bits> weight{codes, layout::Packed(lowbit::Layout::kNvidia, n, k, Bits), row_block};
  int32_t d[8] = {};
  for (int pair = 0; pair < weight.packed.cols / 32; ++pair) {
    for (int i = threadIdx.x; i < kTokens * 32; i += blockDim.x) {
      tile[place(i / 32, i % 32)] = static_cast<uint8_t>(stored(x, weight.packed.cols, i / 32, 32 * pair + i % 32));
    }
    publish();
    uint32_t a[4];
    for (int r = 0; r < 4; ++r) a[r] = weight.bytes(2 * pair + r / 2, r % 2);
    begin_products();
    wgmma(d, a, descriptor(tile));
    finish_products();
    __syncthreads();
  }
  store(d, y, n, row_block);
}

template <int Bits>
__global__ void mma_s8(const uint8_t* codes, const int8_t* x, int32_t* y, int64_t n, int64_t k) {
  const int64_t row_block = blockIdx.x * 4 + threadIdx.x / 32;
  const Codes<Bits> weight{codes, layout::Packed(lowbit::Layout::kNvidia, n, k, Bits), row_block};
  int32_t d[8] = {};
  for (int pair = 0; pair < weight.packed.cols / 32; ++pair) {
    uint32_t a[4];
    for (int r = 0; r < 4; ++r) a[r] = weight.bytes(2 * pair + r / 2, r % 2);
    for (int j = 0; j < 2; ++j) {
      // Register r of B: places 16r + 4t .. 16r + 4t + 3 of the token g.
      uint32_t b[2] = {};
      for (int i = 0; i < 8; ++i) {
        const int64_t at = 32 * pair + i / 4 * 16 + 4 * thread_in_group() + i % 4;
        const auto byte = static_cast<uint8_t>(stored(x, weight.packed.cols, 8 * j + group_id(), at));
        b[i / 4] |= static_cast<uint32_t>(byte) << (8 * (i % 4));
      }
      mma(d + 4 * j, a, b);
    }
  }
  store(d, y, n, row_block);
}

// ---- host -----------------------------------------------------------------------------------------------------------

enum Instruction : int { kWgmmaF16, kMmaS8, kWgmmaS8 };

template <int Bits>
int launch(int which, const uint8_t* codes, const void* x, void* y, int64_t n, int64_t k, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(layout::round_up(n, 64) / 64);
  const auto* halves = static_cast<const __half*>(x);
  const auto* bytes = static_cast<const int8_t*>(x);
  if (which == kWgmmaF16) wgmma_f16<Bits><<<blocks, 128, 0, stream>>>(codes, halves, static_cast<float*>(y), n, k);
  if (which == kMmaS8) mma_s8<Bits><<<blocks, 128, 0, stream>>>(codes, bytes, static_cast<int32_t*>(y), n, k);
  if (which == kWgmmaS8) wgmma_s8<Bits><<<blocks, 128, 0, stream>>>(codes, bytes, static_cast<int32_t*>(y), n, k);
  return cudaGetLastError();
}

using Launch = int (*)(int, const uint8_t*, const void*, void*, int64_t, int64_t, cudaStream_t);
constexpr Launch kLaunch[] = {launch<1>, launch<2>, launch<3>, launch<4>, launch<5>, launch<6>, launch<7>, launch<8>};

}  // namespace

// y = x * codes^T with instruction `which` for `bits`-bit codes; a cudaError_t.
extern "C" int layout_proof(int which, int bits, const uint8_t* codes, const void* x, void* y, int64_t n, int64_t k,
                            void* stream) {
  return kLaunch[bits - 1](which, codes, x, y, n, k, static_cast<cudaStream_t>(stream));
}
