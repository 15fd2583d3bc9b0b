// Family `dequant`: rows of a packed weight as fp32, fp16 or bf16, for the vendor's product to read.
//
//   in   DequantArgs::w in layout nvidia (lowbit/pack/layout.py), packed by pack_weight
//   out  [rows, k], itself and its row pitch multiples of 16 bytes, the pitch at least k rounded up to 8: the columns
//        from k to there are written too, with numbers that mean nothing
//
// The value is computed in fp32 and rounded once, in the order of QuantTensor.dequantize, whose bits it has.
//
// A block takes 16 rows x kBlockK k, its warps one step of 128 k after the other. A lane decodes pairs (k = 2t, 2t+1)
// of the octets (8 k) of rows g and g + 8; the four lanes of a row then swap pairs, so that each has whole octets:
//
//   row g    octet 0       octet 1       octet 2       octet 3         after:  lane t holds octet t,
//          | t=0 1 2 3 | t=0 1 2 3 | t=0 1 2 3 | t=0 1 2 3 |                   and the row stores 32 k in a run
//
// Launched without the programmatic attribute, it starts when the kernel before it is done; it never triggers early, so
// a kernel that overlaps it waits for all of its output.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "code_value.cuh"
#include "form.cuh"
#include "lane_vector.cuh"
#include "lane_words.cuh"
#include "quad.cuh"

namespace lowbit::dequant {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlockK = 1024;

// Two values as words of the output: one word of two 16-bit numbers, or two of one.
template <class Out>
struct Pair {
  static constexpr int kWords = sizeof(Out) / 2;
  uint32_t word[kWords];

  __device__ __forceinline__ Pair(float first, float second) {
    if constexpr (kWords == 2) {
      word[0] = __float_as_uint(first);
      word[1] = __float_as_uint(second);
    } else if constexpr (std::is_same_v<Out, __half>) {
      const __half2 both = __floats2half2_rn(first, second);
      word[0] = reinterpret_cast<const uint32_t&>(both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
      word[0] = reinterpret_cast<const uint32_t&>(both);
    }
  }
};

// Scales or zeros of rows g and g + 8, neighbours in the layout.
__device__ __forceinline__ float2 load_rows(const char* from, ScaleType type) {
  const uint32_t* word = reinterpret_cast<const uint32_t*>(from);
  const uint32_t first = __ldg(word);
  if (type == ScaleType::kFloat32) return {__uint_as_float(first), __uint_as_float(__ldg(word + 1))};
  if (type == ScaleType::kFloat16) return __half22float2(reinterpret_cast<const __half2&>(first));
  return {__uint_as_float(first << 16), __uint_as_float(first & 0xFFFF0000u)};
}

// Eight values of one row.
template <class Out>
__device__ __forceinline__ void store_octet(Out* to, const uint32_t (&pairs)[Pair<Out>::kWords][4]) {
  uint4* vector = reinterpret_cast<uint4*>(to);
  if constexpr (Pair<Out>::kWords == 1) {
    *vector = {pairs[0][0], pairs[0][1], pairs[0][2], pairs[0][3]};
  } else {
    vector[0] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
    vector[1] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
  }
}

// What codes mean. A codebook is copied to shared memory, by all threads of a block.
template <class Weight>
__device__ __forceinline__ CodeValue<Weight> code_value_of(const lowbit::Weight& w, Affine affine) {
  if constexpr (Weight::kCodebook) {
    __shared__ float table[1 << Weight::kBits];
    for (int i = threadIdx.x; i < 1 << Weight::kBits; i += kThreads) table[i] = __ldg(w.codebook + i);
    __syncthreads();
    return CodeValue<Weight>(table);
  } else {
    return CodeValue<Weight>(affine);
  }
}

struct Shape {
  int columns;      // k, padded
  unsigned pieces;  // blocks that share 16 rows
  int group_shift;  // k >> group_shift is a group; 31: one for the whole row
  int groups;
};

// Why 8 blocks, 64 registers: for 8.0 the compiler else takes 56, and spills with codebooks of 7 and 8 bits. 0: any.
template <class Weight, class Out>
__global__ void __launch_bounds__(kThreads, Weight::kCodebook ? 8 : 0)
    expand_rows(const DequantArgs args, const Shape shape, const Affine affine) {
  constexpr int kBits = Weight::kBits, kWords = Pair<Out>::kWords;
  using Words = layout::LaneWords<kBits, layout::kStepK>;

  const lowbit::Weight& w = args.w;
  const layout::Packed packed(Layout::kNvidia, w.n, w.k, kBits);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t block = args.row_begin / layout::kTileRows + blockIdx.x / shape.pieces;
  const int begin = blockIdx.x % shape.pieces * kBlockK, end = min(begin + kBlockK, shape.columns);
  const CodeValue<Weight> value = code_value_of<Weight>(w, affine);

  Out* rows[2];  // null where nothing is stored
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = block * layout::kTileRows + g + 8 * h - args.row_begin;
    rows[h] = row >= 0 && row < args.rows ? static_cast<Out*>(args.out) + row * args.out_stride : nullptr;
  }

  const int width = w.scale_type == ScaleType::kFloat32 ? 4 : 2;
  const int64_t group_bytes = layout::kTileRows * width;
  const int64_t groups_start = block * shape.groups * group_bytes + layout::group_place(Layout::kNvidia, g) * width;
  float2 row_scale{1.0f, 1.0f}, scale, subtracted{0.0f, 0.0f}, added{-0.0f, -0.0f};  // x + -0 is x, of -0 too
  if (w.row_scales) {
    const int64_t n = block * layout::kTileRows + g;
    if (n < w.n) row_scale.x = __ldg(w.row_scales + n);
    if (n + 8 < w.n) row_scale.y = __ldg(w.row_scales + n + 8);
  }
  auto fetch_group = [&](int k) {
    // Why min: fragments of the padding lie behind the last group.
    const int64_t at = groups_start + min(k >> shape.group_shift, shape.groups - 1) * group_bytes;
    scale = load_rows(static_cast<const char*>(w.scales) + at, w.scale_type);
    scale.x *= row_scale.x, scale.y *= row_scale.y;
    if (w.zero_kind == ZeroKind::kZero) subtracted = load_rows(static_cast<const char*>(w.zeros) + at, w.scale_type);
    if (w.zero_kind == ZeroKind::kMin) added = load_rows(static_cast<const char*>(w.zeros) + at, w.scale_type);
  };

  // Why these intrinsics: a multiplication and an addition must not become one fused operation with one rounding.
  auto expand = [&](uint32_t codes, int place, int h) {
    const float v = __fsub_rn(value(codes, place), h ? subtracted.y : subtracted.x);
    return __fadd_rn(__fmul_rn(v, h ? scale.y : scale.x), h ? added.y : added.x);
  };

  // Why every warp makes every step, behind the last one too: the exchanges below want all lanes at one place.
#pragma unroll 1
  for (int step = begin; step < end; step += kWarps * layout::kStepK) {
    const int k = step + warp * layout::kStepK;
    const int from = min(k, shape.columns - layout::kStepK);  // what is read; nothing is stored where it isn't k
    Words words;
    Words::for_tiles(packed, block, from, lane, [&](int64_t byte, int first, auto count, int64_t) {
      load_vector<decltype(count)::value>(w.codes + byte, words.word + first);
    });

#pragma unroll
    for (int q = 0; q < Words::kFragments / 2; ++q) {
      uint32_t pairs[2][kWords][4];
#pragma unroll
      for (int f = 2 * q; f < 2 * q + 2; ++f) {
        if (f == 0 || (16 * f & ((1u << shape.group_shift) - 1)) == 0) fetch_group(from + 16 * f);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t codes = words.four(2 * f + h);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const Pair<Out> pair(expand(codes, c, h), expand(codes, 2 + c, h));
#pragma unroll
            for (int i = 0; i < kWords; ++i) pairs[h][i][2 * (f - 2 * q) + c] = pair.word[i];
          }
        }
      }
      const int at = k + 32 * q + 8 * t;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) quad_transpose(pairs[h][i], t);
        if (rows[h] && at < w.k) store_octet(rows[h] + at, pairs[h]);
      }
    }
  }
}

// Returns a cudaError_t. Out is the type that args.type names.
template <class Weight, class Out>
int launch(const DequantArgs& args, const Launch& launch, Affine affine) {
  if (args.rows <= 0) return cudaSuccess;
  const lowbit::Weight& w = args.w;
  const layout::Packed packed(Layout::kNvidia, w.n, w.k, Weight::kBits);
  const int64_t blocks = (args.row_begin + args.rows + 15) / 16 - args.row_begin / 16;
  const int64_t pieces = (packed.cols + kBlockK - 1) / kBlockK;
  if (blocks * pieces > INT32_MAX || packed.cols + kWarps * kBlockK > INT32_MAX) return cudaErrorInvalidValue;

  Shape shape{};
  shape.columns = static_cast<int>(packed.cols);
  shape.pieces = static_cast<unsigned>(pieces);
  shape.group_shift = w.group_size < 0 ? 31 : group_length(w).fragments + 4;
  shape.groups = static_cast<int>(groups_of(w));

  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks * pieces);
  config.blockDim = kThreads;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  return cudaLaunchKernelEx(&config, expand_rows<Weight, Out>, args, shape, affine);
}

}  // namespace lowbit::dequant
