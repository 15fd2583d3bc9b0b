// Runs the kernels of csrc/templates/gemm_sm80.cuh on a CPU (on_host/) and holds y against a plain loop. Prints a line
// a case: "right" or "WRONG", and which. For tests/test_gemm_sm80_on_host.py.
#include "on_host/block.h"
//
#include <cmath>
#include <random>

#include "templates/gemm_sm80.cuh"

namespace lowbit::gemm_sm80 {
alignas(128) uint8_t memory[16];  // stands for shared memory: only its address is taken
}

using namespace lowbit;

namespace {

// Zeros, from a multiple of 64 bytes on.
template <class T>
struct Tensor {
  std::vector<T> raw;
  T* data;
  explicit Tensor(size_t count)
      : raw(count + 64), data(reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(raw.data()) + 63) / 64 * 64)) {}
};

template <class T>
uint16_t bits_of(float value, float* kept = nullptr) {
  const T rounded(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  if (kept) *kept = static_cast<float>(rounded);
  return bits;
}

struct Case {
  int n, k, m, group;
  ZeroKind kind;
  bool bf16_scales;
  int blocks, capability;
};

std::mt19937 chance(1);
std::vector<std::vector<uint8_t>> scratches;

void* scratch(void*, int64_t bytes) { return scratches.emplace_back(bytes, 0xFF).data(); }

// Form: which kernel; void: the one that serves the weight.
template <int Bits, class Act, int Tokens, class Form = void>
void run(const Case& c) {
  constexpr int kOffset = 1 << (Bits - 1);
  constexpr uint16_t kUntouched = 0x1234, kNan = 0x7FFF;
  const layout::Packed packed(Layout::kNvidia, c.n, c.k, Bits);
  const int groups = c.group < 0 ? 1 : (c.k + c.group - 1) / c.group, tiles = (c.n + 15) / 16;
  Tensor<uint8_t> codes(packed.nbytes());
  Tensor<uint16_t> scales(size_t(tiles) * groups * 16), zeros(size_t(tiles) * groups * 16);
  std::vector<double> weight(size_t(c.n) * c.k);
  for (int row = 0; row < c.n; ++row) {
    float scale = 0, zero = 0;
    for (int k = 0, group = 0; k < c.k; ++k) {
      if (k == 0 || (c.group > 0 && k % c.group == 0)) {
        const size_t at = (size_t(row / 16) * groups + group++) * 16 + layout::group_place(Layout::kNvidia, row % 16);
        const float drawn = static_cast<float>(1 << chance() % 3) / 8 * (chance() % 2 ? 1 : -1);
        scales.data[at] = c.bf16_scales ? bits_of<__nv_bfloat16>(drawn, &scale) : bits_of<__half>(drawn, &scale);
        zero = c.kind == ZeroKind::kNone ? 0.0f : static_cast<float>(chance() % 5);
        zeros.data[at] = c.bf16_scales ? bits_of<__nv_bfloat16>(zero) : bits_of<__half>(zero);
      }
      const int code = chance() & ((1 << Bits) - 1), value = code - kOffset;
      weight[size_t(row) * c.k + k] = c.kind == ZeroKind::kMin ? value * scale + zero : (value - zero) * scale;
      for (int width = 8; width >= 1; width /= 2) {
        if (!(Bits & width)) continue;
        const layout::Spot spot = packed.spot(row, k, width);
        codes.data[spot.byte] |= (code >> layout::plane_low(Bits, width) & ((1 << width) - 1)) << spot.bit;
      }
    }
  }
  // NaN behind every row of x.
  const int stride = (c.k + 7) / 8 * 8 + 8, y_stride = c.n + 3;
  Tensor<uint16_t> x(size_t(c.m) * stride);
  std::fill(x.data, x.data + size_t(c.m) * stride, kNan);
  std::vector<double> plain_x(size_t(c.m) * c.k);
  for (int token = 0; token < c.m; ++token)
    for (int k = 0; k < c.k; ++k) {
      const int value = static_cast<int>(chance() % 9) - 4;
      plain_x[size_t(token) * c.k + k] = value;
      x.data[size_t(token) * stride + k] = bits_of<Act>(static_cast<float>(value));
    }
  std::vector<float> bias(c.n);
  for (float& value : bias) value = static_cast<float>(chance() % 7);

  std::vector<float> factors(c.n);  // of rows, where copies are late
  for (float& value : factors) value = static_cast<float>(1 + chance() % 5) / (chance() % 2 ? 4 : -4);

  std::vector<uint16_t> y(size_t(c.m) * y_stride);
  const bool has_zeros = c.kind != ZeroKind::kNone;
  MatmulArgs args{};
  args.w = {codes.data, scales.data, has_zeros ? zeros.data : nullptr, c.n, c.k, c.group, {}, c.kind};
  args.w.scale_type = c.bf16_scales ? ScaleType::kBFloat16 : ScaleType::kFloat16;
  args.x = {x.data, c.m, stride, FloatType::kFloat16};
  args.y = {y.data(), y_stride, bias.data(), FloatType::kFloat32};
  Launch launch{};
  launch.capability = c.capability, launch.clusters[0] = c.blocks, launch.scratch = scratch;
  for (const bool late : {false, true}) {
    emulated::late = late;
    args.w.row_scales = late ? factors.data() : nullptr;
    args.w.whole_zeros = c.kind == ZeroKind::kZero && !late;
    std::fill(y.begin(), y.end(), kUntouched);
    scratches.clear();
    using Tile = gemm_sm80::Tile<Tokens>;
    const Affine affine{1.0f, kOffset};
    int error = 0;
    if constexpr (std::is_void<Form>::value) {
      error = gemm_sm80::launch<Int<Bits>, Act, Tile>(args, launch, affine);
    } else {
      Prepared prepared;
      error = gemm_sm80::launch_kernels(gemm_sm80::kernels<Int<Bits>, Act, gemm_sm80::TileFor<Tile, Form>, Form>(),
                                        args, launch, affine, prepared);
    }
    double worst = error ? 1e30 : 0;
    for (int token = 0; token < c.m; ++token)
      for (int row = 0; row < y_stride; ++row) {
        const uint16_t found = y[size_t(token) * y_stride + row];
        if (row >= c.n) {
          if (found != kUntouched) worst = 1e30;
          continue;
        }
        double wanted = 0;
        for (int k = 0; k < c.k; ++k) wanted += weight[size_t(row) * c.k + k] * plain_x[size_t(token) * c.k + k];
        wanted = (late ? factors[row] : 1) * wanted + bias[row];
        const double off = std::abs(emulated::half_of<Act>(found, 0) - wanted) / (1 + std::abs(wanted));
        if (!(off <= worst)) worst = off;
      }
    const bool right = worst < (std::is_same<Act, __half>::value ? 1e-3 : 8e-3);
    std::printf("%s: %d bits, n%d, N %d, K %d, M %d, groups of %d, zero kind %d, %d blocks, %s copies, off by %.1e\n",
                right ? "right" : "WRONG", Bits, Tokens, c.n, c.k, c.m, c.group, static_cast<int>(c.kind), c.blocks,
                late ? "late" : "early", worst);
  }
}

}  // namespace

int main() {
  constexpr ZeroKind kNone = ZeroKind::kNone, kZero = ZeroKind::kZero, kMin = ZeroKind::kMin;
  run<4, __half, 16>({300, 300, 13, 128, kNone, false, 3, 90});        // more rows than a block, parts of two tasks
  run<4, __half, 32>({20, 512, 17, 128, kNone, false, 1, 90});         // the last column has few tokens
  run<2, __half, 8>({300, 1300, 5, 256, kZero, false, 3, 80});         // 8 tokens, two tasks, the ring turns
  run<8, __nv_bfloat16, 8>({20, 1400, 9, 32, kNone, true, 1, 86});     // a ring of two stages
  run<7, __half, 16>({20, 3000, 16, 16, kMin, false, 2, 90});          // the finest groups, one copier has two pieces
  run<5, __nv_bfloat16, 16>({40, 1300, 20, 64, kZero, true, 5, 80});   // two tiles of tokens, the ring turns
  run<1, __half, 32>({270, 900, 33, 16, kNone, false, 7, 86});         // the finest groups, a short ring
  run<7, __half, 64>({300, 390, 70, 32, kMin, false, 4, 90});          // three planes
  run<8, __half, 64>({260, 515, 40, 256, kNone, true, 3, 86});         // a step of a group, odd K
  run<3, __nv_bfloat16, 128>({30, 520, 140, -1, kZero, true, 3, 90});  // whole rows
  run<4, __half, 48>({300, 390, 97, 128, kNone, false, 4, 86});        // three tiles of tokens, of 40 each
  run<3, __nv_bfloat16, 96>({33, 300, 90, 32, kZero, true, 2, 80});
  run<6, __half, 64>({17, 16, 65, 32, kZero, false, 5, 90});  // less than a stage, blocks without work
  run<2, __half, 128>({33, 203, 130, 64, kMin, true, 2, 90});
  run<8, __half, 32>({33, 1000, 32, -1, kMin, true, 1, 86});  // whole rows
  // What floats with zeros take: kernels for fine groups with coarse ones.
  run<6, __half, 16, Form<true, ZeroForm::kAny>>({40, 1300, 13, 128, kZero, false, 3, 80});
  run<3, __half, 64, Form<true, ZeroForm::kAny>>({40, 1300, 30, 256, kMin, false, 2, 90});
  run<4, __nv_bfloat16, 32, Form<true, ZeroForm::kAny>>({20, 515, 20, -1, kZero, true, 3, 80});
}
