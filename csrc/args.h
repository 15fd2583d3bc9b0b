// The one signature of every product kernel: plain pointers and sizes, no torch.
//
// The caller (matmul.cpp) has checked everything; a kernel trusts what it reads here.
// Layouts are those of lowbit/pack/layout.py. Enumerators are indices into the lists of lowbit/scheme.py and
// lowbit/dtypes.py; the generator asserts that they agree.
#pragma once
#include <cstdint>

namespace lowbit {

enum class ScaleType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat8E8m0fnu, kFloat8E4m3fn };
enum class ZeroKind : int32_t { kNone, kZero, kMin };
enum class FloatType : int32_t { kFloat32, kFloat16, kBFloat16 };
// The first three equal FloatType: x is used as it comes. kInt8: x is quantized per token on the fly.
enum class ActType : int32_t { kFloat32, kFloat16, kBFloat16, kInt8 };

// A packed weight [n, k]: codes in the layout of the device class, scales and zeros [ceil(n/16)][groups][16]. Scales of
// 8 bits are in layout cpu alone: layout nvidia holds them as 16-bit floats.
struct Weight {
  const uint8_t* codes;
  const void* scales;
  const void* zeros;  // null when zero_kind is kNone
  int64_t n, k;
  int64_t group_size;  // 16, 32, 64, 128, 256, or -1 for the whole row
  ScaleType scale_type;
  ZeroKind zero_kind;
  bool whole_zeros;         // zero_kind is kZero, and all zeros are whole numbers from 0 to 2^bits
  const float* codebook;    // the values of the 2^bits codes; null where the type says what they are
  const float* row_scales;  // n factors, one of all scales of a row; null where they are all 1
  // zero_kind is kNone, and scales are so even that values can be numbers of fp16 in units of 2^even_unit
  // (templates/dequant/fused.cuh); -1 where they are not, or nobody knows.
  int even_unit = -1;
};

// x: m rows of k values; consecutive k are adjacent, rows lie row_stride elements apart.
struct Input {
  const void* data;
  int64_t m;
  int64_t row_stride;
  FloatType type;
};

// y: m rows of n values in x's type; bias (n values of bias_type, or null) is added in fp32 before rounding.
struct Output {
  void* data;
  int64_t row_stride;
  const void* bias;
  FloatType bias_type;
};

// How a kernel spreads work: calls body(context, begin, end) over [0, count) in chunks of at least grain.
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);
struct Runtime {
  void (*parallel_for)(int64_t count, int64_t grain, ParallelBody body, void* context);
  int threads;
};

struct MatmulArgs {
  Weight w;
  Input x;
  Output y;
  Runtime run;
};

using MatmulFn = void (*)(const MatmulArgs&);

// How the blocks of a CUDA kernel share a product of few rows of x (templates/narrow/split.cuh): rows of W in tiles of
// 16 that a task has, parts of K that a block multiplies side by side, blocks of a cluster. early: stages of weights
// that a block asks for before the kernel before has ended. Of family decode (templates/decode/spread.cuh): row groups
// of a block, warps of each that share K, blocks of a cluster, stages that a warp asks for so early.
// warps: of a block, that multiply; 8 where it takes half of a multiprocessor, 16 where all of it. next_after: eighths
// of its stages that are asked for when the next kernel may begin, where a block has room beside. two_each: whether
// there are two blocks of half of a multiprocessor for each, not one. Of tiles of more than 16 tokens blocks counts,
// whose sums meet; warps; and parts, 2 where warpgroups share K.
struct Split {
  int row_tiles, parts, blocks, early, warps, next_after, two_each;
};
constexpr int kAllEarly = 8;  // early: as many stages as there is room for
// early, where a launch does not follow one of lowbit's: x can come at once, and is not to stand in line. Behind a
// small kernel of torch's in a graph, us by the plan's and by one: one row, 4096 x 4096 int4 6.1 and 5.3, 6144 x 4096
// int2 6.0 and 5.4; of 300 splits near the fastest one 0.2% behind the best, three 2 to 9%
// (nvidia-h200/alone_20261129.json).
constexpr int kEarlyAlone = 1;

// What the time of a product depends on of a weight, beside its bits. codebook: values of a table, of which is_float
// says no. whole_zeros: they are part of the number that makes a value; any_zeros: others (form.cuh). shorter: how
// often 64 k are halved to be a group of a fine weight.
struct WeightKind {
  bool is_float = false, codebook = false, fine = false, whole_zeros = false, any_zeros = false;
  int shorter = 0;

  constexpr bool zeros() const { return whole_zeros || any_zeros; }
};

// What a split depends on. fits: bit p is set where p parts can be.
struct SplitQuestion {
  int64_t tiles, steps;  // row tiles of W; of 128 k
  int tokens, bits;      // rows of x that the kernel is for; of a code
  int warps;             // of a block, that multiply
  const int* clusters;   // as of Launch
  uint32_t fits;
  WeightKind kind{};
  int token_tiles = 1;  // tiles of tokens that are tasks of their own
};

// How a CUDA kernel is launched: where, on what (capability: 90 for 9.0), and whether it may overlap the kernel before
// it (programmatic dependent launch, compute capability 9.0 and newer). clusters: how many clusters of 1, 2, 4, 8, 3
// blocks run at once with a multiprocessor for each block, which is less than their number allows: a cluster stays
// within a part of the GPU.
// scratch(owner, bytes) gives memory of the device until the launch returns to its caller, ordered by the stream.
// encode_tensor_map: the driver's cuTensorMapEncodeTiled, null below 9.0.
struct Launch {
  int device, capability;
  void* stream;
  int clusters[5];
  bool overlap;
  void* (*scratch)(void* owner, int64_t bytes);
  void* owner;
  void* encode_tensor_map;
  Split (*split)(const SplitQuestion&);  // the plan's; null: a row tile a warp, parts of tasks are dealt out
  Split forced;                          // in place of the plan's and of decode's own; no parts: none is
  // Whether a row of x is to give the same bits wherever it lies: sums of no more than two parts are the same in any
  // order.
  bool same_sums;
  // Whether the kernel before it in the stream is a product of lowbit's too, as far as a graph that is captured tells.
  // Others end before this one begins: then x can come at once, and few weights are to be asked for before it.
  bool follows;
};

// value = step * code - offset, for integer types (uint: 1, 0; int b: 1, 2^(b-1); int1: 2, 1); floats ignore it.
struct Affine {
  float step, offset;
};

// Rows row_begin .. row_begin + rows - 1 of a packed weight as floats: out [rows, k], out_stride elements a row.
struct DequantArgs {
  Weight w;
  int64_t row_begin, rows;
  void* out;
  int64_t out_stride;
  FloatType type;
};

// Both return a cudaError_t; of ProductFn, cudaErrorInvalidValue says that its tile can't hold the problem and that
// nothing was launched.
using ProductFn = int (*)(const MatmulArgs&, const Launch&);
using DequantFn = int (*)(const DequantArgs&, const Launch&);

}  // namespace lowbit
