// A product for kernels that run on a CPU, and what it should give, by a plain loop.
#pragma once
#include <cmath>
#include <cstdio>
#include <random>
#include <string>

#include "args.h"
#include "on_host/guarded.h"
#include "on_host/language.h"
#include "templates/layout.cuh"
#include "templates/types.cuh"

namespace on_host {

using namespace lowbit;

template <class T>
uint16_t bits_of(float value, float* kept = nullptr) {
  const T rounded(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  if (kept) *kept = static_cast<float>(rounded);
  return bits;
}

inline std::mt19937 chance(1);
inline std::vector<std::vector<uint8_t>> scratches;
inline void* scratch(void*, int64_t bytes) { return scratches.emplace_back(bytes, 0xFF).data(); }

// What a kernel finds of x and of what kernels before wrote for it before those have ended: NaN.
struct Hidden {
  Guarded<uint16_t>& x;
  const std::vector<uint16_t>& y;
  std::vector<uint16_t> kept_x, kept_y;
  std::vector<std::vector<uint8_t>> kept;

  void hide() {
    kept_x.assign(x.data, x.data + x.count), kept_y = y, kept = scratches;
    std::memset(x.data, 0xFF, x.bytes());
    for (auto& one : scratches) std::memset(one.data(), 0xFF, one.size());
  }
  // Nothing was written meanwhile.
  void reveal() {
    bool untouched = kept_y == y;
    for (size_t i = 0; i < kept.size(); ++i) {
      for (const uint8_t byte : scratches[i]) untouched &= byte == 0xFF;
      std::memcpy(scratches[i].data(), kept[i].data(), kept[i].size());
    }
    std::memcpy(x.data, kept_x.data(), x.bytes());
    if (!untouched) emulated::fail("a write before the kernel before has ended", 0);
  }
};

constexpr ScaleType kFp16 = ScaleType::kFloat16, kBf16 = ScaleType::kBFloat16, kFp32 = ScaleType::kFloat32;

struct Case {
  int n, k, m, group;
  ZeroKind kind;
  ScaleType scales;
  int blocks, capability;
};

// What codes of a type mean. Integers have an offset, also with zeros.
template <class Type>
struct Values;
template <int Bits>
struct Values<Int<Bits>> {
  static constexpr Affine kAffine{1.0f, 1 << (Bits - 1)};
  static double of(int code) { return code - (1 << (Bits - 1)); }
};
template <int Exponent, int Mantissa>
struct Values<Float<Exponent, Mantissa>> {
  static constexpr Affine kAffine{1.0f, 0.0f};
  static double of(int code) {
    const int mantissa = code & ((1 << Mantissa) - 1), exponent = code >> Mantissa & ((1 << Exponent) - 1);
    const double magnitude = std::ldexp(mantissa + (exponent ? 1 << Mantissa : 0),
                                        std::max(exponent, 1) - Float<Exponent, Mantissa>::kBias - Mantissa);
    return code >> (Exponent + Mantissa) ? -magnitude : magnitude;
  }
};

template <int Bits>
struct Values<Codebook<Bits>> {
  static constexpr Affine kAffine{1.0f, 0.0f};
  static double of(int code) { return (code * 5 % 16 - 6) / 4.0; }
};

template <class Type, class Act>
struct Product {
  static constexpr int kBits = Type::kBits;
  static constexpr uint16_t kUntouched = 0x1234, kNan = 0x7FFF;

  const Case c;
  const layout::Packed packed;
  const int groups, stride, y_stride;
  const bool fractions;  // whether zeros have some: where differences have no more digits than x's type
  Guarded<uint8_t> codes;
  Guarded<uint16_t> scales, zeros, x;  // scales and zeros of fp32: two items
  std::vector<double> weight, plain_x;
  std::vector<float> bias, factors, book;  // factors: of rows
  std::vector<uint16_t> y;
  bool factored = false;
  Hidden hidden{x, y, {}, {}, {}};

  explicit Product(const Case& wanted)
      : c(wanted),
        packed(Layout::kNvidia, c.n, c.k, kBits),
        groups(c.group < 0 ? 1 : (c.k + c.group - 1) / c.group),
        stride((c.k + 7) / 8 * 8 + 8),
        y_stride(c.n + (c.n % 8 ? 3 : 8)),  // rows of y lie at multiples of 16 bytes, or at none
        fractions(c.kind == ZeroKind::kZero && c.m % 4 == 0 && (std::is_same<Act, __half>::value || kBits <= 5)),
        codes(packed.nbytes()),
        scales(size_t((c.n + 15) / 16) * groups * (c.scales == kFp32 ? 32 : 16)),
        zeros(scales.count),
        x(size_t(c.m) * stride),
        weight(size_t(c.n) * c.k),
        plain_x(size_t(c.m) * c.k),
        bias(c.n),
        factors(c.n),
        book(Type::kCodebook ? 1 << kBits : 0),
        y(size_t(c.m) * y_stride) {
    for (int row = 0; row < c.n; ++row) draw_row(row);
    // NaN behind every row of x.
    std::fill(x.data, x.data + size_t(c.m) * stride, kNan);
    for (int token = 0; token < c.m; ++token)
      for (int k = 0; k < c.k; ++k) {
        const int value = static_cast<int>(chance() % 9) - 4;
        plain_x[size_t(token) * c.k + k] = value;
        x.data[size_t(token) * stride + k] = bits_of<Act>(static_cast<float>(value));
      }
    for (float& value : bias) value = static_cast<float>(chance() % 7);
    for (float& value : factors) value = static_cast<float>(1 + chance() % 5) / (chance() % 2 ? 4 : -4);
    emulated::hide = [this] { hidden.hide(); }, emulated::reveal = [this] { hidden.reveal(); };
    for (size_t code = 0; code < book.size(); ++code) book[code] = static_cast<float>(Values<Type>::of(code));
  }

  // A scale or zero, rounded to its type.
  float put(const Guarded<uint16_t>& to, size_t at, float value) const {
    if (c.scales == kFp32) {
      std::memcpy(to.data + 2 * at, &value, 4);
    } else {
      to.data[at] = c.scales == kBf16 ? bits_of<__nv_bfloat16>(value, &value) : bits_of<__half>(value, &value);
    }
    return value;
  }

  void draw_row(int row) {
    float scale = 0, zero = 0;
    for (int k = 0, group = 0; k < c.k; ++k) {
      if (k == 0 || (c.group > 0 && k % c.group == 0)) {
        const size_t at = (size_t(row / 16) * groups + group++) * 16 + layout::group_place(Layout::kNvidia, row % 16);
        const float drawn = static_cast<float>(1 << chance() % 3) / 8 * (chance() % 2 ? 1 : -1);
        scale = put(scales, at, drawn);
        const float quarters = static_cast<float>(fractions ? chance() % 17 : chance() % 5 * 4);
        zero = put(zeros, at, c.kind == ZeroKind::kNone ? 0.0f : quarters / 4);
      }
      const int code = chance() & ((1 << kBits) - 1);
      const double value = Values<Type>::of(code);
      weight[size_t(row) * c.k + k] = c.kind == ZeroKind::kMin ? value * scale + zero : (value - zero) * scale;
      for (int width = 8; width >= 1; width /= 2) {
        if (!(kBits & width)) continue;
        const layout::Spot spot = packed.spot(row, k, width);
        codes.data[spot.byte] |= (code >> layout::plane_low(kBits, width) & ((1 << width) - 1)) << spot.bit;
      }
    }
  }

  // For one run: with factors of rows and without word of whole zeros, or the other way round; with word of even scales
  // or without.
  MatmulArgs pose(bool with_factors, bool even = false) {
    factored = with_factors;
    std::fill(y.begin(), y.end(), kUntouched);
    scratches.clear();
    MatmulArgs args{};
    args.w = {codes.data, scales.data, c.kind != ZeroKind::kNone ? zeros.data : nullptr, c.n, c.k, c.group, {}, c.kind};
    args.w.scale_type = c.scales;
    args.w.codebook = book.empty() ? nullptr : book.data();
    args.w.whole_zeros = c.kind == ZeroKind::kZero && !factored && !fractions;
    args.w.row_scales = factored ? factors.data() : nullptr;
    // Scales are at most 1/2: of those that are even this is a unit, and without word of that they go by zeros.
    args.w.even_unit = even && c.kind == ZeroKind::kNone && c.scales == kFp16 ? 8 : -1;
    args.x = {x.data, c.m, stride, FloatType::kFloat16};
    args.y = {y.data(), y_stride, bias.data(), FloatType::kFloat32};
    return args;
  }

  Launch launch() const {
    Launch launch{};
    launch.follows = c.m % 2;  // so that one stage of weights is asked for early, and more
    launch.capability = c.capability, launch.scratch = scratch;
    launch.clusters[0] = c.blocks, launch.clusters[1] = c.blocks / 2;
    launch.clusters[2] = c.blocks / 4, launch.clusters[3] = c.blocks / 8, launch.clusters[4] = c.blocks / 3;
    return launch;
  }

  // How far y is off, beside 1 and its size.
  double off() const {
    double worst = 0;
    for (int token = 0; token < c.m; ++token)
      for (int row = 0; row < y_stride; ++row) {
        const uint16_t found = y[size_t(token) * y_stride + row];
        if (row >= c.n) {
          if (found != kUntouched) return 1e30;
          continue;
        }
        double wanted = 0;
        for (int k = 0; k < c.k; ++k) wanted += weight[size_t(row) * c.k + k] * plain_x[size_t(token) * c.k + k];
        wanted = (factored ? factors[row] : 1) * wanted + bias[row];
        const double off = std::abs(emulated::half_of<Act>(found, 0) - wanted) / (1 + std::abs(wanted));
        if (!(off <= worst)) worst = off;
      }
    return worst;
  }

  // Prints a line: "right" or "WRONG", and which.
  void report(int error, const std::string& tile, bool late) const {
    const double worst = error ? 1e30 : off();
    const bool right = worst < (std::is_same<Act, __half>::value ? 1e-3 : 8e-3);
    std::printf(
        "%s: %d bits, %s, N %d, K %d, M %d, groups of %d, zero kind %d, scale type %d, %d blocks, %s copies, off by "
        "%.1e\n",
        right ? "right" : "WRONG", kBits, tile.c_str(), c.n, c.k, c.m, c.group, static_cast<int>(c.kind),
        static_cast<int>(c.scales), c.blocks, late ? "late" : "early", worst);
  }
};

}  // namespace on_host
