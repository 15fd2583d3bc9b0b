// Products on bytes: exact integers inside a block of k, for weights whose values a byte holds (ByteForm).
//
//   x -> digit planes (activations.h)     M = 1: direct_planes, straight from the packed planes
//                                         M > 1: unpack a panel -> planes_product (product.h)
#pragma once
#include "call.h"

namespace lowbit::cpu::LOWBIT_ISA_NS {
namespace {

// --- M = 1: straight from the packed planes, each byte read once ---------------------------------------------------
// kStreams row blocks at a time, see run_streams. Their accumulators take turns, quad by quad, so that no dot product
// waits for the one before it.
constexpr int kStreams = 4;

// acc[r][p] += quads [From, To) of chunk r times plane p of x.
template <class D, int P, int From, int To>
LOWBIT_INLINE void dot_quads(const uint8_t* const chunk[kStreams], const int8_t* digits, int64_t plane,
                             Simd::I acc[kStreams][P]) {
  unrolled<From, To>([&](auto q) LOWBIT_FORCE_INLINE {
    Simd::I x[P];  // Why: one load for all row blocks; the load ports are as busy as the multipliers here
    unrolled<0, P>([&](auto p) LOWBIT_FORCE_INLINE { x[p] = Simd::broadcast(digits + p * plane + q * kQuad); });
    unrolled<0, kStreams>([&](auto r) LOWBIT_FORCE_INLINE {
      const Simd::B w = unpack_quad<q>(D{}, chunk[r]);
      unrolled<0, P>([&](auto p) LOWBIT_FORCE_INLINE { acc[r][p] = Simd::dot(acc[r][p], w, x[p]); });
    });
  });
}

template <class D, int P>
void direct_planes(const MatmulArgs& a, const Planes& x, const int64_t row_block[kStreams]) {
  using I = Simd::I;
  using F = Simd::F;
  const int64_t stride = chunk_bytes(D::kBits);
  const int64_t chunks = x.k_padded / kChunk;
  const uint8_t* codes[kStreams];
  F sum[kStreams];
  unrolled<0, kStreams>([&](auto r) LOWBIT_FORCE_INLINE {
    codes[r] = row_block_codes(a.w, row_block[r], D::kBits);
    sum[r] = Simd::zero();
  });
  for (int64_t block = 0; block < x.blocks; ++block) {
    I acc[kStreams][P];
    unrolled<0, P>([&](auto p) LOWBIT_FORCE_INLINE {
      const I start = Simd::broadcast(x.start + block * P + p);
      unrolled<0, kStreams>([&](auto r) LOWBIT_FORCE_INLINE { acc[r][p] = start; });
    });

    // multiply
    const int64_t first = block * x.block / kChunk;
    const int64_t end = std::min(ceil_div((block + 1) * x.block, kChunk), chunks);
    for (int64_t c = first; c < end; ++c) {
      const uint8_t* chunk[kStreams];
      unrolled<0, kStreams>([&](auto r) LOWBIT_FORCE_INLINE {
        chunk[r] = codes[r] + c * stride;
        Simd::prefetch_ahead<D::kBits>(chunk[r]);
      });
      const int8_t* digits = x.digits + c * kChunk;
      if (x.block >= kChunk) {
        dot_quads<D, P, 0, kQuads>(chunk, digits, x.pitch, acc);
      } else if (block % 2 == 0) {  // blocks of 16: the first or the second half of a chunk
        dot_quads<D, P, 0, kQuads / 2>(chunk, digits, x.pitch, acc);
      } else {
        dot_quads<D, P, kQuads / 2, kQuads>(chunk, digits, x.pitch, acc);
      }
    }

    // scale
    unrolled<0, kStreams>([&](auto r) LOWBIT_FORCE_INLINE {
      F v = Simd::to_float(acc[r][0]);
      unrolled<1, P>([&](auto p)
                         LOWBIT_FORCE_INLINE { v = Simd::fma(v, Simd::set1(256.0f), Simd::to_float(acc[r][p])); });
      const GroupVectors g = load_group(a.w, row_block[r], a.w.group_size > 0 ? block : 0, 0);
      sum[r] = Simd::fma(g.scale, Simd::mul(v, Simd::set1(x.scale[block])), sum[r]);
      if (g.has_zero) sum[r] = Simd::fma(g.zero, Simd::set1(x.sum[block]), sum[r]);
    });
  }
  unrolled<0, kStreams>([&](auto r) LOWBIT_FORCE_INLINE { store_rows(a, 0, row_block[r] * kRows, sum[r]); });
}

// Tiles multiply signed bytes, so there the offset is taken off here (from uint8 half of the range, which the caller
// then adds to the zeros); vectors multiply unsigned ones and start from -offset * sum of x.
#if defined(LOWBIT_ISA_TILES)
constexpr bool kSignedPanels = true;
#else
constexpr bool kSignedPanels = false;
#endif

// Calls store(quad index, where it goes) for every quad of the panel, chunk by chunk; `width` is the bytes of a value.
template <class D, class Store>
LOWBIT_INLINE void unpack_panel(const Weight& w, const PlanesPanel& panel, int64_t width, Store&& store) {
  const int64_t block = panel.x->block;
  for (int64_t r = 0; r < panel.row_blocks; ++r) {
    const uint8_t* codes = row_block_codes(w, panel.row_block + r, D::kBits);
    for (int64_t k = panel.k_begin; k < panel.k_begin + panel.k_count; k += kChunk) {
      const uint8_t* chunk = codes + k / kChunk * chunk_bytes(D::kBits);
      unrolled<0, 2>([&](auto half) LOWBIT_FORCE_INLINE {  // blocks of 16 part in the middle of a chunk
        const int64_t at = k + half * kChunk / 2;
        uint8_t* out = panel.at(at / block, r, width) + at % block * kRows * width;
        unrolled<0, kQuads / 2>([&](auto q) LOWBIT_FORCE_INLINE {
          store(unpack_quad<half * kQuads / 2 + q>(D{}, chunk), out + q * kVector * width);
        });
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
        fill(panel);
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
        if constexpr (kOneToken) {
          if (a.x.m == 1) {
            return run_streams<kStreams>(a, ceil_div(a.w.n, kRows), 1,
                                         [&](const int64_t* row_block) { direct_planes<D, P>(a, x, row_block); });
          }
        }
        run_panels(
            a, x, token, 1, add_back,
            [&](const PlanesPanel& p) {
              unpack_panel<D>(a.w, p, 1, [&](Simd::B quad, uint8_t* out) LOWBIT_FORCE_INLINE {
                if constexpr (kSignedPanels) quad = Simd::sub_bytes(quad, panel_offset);
                Simd::store_bytes(out, quad);
              });
            },
            [](const PlanesPanel& p) {
              if constexpr (P == 1) planes_product_1(p);
              if constexpr (P == 2) planes_product_2(p);
              if constexpr (P == 3) planes_product_3(p);
            });
      });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NS
