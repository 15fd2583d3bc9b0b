// y = x @ dequant(W).T + bias for one decoder and one activation type: the whole call, top to bottom.
//
//   bytes (Codes, Bytes on an ISA with byte products)    x -> digit planes     M = 1: direct_planes
//                                                                              M > 1: unpack panel -> planes_product
//   pairs (Floats on an ISA with tiles, M > 1)           x -> bfloat16 pieces  unpack panel -> pairs_product
//   floats (all else)                                    x -> fp32             M = 1: direct_floats
//                                                                              M > 1: unpack panel -> floats_product
//
// A weight is never expanded as a whole: a panel is at most kPanelRows x kPanelK values, per thread, in L2.
#pragma once
#include "activations.h"
#include "panel.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

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

#if defined(LOWBIT_ISA_BYTE_DOT)
// --- M = 1 on bytes: straight from the packed planes, each byte read once ------------------------------------------
// kDirect row blocks at a time: their accumulators hide the latency of the dot products, and four streams suit the
// prefetcher. Chunks of 32 k hold one part of a block, or two blocks of 16.
constexpr int kDirect = 4;

// acc[p] += quads [From, To) of a chunk times plane p of x.
template <class D, int P, int From, int To>
LOWBIT_INLINE void dot_quads(const uint8_t* chunk, const int8_t* digits, int64_t plane, Simd::I acc[P]) {
  unrolled<From, To>([&](auto q) LOWBIT_FORCE_INLINE {
    const Simd::B w = unpack_quad<q>(D{}, chunk);
    unrolled<0, P>([&](auto p) LOWBIT_FORCE_INLINE { acc[p] = Simd::dot(acc[p], w, digits + p * plane + q * kQuad); });
  });
}

template <int P>
LOWBIT_INLINE void scale_block(const MatmulArgs& a, const Planes& x, int64_t row_block, int64_t block, Simd::I acc[P],
                               Simd::F& sum) {
  Simd::F v = Simd::to_float(acc[0]);
  unrolled<1, P>([&](auto p) LOWBIT_FORCE_INLINE { v = Simd::fma(v, Simd::set1(256.0f), Simd::to_float(acc[p])); });
  const GroupVectors g = load_group(a.w, row_block, a.w.group_size > 0 ? block : 0, 0);
  sum = Simd::fma(g.scale, Simd::mul(v, Simd::set1(x.scale[block])), sum);
  if (g.has_zero) sum = Simd::fma(g.zero, Simd::set1(x.sum[block]), sum);
}

template <class D, int P>
void direct_planes(const MatmulArgs& a, const Planes& x, int64_t row_block) {
  using I = Simd::I;
  using F = Simd::F;
  const uint8_t* codes[kDirect];
  F sum[kDirect];
  I acc[kDirect][P];
  unrolled<0, kDirect>([&](auto r) LOWBIT_FORCE_INLINE {
    codes[r] = row_block_codes(a.w, row_block + r, D::kBits);
    sum[r] = Simd::zero();
  });
  auto start_block = [&](int64_t block) __attribute__((always_inline)) {
    unrolled<0, P>([&](auto p) LOWBIT_FORCE_INLINE {
      const I start = Simd::broadcast(x.start + block * P + p);
      unrolled<0, kDirect>([&](auto r) LOWBIT_FORCE_INLINE { acc[r][p] = start; });
    });
  };
  auto end_block = [&](int64_t block) __attribute__((always_inline)) {
    unrolled<0, kDirect>([&](auto r)
                             LOWBIT_FORCE_INLINE { scale_block<P>(a, x, row_block + r, block, acc[r], sum[r]); });
  };

  if (x.block >= kChunk) {
    const int64_t chunks = x.k_padded / kChunk;
    const int64_t chunks_a_block = x.block / kChunk;
    for (int64_t block = 0, chunk = 0; block < x.blocks; ++block) {
      start_block(block);
      for (const int64_t end = std::min(chunk + chunks_a_block, chunks); chunk < end; ++chunk)
        unrolled<0, kDirect>([&](auto r) LOWBIT_FORCE_INLINE {
          const uint8_t* at = codes[r] + chunk * chunk_bytes(D::kBits);
          Simd::prefetch_ahead<D::kBits>(at);
          dot_quads<D, P, 0, kQuads>(at, x.digits + chunk * kChunk, x.pitch, acc[r]);
        });
      end_block(block);
    }
  } else {  // blocks of 16: the first or the second half of a chunk
    for (int64_t block = 0; block < x.blocks; ++block) {
      start_block(block);
      unrolled<0, kDirect>([&](auto r) LOWBIT_FORCE_INLINE {
        const uint8_t* at = codes[r] + block / 2 * chunk_bytes(D::kBits);
        const int8_t* digits = x.digits + block / 2 * kChunk;
        if (block % 2 == 0) {
          dot_quads<D, P, 0, kQuads / 2>(at, digits, x.pitch, acc[r]);
        } else {
          dot_quads<D, P, kQuads / 2, kQuads>(at, digits, x.pitch, acc[r]);
        }
      });
      end_block(block);
    }
  }
  unrolled<0, kDirect>([&](auto r) LOWBIT_FORCE_INLINE { store_rows(a, 0, (row_block + r) * kRows, sum[r]); });
}

// Tiles multiply signed bytes, so there the offset is taken off here (from uint8 half of the range, which the caller
// then adds to the zeros); vectors multiply unsigned ones and start from -offset * sum of x.
#if defined(LOWBIT_ISA_TILES)
constexpr bool kSignedPanels = true;
#else
constexpr bool kSignedPanels = false;
#endif

template <class D>
void unpack_bytes(const Weight& w, const PlanesPanel& panel, int offset, uint8_t* bytes) {
  for (int64_t r = 0; r < panel.row_blocks; ++r) {
    const uint8_t* codes = row_block_codes(w, panel.row_block + r, D::kBits);
    uint8_t* out = bytes + r * panel.k_count * kRows;
    for (int64_t k = 0; k < panel.k_count; k += kChunk, out += kQuads * kVector) {
      const uint8_t* chunk = codes + (panel.k_begin + k) / kChunk * chunk_bytes(D::kBits);
      unrolled<0, kQuads>([&](auto q) LOWBIT_FORCE_INLINE {
        Simd::B byte = unpack_quad<q>(D{}, chunk);
        if constexpr (kSignedPanels) byte = Simd::sub_bytes(byte, offset);
        Simd::store_bytes(out + q * kVector, byte);
      });
    }
  }
}

// The M > 1 call on byte or pair panels: `fill` unpacks a panel, `product` adds it to the sums of all tokens.
template <class Fill, class Product>
void run_panels(const MatmulArgs& a, const Planes& x, int64_t first_token, int64_t bytes_a_code, int add_back,
                const Fill& fill, const Product& product) {
  const int64_t row_blocks = ceil_div(a.w.n, kRows);
  const int64_t take = rows_a_task(row_blocks, kPanelBlocks, a.run.threads);
  auto task = [&](int64_t begin, int64_t end) {
    const int64_t panel_bytes = take * kRows * std::min(kPanelK, x.k_padded) * bytes_a_code;
    const size_t sum_bytes = static_cast<size_t>(x.tokens * take) * kRows * sizeof(float);
    uint8_t* bytes = static_cast<uint8_t*>(scratch(Scratch::kPanel, panel_bytes + sum_bytes));
    float* sums = reinterpret_cast<float*>(bytes + panel_bytes);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t rows = round_up(std::min(take, row_blocks - i * take), 2);
      std::memset(sums, 0, static_cast<size_t>(x.tokens * rows) * kRows * sizeof(float));
      for (int64_t k = 0; k < x.k_padded; k += kPanelK) {
        const int64_t count = std::min(kPanelK, x.k_padded - k);
        const PlanesPanel panel{&x, &a.w, bytes, sums, static_cast<float>(add_back), i * take, rows, k, count};
        fill(panel, bytes);
        product(panel);
      }
      store_slab(a, first_token, x.tokens, i * take * kRows, rows, sums);
    }
  };
  parallel(a.run, ceil_div(row_blocks, take), 1, task);
}

// Prepares x a slab at a time (P rows of Bytes bytes a value for each token) and calls multiply(x, first token).
template <int P, int Bytes, class Prepare, class Multiply>
void run_slabs(const MatmulArgs& a, const Prepare& prepare, const Multiply& multiply) {
  const int64_t k_padded = round_up(a.w.k, kChunk);
  const int64_t block = block_size(a.w.group_size);
  const int64_t blocks = ceil_div(a.w.k, block);
  const int64_t pitch = row_pitch(k_padded, Bytes);
  const int64_t slab = slab_tokens(a, P * Bytes * pitch);
  char* memory = static_cast<char*>(scratch(Scratch::kActivations, planes_bytes(slab, pitch, blocks, P * Bytes)));
  for (int64_t token = 0; token < a.x.m; token += slab) {
    const int64_t tokens = std::min(slab, a.x.m - token);
    Planes x{tokens, k_padded, pitch, block, blocks, P, reinterpret_cast<int8_t*>(memory), nullptr, nullptr, nullptr};
    x.scale = reinterpret_cast<float*>(memory + P * Bytes * tokens * pitch);
    x.sum = x.scale + tokens * blocks;
    x.start = reinterpret_cast<int32_t*>(x.sum + tokens * blocks);
    const Input input = slab_of(a.x, token, tokens);
    auto task = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) prepare(input, t, x);
    };
    parallel(a.run, tokens, std::max<int64_t>(1, 32768 / k_padded), task);
    multiply(x, token);
  }
}

template <class D, int P>
void run_planes(const MatmulArgs& a, ByteForm form) {
  const float unit = power_of_two(-form.shift);
  // Why: codes of uint8 fill all of a byte; half of the range makes them signed and goes to the zeros instead.
  const int add_back = kSignedPanels && D::kBits == 8 && form.offset == 0 ? 128 : 0;
  const int panel_offset = form.offset + add_back;
  run_slabs<P, 1>(
      a,
      [&](const Input& input, int64_t t, const Planes& x) { quantize_token<P>(input, t, a.w.k, unit, form.offset, x); },
      [&](const Planes& x, int64_t token) {
        if (a.x.m == 1) {
          auto task = [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) direct_planes<D, P>(a, x, i * kDirect);
          };
          return parallel(a.run, ceil_div(ceil_div(a.w.n, kRows), kDirect), 1, task);
        }
        run_panels(
            a, x, token, 1, add_back,
            [&](const PlanesPanel& p, uint8_t* bytes) { unpack_bytes<D>(a.w, p, panel_offset, bytes); },
            [](const PlanesPanel& p) {
              if constexpr (P == 1) planes_product_1(p);
              if constexpr (P == 2) planes_product_2(p);
              if constexpr (P == 3) planes_product_3(p);
            });
      });
}
#endif

// --- floats ------------------------------------------------------------------------------------------------------
// A row vector is kLanes rows: a whole row block, or a part of one on narrower ISAs.
constexpr int kParts = kRows / Simd::kLanes;

LOWBIT_INLINE const uint8_t* row_vector_codes(const Weight& w, int64_t row_vector, int bits) {
  return row_block_codes(w, row_vector / kParts, bits) + row_vector % kParts * Simd::kLanes * kQuad;
}
LOWBIT_INLINE GroupVectors row_vector_group(const Weight& w, int64_t row_vector, int64_t block) {
  return load_group(w, row_vector / kParts, w.group_size > 0 ? block : 0, row_vector % kParts * Simd::kLanes);
}

// W = scale * byte + add for one group of a row vector: the byte form, the group's scale and its zero in one step.
// Why per weight and not per block: with x of one sign, sums of bytes cancel against sums of zeros and lose digits.
struct Affine {
  Simd::F scale, add;
};
LOWBIT_INLINE Affine row_vector_affine(const Weight& w, int64_t row_vector, int64_t block, ByteForm form) {
  const GroupVectors g = row_vector_group(w, row_vector, block);
  const Simd::F scale = Simd::mul(g.scale, Simd::set1(power_of_two(-form.shift)));
  return {scale, Simd::sub(g.zero, Simd::mul(scale, Simd::set1(static_cast<float>(form.offset))))};
}

// Eight sums, one for each parity of the quad and each k of a quad, hide the latency of the multiply-adds.
// Why one row vector at a time: with more, gcc keeps the broadcasts of x in registers for all of them and spills.
constexpr int kSums = 2 * kQuad;

// Adds quads [From, To) of a chunk times x to the sums, dequantized in registers; kScaled: W itself, else bare values.
template <class D, bool kScaled, int From, int To>
LOWBIT_INLINE void fma_quads(const uint8_t* chunk, const float* values, const Affine& w, Simd::F sums[kSums]) {
  unrolled<From, To>([&](auto q) LOWBIT_FORCE_INLINE {
    Simd::F v[kQuad];
    to_floats(D{}, unpack_quad<q>(D{}, chunk), v);
    unrolled<0, kQuad>([&](auto j) LOWBIT_FORCE_INLINE {
      constexpr int i = q % 2 * kQuad + j;
      if constexpr (kScaled) v[j] = Simd::fma(v[j], w.scale, w.add);
      sums[i] = Simd::fma(v[j], Simd::set1(values[q * kQuad + j]), sums[i]);
    });
  });
}

// M = 1: one row vector. Without zeros and offsets (kScaled false) the scale waits for the end of a block.
template <class D, bool kScaled>
void direct_floats(const MatmulArgs& a, const FloatRows& x, ByteForm form, int64_t row_vector) {
  using F = Simd::F;
  const uint8_t* codes = row_vector_codes(a.w, row_vector, D::kBits);
  const int64_t stride = chunk_bytes(D::kBits);
  const int64_t chunks = x.k_padded / kChunk;
  F total = Simd::zero();
  F sums[kSums];
  auto clear = [&]() LOWBIT_FORCE_INLINE {
    unrolled<0, kSums>([&](auto i) LOWBIT_FORCE_INLINE { sums[i] = Simd::zero(); });
  };
  auto collect = [&](F scale) LOWBIT_FORCE_INLINE {
    F sum = sums[0];
    unrolled<1, kSums>([&](auto i) LOWBIT_FORCE_INLINE { sum = Simd::add(sum, sums[i]); });
    total = Simd::fma(sum, scale, total);
  };
  clear();
  for (int64_t block = 0; block < x.blocks; ++block) {
    const Affine w = row_vector_affine(a.w, row_vector, block, form);
    const int64_t first = block * x.block / kChunk;
    if (x.block >= kChunk) {
      for (int64_t c = first; c < std::min(first + x.block / kChunk, chunks); ++c) {
        Simd::prefetch_ahead<D::kBits>(codes + c * stride);
        fma_quads<D, kScaled, 0, kQuads>(codes + c * stride, x.values + c * kChunk, w, sums);
      }
    } else if (block % 2 == 0) {  // blocks of 16: the first or the second half of a chunk
      fma_quads<D, kScaled, 0, kQuads / 2>(codes + first * stride, x.values + first * kChunk, w, sums);
    } else {
      fma_quads<D, kScaled, kQuads / 2, kQuads>(codes + first * stride, x.values + first * kChunk, w, sums);
    }
    if constexpr (!kScaled) {
      collect(w.scale);
      clear();
    }
  }
  if constexpr (kScaled) collect(Simd::set1(1.0f));
  store_rows(a, 0, row_vector * Simd::kLanes, total);
}

// A panel of W itself.
template <class D>
void unpack_floats(const Weight& w, const FloatsPanel& panel, int64_t block_size, ByteForm form, int64_t row_vector,
                   float* values) {
  const int64_t last_block = ceil_div(w.k, block_size) - 1;
  for (int64_t r = 0; r < panel.row_vectors; ++r) {
    const uint8_t* codes = row_vector_codes(w, row_vector + r, D::kBits);
    float* out = values + r * panel.k_count * Simd::kLanes;
    Affine affine[2];
    int64_t block[2] = {-1, -1};  // of the two halves of a chunk: only groups of 16 tell them apart
    for (int64_t k = panel.k_begin; k < panel.k_begin + panel.k_count; k += kChunk, out += kChunk * Simd::kLanes) {
      const uint8_t* chunk = codes + k / kChunk * chunk_bytes(D::kBits);
      unrolled<0, 2>([&](auto half) LOWBIT_FORCE_INLINE {
        // Why the bound: with groups of 16 the padding of the last chunk belongs to no group; x is 0 there.
        const int64_t now = std::min((k + half * kChunk / 2) / block_size, last_block);
        if (now != block[half]) affine[half] = row_vector_affine(w, row_vector + r, block[half] = now, form);
        unrolled<0, kQuads / 2>([&](auto i) LOWBIT_FORCE_INLINE {
          constexpr int q = half * kQuads / 2 + i;
          Simd::F v[kQuad];
          to_floats(D{}, unpack_quad<q>(D{}, chunk), v);
          unrolled<0, kQuad>([&](auto j) LOWBIT_FORCE_INLINE {
            Simd::store(out + (q * kQuad + j) * Simd::kLanes, Simd::fma(v[j], affine[half].scale, affine[half].add));
          });
        });
      });
    }
  }
}

template <class D, ActType A>
void run_floats(const MatmulArgs& a, ByteForm form) {
  const int64_t k_padded = round_up(a.w.k, kChunk);
  const int64_t block = block_size(a.w.group_size);
  const int64_t blocks = ceil_div(a.w.k, block);
  const int64_t pitch = row_pitch(k_padded, sizeof(float));
  const int64_t slab = slab_tokens(a, sizeof(float) * pitch);
  float* memory = static_cast<float*>(scratch(Scratch::kActivations, sizeof(float) * slab * pitch));
  const int64_t row_vectors = ceil_div(a.w.n, Simd::kLanes);
  for (int64_t token = 0; token < a.x.m; token += slab) {
    const int64_t tokens = std::min(slab, a.x.m - token);
    const FloatRows x{tokens, k_padded, pitch, block, blocks, memory};
    const Input input = slab_of(a.x, token, tokens);
    auto prepare = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) copy_token<A>(input, t, a.w.k, x);
    };
    parallel(a.run, tokens, std::max<int64_t>(1, 32768 / k_padded), prepare);

    if (a.x.m == 1) {
      auto task = [&](int64_t begin, int64_t end) {
        const bool scaled = a.w.zero_kind != ZeroKind::kNone || form.offset != 0;
        for (int64_t i = begin; i < end; ++i) {
          if (scaled) {
            direct_floats<D, true>(a, x, form, i);
          } else {
            direct_floats<D, false>(a, x, form, i);
          }
        }
      };
      parallel(a.run, row_vectors, 4 * kParts, task);
      return;
    }
    const int64_t take = rows_a_task(row_vectors, kFloatPanelRows / Simd::kLanes, a.run.threads);
    auto task = [&](int64_t begin, int64_t end) {
      const int64_t panel_values = take * Simd::kLanes * std::min(kFloatPanelK, k_padded);
      const int64_t sum_values = tokens * take * Simd::kLanes;
      float* values = static_cast<float*>(scratch(Scratch::kPanel, (panel_values + sum_values) * sizeof(float)));
      float* sums = values + panel_values;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t rows = round_up(std::min(take, row_vectors - i * take), 2);
        std::memset(sums, 0, static_cast<size_t>(tokens * rows) * Simd::kLanes * sizeof(float));
        for (int64_t k = 0; k < k_padded; k += kFloatPanelK) {
          const FloatsPanel panel{&x, values, sums, rows, k, std::min(kFloatPanelK, k_padded - k)};
          unpack_floats<D>(a.w, panel, block, form, i * take, values);
          floats_product(panel);
        }
        store_slab(a, token, tokens, i * take * Simd::kLanes, rows, sums);
      }
    };
    parallel(a.run, ceil_div(row_vectors, take), 1, task);
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS

#if defined(LOWBIT_ISA_TILES)
#include "pieces.h"
#endif

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

// --- the call ----------------------------------------------------------------------------------------------------
template <class D, ActType A>
void matmul(const MatmulArgs& a, ByteForm form) {
  if (a.x.m == 0 || a.w.n == 0) return;
  if constexpr (UsesBytes<D>::value) {
#if defined(LOWBIT_ISA_BYTE_DOT)
    constexpr int kPlanes = A == ActType::kFloat32 ? 3 : A == ActType::kInt8 ? 1 : 2;
    run_planes<D, kPlanes>(a, form);
#endif
  } else {
#if defined(LOWBIT_ISA_TILES)
    if (a.x.m > 1) return run_pairs<D, A>(a);
#endif
    run_floats<D, A>(a, form);
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
