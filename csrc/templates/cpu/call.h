// What every product shares: how a call is cut into slabs of tokens and tasks of rows, and how y is stored.
//
// A weight is never expanded as a whole: a panel of it is unpacked at a time, per thread, that fits in L2.
#pragma once
#include "activations.h"
#include "panel.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

// Whether kernels are called with M = 1. Those for tiles are not (cpu_isa.inc).
#if defined(LOWBIT_ISA_TILES)
constexpr bool kOneToken = false;
#else
constexpr bool kOneToken = true;
#endif

constexpr int64_t kPanelK = 2048;       // a multiple of 256, so that no group straddles two panels
constexpr int64_t kPanelBlocks = 8;     // row blocks of a byte panel: 128 rows, 256 KiB
constexpr int64_t kFloatPanelK = 1024;  // as floats: 64 rows, 256 KiB
constexpr int64_t kFloatPanelRows = 64;
constexpr int64_t kActivationBytes = int64_t{8} << 20;  // of prepared x at a time
constexpr int64_t kMaxTokens = 512;                     // of a slab: past that a panel's unpacking is paid off

template <class Fn>
void parallel(const Runtime& run, int64_t count, int64_t grain, Fn& fn) {
  run.parallel_for(
      count, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Fn*>(context))(begin, end); }, &fn);
}

// Tokens of a slab: as many as fit in kActivationBytes.
inline int64_t slab_tokens(const MatmulArgs& a, int64_t bytes_a_token) {
  const int64_t fit = std::max<int64_t>(16, kActivationBytes / std::max<int64_t>(1, bytes_a_token) / 16 * 16);
  return std::min({a.x.m, kMaxTokens, fit});
}

// Row units a task takes: large enough to reuse x, small enough to give every thread several tasks.
inline int64_t rows_a_task(int64_t units, int64_t most, int threads) {
  int64_t take = most;
  while (take > 2 && ceil_div(units, take) < 3 * threads && threads > 1) take /= 2;
  return take;
}

// M = 1: calls product(units) for Streams row units at a time, one from each part (a quarter, say) of a task's range.
// Why parts: each is read in the order of memory from its start to its end, past the ends of rows, so the hardware's
// prefetch never starts anew; and four streams keep the memory 15% busier than one (measured at 4 bits).
template <int Streams, class Product>
void run_streams(const MatmulArgs& a, int64_t units, int64_t units_a_block, const Product& product) {
  auto task = [&](int64_t begin, int64_t end) {
    const int64_t part = ceil_div(end - begin, Streams);
    for (int64_t i = 0; i < part; ++i) {
      int64_t unit[Streams];  // past the end: the last one again
      for (int r = 0; r < Streams; ++r) unit[r] = std::min(begin + r * part + i, end - 1);
      product(unit);
    }
  };
  parallel(a.run, units, 4 * units_a_block, task);
}

// Stores one vector of sums for a token: bias in fp32, one rounding, rows past n left alone.
LOWBIT_INLINE void store_rows(const MatmulArgs& a, int64_t token, int64_t row, Simd::F v) {
  const int count = static_cast<int>(std::min<int64_t>(Simd::kLanes, a.w.n - row));
  if (count <= 0) return;
  if (a.y.bias != nullptr) {
    const int64_t size = a.y.bias_type == FloatType::kFloat32 ? 4 : 2;
    v = Simd::add(v, Simd::load_as_float(static_cast<const char*>(a.y.bias) + row * size, a.y.bias_type, count));
  }
  const int64_t size = a.x.type == FloatType::kFloat32 ? 4 : 2;
  char* y = static_cast<char*>(a.y.data) + (token * a.y.row_stride + row) * size;
  Simd::store_from_float(y, a.x.type, v, count);
}

inline void store_slab(const MatmulArgs& a, int64_t first_token, int64_t tokens, int64_t row, int64_t vectors,
                       const float* sums) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < vectors; ++r)
      store_rows(a, first_token + t, row + r * Simd::kLanes, Simd::load(sums + (t * vectors + r) * Simd::kLanes));
}

// x restricted to the tokens of a slab.
inline Input slab_of(const Input& x, int64_t token, int64_t tokens) {
  return {row_of(x, token), tokens, x.row_stride, x.type};
}

inline int64_t chunk_bytes(int bits) { return int64_t{kVector} * bits; }
inline const uint8_t* row_block_codes(const Weight& w, int64_t row_block, int bits) {
  const int64_t last = ceil_div(w.n, kRows) - 1;  // an odd pair's second block reads the last one again
  return w.codes + std::min(row_block, last) * ceil_div(w.k, kChunk) * chunk_bytes(bits);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
