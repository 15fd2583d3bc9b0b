// Products on floats: for ISAs without byte products, and for weights that no byte holds.
//
//   x -> fp32 (activations.h)     M = 1: direct_floats, dequantized in registers
//                                 M > 1: unpack a panel of W -> floats_product (product.h)
#pragma once
#include "call.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

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

constexpr int kFloatStreams = Simd::kFloatStreams;

// sums[r][j] += quads [From, To) of chunk r times x, dequantized in registers; kScaled: W itself, else bare values.
template <class D, bool kScaled, int From, int To>
LOWBIT_INLINE void fma_quads(const D& d, const uint8_t* const chunk[kFloatStreams], const float* values,
                             const Affine w[kFloatStreams], Simd::F sums[kFloatStreams][kQuad]) {
  unrolled<From, To>([&](auto q) LOWBIT_FORCE_INLINE {
    Simd::F x[kQuad];  // Why: one load for all streams; the load ports are the limit here
    unrolled<0, kQuad>([&](auto j) LOWBIT_FORCE_INLINE { x[j] = Simd::set1(values[q * kQuad + j]); });
    unrolled<0, kFloatStreams>([&](auto r) LOWBIT_FORCE_INLINE {
      Simd::F v[kQuad];
      to_floats(d, unpack_quad<q>(d, chunk[r]), v);
      unrolled<0, kQuad>([&](auto j) LOWBIT_FORCE_INLINE {
        if constexpr (kScaled) v[j] = Simd::fma(v[j], w[r].scale, w[r].add);
        sums[r][j] = Simd::fma(v[j], x[j], sums[r][j]);
      });
    });
  });
}

// M = 1: kFloatStreams row vectors at a time. Without zeros and offsets (kScaled false) the scale waits for the end of
// a block.
template <class D, bool kScaled>
void direct_floats(const MatmulArgs& a, const FloatRows& x, ByteForm form, const int64_t row_vector[kFloatStreams]) {
  using F = Simd::F;
  constexpr int R = kFloatStreams;
  const int64_t stride = chunk_bytes(D::kBits);
  const int64_t chunks = x.k_padded / kChunk;
  const D d = decoder_of(a.w, D{});
  const uint8_t* codes[R];
  Affine w[R];
  F total[R];
  F sums[R][kQuad];
  unrolled<0, R>([&](auto r) LOWBIT_FORCE_INLINE {
    codes[r] = row_vector_codes(a.w, row_vector[r], D::kBits);
    total[r] = Simd::zero();
    unrolled<0, kQuad>([&](auto j) LOWBIT_FORCE_INLINE { sums[r][j] = Simd::zero(); });
  });
  auto collect = [&](bool scaled) LOWBIT_FORCE_INLINE {
    unrolled<0, R>([&](auto r) LOWBIT_FORCE_INLINE {
      const F sum = Simd::add(Simd::add(sums[r][0], sums[r][1]), Simd::add(sums[r][2], sums[r][3]));
      total[r] = scaled ? Simd::add(sum, total[r]) : Simd::fma(sum, w[r].scale, total[r]);
      unrolled<0, kQuad>([&](auto j) LOWBIT_FORCE_INLINE { sums[r][j] = Simd::zero(); });
    });
  };
  for (int64_t block = 0; block < x.blocks; ++block) {
    unrolled<0, R>([&](auto r) LOWBIT_FORCE_INLINE { w[r] = row_vector_affine(a.w, row_vector[r], block, form); });
    const int64_t first = block * x.block / kChunk;
    const int64_t end = std::min(ceil_div((block + 1) * x.block, kChunk), chunks);
    for (int64_t c = first; c < end; ++c) {
      const uint8_t* chunk[R];
      unrolled<0, R>([&](auto r) LOWBIT_FORCE_INLINE {
        chunk[r] = codes[r] + c * stride;
        Simd::prefetch_ahead<D::kBits>(chunk[r]);
      });
      const float* values = x.values + c * kChunk;
      if (x.block >= kChunk) {
        fma_quads<D, kScaled, 0, kQuads>(d, chunk, values, w, sums);
      } else if (block % 2 == 0) {  // blocks of 16: the first or the second half of a chunk
        fma_quads<D, kScaled, 0, kQuads / 2>(d, chunk, values, w, sums);
      } else {
        fma_quads<D, kScaled, kQuads / 2, kQuads>(d, chunk, values, w, sums);
      }
    }
    if constexpr (!kScaled) collect(false);
  }
  if constexpr (kScaled) collect(true);
  unrolled<0, R>([&](auto r) LOWBIT_FORCE_INLINE { store_rows(a, 0, row_vector[r] * Simd::kLanes, total[r]); });
}

// A panel of W itself.
template <class D>
void unpack_floats(const Weight& w, const FloatsPanel& panel, int64_t block_size, ByteForm form, int64_t row_vector,
                   float* values) {
  const int64_t last_block = ceil_div(w.k, block_size) - 1;
  const D d = decoder_of(w, D{});
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
          to_floats(d, unpack_quad<q>(d, chunk), v);
          unrolled<0, kQuad>([&](auto j) LOWBIT_FORCE_INLINE {
            Simd::store(out + (q * kQuad + j) * Simd::kLanes, Simd::fma(v[j], affine[half].scale, affine[half].add));
          });
        });
      });
    }
  }
}

// copy: copy_token() of an activation type. Why no template argument: all else is the same code, compiled once.
template <class D>
void run_floats(const MatmulArgs& a, ByteForm form, CopyToken* copy) {
  form.offset = float_offset(D{}, form);
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
      for (int64_t t = begin; t < end; ++t) copy(input, t, a.w.k, x);
    };
    parallel(a.run, tokens, std::max<int64_t>(1, 32768 / k_padded), prepare);

    if constexpr (kOneToken) {
      if (a.x.m == 1) {
        const bool scaled = a.w.zero_kind != ZeroKind::kNone || form.offset != 0;
        return run_streams<kFloatStreams>(a, row_vectors, kParts, [&](const int64_t* row_vector) {
          if (scaled) {
            direct_floats<D, true>(a, x, form, row_vector);
          } else {
            direct_floats<D, false>(a, x, form, row_vector);
          }
        });
      }
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
