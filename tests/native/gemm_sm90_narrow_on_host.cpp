// Runs the kernels of csrc/templates/gemm_sm90.cuh for up to 16 rows of x on a CPU (on_host/) and holds y against a
// plain loop. Prints a line a case: "right" or "WRONG", and which. For tests/test_on_host.py.
#include "on_host/language.h"
//
#include "on_host/gemm_sm90.h"

using namespace on_host;

namespace {

template <class Weight, class Act, int Tokens, int Workers = 16>
void run(const Case& c, const Split& split) {
  using Tile = gemm_sm90::Tile<Tokens, Workers>;
  tell_kernels<Weight>(c.kind);
  Product<Weight, Act> product(c);
  Launch launch = product.launch();
  launch.forced = split;
  for (const bool late : {false, true}) {
    emulated::late = late;
    const MatmulArgs args = product.pose(late);
    launch.encode_tensor_map = reinterpret_cast<void*>(emulated::encode);
    const int error = gemm_sm90::launch<Weight, Act, Tile>(args, launch, Values<Weight>::kAffine);
    const std::string cut =
        std::to_string(split.row_tiles) + " x " + std::to_string(split.parts) + " x " + std::to_string(split.blocks);
    product.report(error, "n" + std::to_string(Tokens) + ", " + cut, late);
  }
}

// The plan asks for costs of a codebook as of no float (choice.cpp), so a kernel must too: a step would have a float's
// factor beside its own (split.h), and the kernel would go by another split than the plan means.
constexpr WeightKind kBook = gemm_sm90::kTraits<Codebook<4>, gemm_sm90::Tile<8>, Form<true, ZeroForm::kNone>>.kind;
static_assert(kBook.codebook && !kBook.is_float);

}  // namespace

int main() {
  emulated::memory = gemm_sm90::memory;
  constexpr ZeroKind kNone = ZeroKind::kNone, kZero = ZeroKind::kZero, kMin = ZeroKind::kMin;
  // Each warp has rows of its own. Parts of tasks for workers, the ring turns, fewer rows of x than a tile.
  run<Int<4>, __half, 16>({300, 5000, 13, 128, kNone, kFp16, 5, 90}, {16, 1, 1, 2, 16, 0});
  run<Int<8>, __half, 8>({520, 2700, 8, 32, kMin, kFp16, 7, 90}, {16, 1, 1, 2, 16, 0});
  run<Int<3>, __nv_bfloat16, 8>({270, 3000, 5, -1, kZero, kBf16, 4, 90}, {16, 1, 1, 2, 16, 0});
  run<Float<2, 1>, __half, 16>({300, 3000, 16, 16, kNone, kBf16, 4, 90}, {16, 1, 1, 2, 16, 0});
  // Whole tasks; groups of several steps; tasks of fewer rows, two of a worker.
  run<Int<2>, __half, 8>({300, 300, 5, 256, kZero, kFp16, 1, 90}, {16, 1, 1, 2, 16, 0});
  run<Int<5>, __half, 16>({700, 900, 16, 64, kNone, kFp16, 2, 90}, {14, 1, 1, 3, 16, 0});
  // Warps share K.
  run<Int<4>, __half, 8>({300, 2600, 8, 128, kNone, kFp16, 8, 90}, {4, 4, 1, 2, 16, 0});
  run<Int<8>, __nv_bfloat16, 8>({120, 2000, 3, 128, kNone, kBf16, 8, 90}, {5, 3, 1, 3, 16, 0});
  run<Int<3>, __half, 16>({60, 2000, 16, -1, kMin, kFp16, 7, 90}, {2, 8, 1, 3, 16, 0});
  run<Int<1>, __half, 16>({30, 3000, 11, 128, kNone, kFp16, 8, 90}, {1, 4, 1, 2, 16, 0});
  // Two blocks do, with few steps, and with warps.
  run<Int<6>, __half, 16>({17, 16, 9, 32, kZero, kFp16, 4, 90}, {16, 1, 2, 2, 16, 0});
  run<Int<4>, __half, 16>({300, 4096, 16, 128, kNone, kFp16, 6, 90}, {8, 2, 2, 3, 16, 0});
  run<Int<2>, __half, 16>({128, 5000, 11, 256, kZero, kBf16, 4, 90}, {4, 4, 2, 2, 16, 0});
  run<Int<7>, __half, 16>({200, 2100, 9, 32, kZero, kFp16, 8, 90}, {6, 2, 2, 1, 16, 0});
  run<Int<5>, __nv_bfloat16, 8>({90, 3000, 5, 256, kZero, kBf16, 6, 90}, {2, 8, 2, 3, 16, 0});
  run<Float<3, 2>, __nv_bfloat16, 16>({256, 1500, 16, 64, kNone, kFp16, 8, 90}, {4, 4, 2, 2, 16, 0});
  run<Float<4, 3>, __half, 8>({120, 900, 3, 16, kMin, kFp16, 4, 90}, {8, 2, 2, 3, 16, 0});
  // Scales of 32 bits, values of a codebook.
  run<Int<4>, __half, 16>({300, 900, 16, 64, kNone, kFp32, 3, 90}, {16, 1, 1, 2, 16, 0});
  run<Int<8>, __half, 8>({120, 1300, 8, 128, kZero, kFp32, 8, 90}, {4, 4, 1, 2, 16, 0});
  run<Float<2, 1>, __nv_bfloat16, 16>({100, 700, 9, 32, kNone, kFp32, 4, 90}, {8, 2, 2, 1, 16, 0});
  run<Codebook<4>, __half, 8>({300, 1500, 7, 64, kNone, kFp16, 4, 90}, {16, 1, 1, 2, 16, 0});
  run<Codebook<4>, __half, 16>({120, 2100, 16, 128, kNone, kBf16, 4, 90}, {4, 4, 2, 3, 16, 0});
  run<Codebook<4>, __nv_bfloat16, 16>({90, 600, 12, 64, kNone, kFp32, 8, 90}, {4, 2, 1, 1, 16, 0});
  // One row of x, which comes alone where k is a multiple of 64: by warps that share K, pairs of blocks, halves; sums
  // of x; x that ends within a stage; and by weights for which it does not.
  run<Float<3, 2>, __half, 8>({300, 2624, 1, 128, kNone, kFp16, 8, 90}, {4, 4, 1, 2, 16, 0});
  run<Float<2, 1>, __half, 8>({300, 5056, 1, 128, kNone, kBf16, 5, 90}, {16, 1, 1, 2, 16, 0});
  run<Float<4, 3>, __nv_bfloat16, 8>({120, 1472, 1, 16, kMin, kFp16, 4, 90}, {8, 2, 2, 3, 16, 0});
  run<Float<2, 2>, __half, 8, 8>({200, 1024, 1, 128, kZero, kFp16, 8, 90}, {4, 2, 2, 2, 8, 0});
  run<Float<3, 3>, __half, 8, 8>({300, 4096, 1, 128, kNone, kFp16, 3, 90}, {4, 2, 1, 8, 8, 0, 1});
  run<Codebook<4>, __half, 8, 8>({200, 3008, 1, 64, kNone, kFp32, 6, 90}, {4, 2, 1, 3, 8, 4});
  run<Int<5>, __half, 8, 8>({200, 2112, 1, 16, kMin, kBf16, 8, 90}, {4, 2, 2, 2, 8, 0});
  run<Float<3, 2>, __half, 8>({120, 1500, 1, 128, kNone, kFp16, 4, 90}, {8, 2, 2, 3, 16, 0});
  run<Int<6>, __half, 8>({300, 2624, 1, 128, kNone, kFp16, 8, 90}, {4, 4, 1, 2, 16, 0});
  // 8 warps, in half of a multiprocessor.
  run<Int<4>, __half, 8, 8>({300, 2600, 8, 128, kNone, kFp16, 8, 90}, {4, 2, 1, 3, 8, 8});
  run<Int<4>, __half, 16, 8>({128, 4096, 16, 128, kNone, kFp16, 8, 90}, {8, 1, 2, 9, 8, 6});
  run<Int<6>, __half, 16, 8>({300, 1500, 11, 128, kZero, kFp16, 6, 90}, {8, 1, 2, 2, 8, 1});
  run<Int<1>, __nv_bfloat16, 8, 8>({60, 3000, 8, 256, kZero, kBf16, 8, 90}, {2, 4, 1, 12, 8, 4});
  run<Float<2, 1>, __half, 16, 8>({200, 1000, 16, 128, kNone, kFp16, 8, 90}, {4, 2, 2, 2, 8, 0});
  // Two such blocks on each multiprocessor, the later ones with one stage early; all of a warp's rows without meeting.
  run<Int<4>, __half, 8, 8>({300, 2600, 8, 128, kNone, kFp16, 3, 90}, {4, 2, 1, 8, 8, 0, 1});
  run<Int<6>, __half, 16, 8>({500, 1500, 11, 128, kZero, kFp16, 4, 90}, {8, 1, 2, 2, 8, 0, 1});
  run<Int<2>, __nv_bfloat16, 16, 8>({700, 900, 16, -1, kNone, kBf16, 4, 90}, {7, 1, 1, 2, 8, 0, 1});
  run<Float<2, 1>, __half, 8, 8>({250, 1000, 5, 32, kNone, kFp16, 1, 90}, {8, 1, 1, 8, 8, 0, 1});
  // The same with fine groups, whose scales a warp finds for its lanes: of half a step, a step, two, some beyond K.
  run<Float<2, 1>, __half, 8, 8>({300, 2600, 8, 16, kNone, kFp16, 8, 90}, {4, 2, 1, 3, 8, 8});
  run<Int<4>, __half, 8, 8>({300, 2600, 7, 32, kZero, kBf16, 8, 90}, {4, 2, 1, 3, 8, 8});
  run<Int<4>, __half, 16, 8>({128, 4096, 16, 64, kNone, kFp16, 8, 90}, {8, 1, 2, 9, 8, 6});
  run<Int<2>, __nv_bfloat16, 8, 8>({60, 3000, 8, 64, kZero, kFp32, 8, 90}, {2, 4, 1, 12, 8, 4});
  run<Int<6>, __half, 8, 8>({200, 1000, 5, 64, kMin, kBf16, 8, 90}, {4, 2, 2, 2, 8, 0});
  run<Codebook<4>, __half, 16, 8>({200, 1500, 16, 64, kNone, kFp32, 6, 90}, {8, 1, 2, 2, 8, 1});
  // And of whole multiprocessors, every kind of step.
  run<Int<4>, __half, 8>({300, 2600, 8, 64, kZero, kFp16, 8, 90}, {4, 4, 1, 2, 16, 0});
  run<Int<2>, __half, 16>({128, 5000, 11, 64, kNone, kBf16, 4, 90}, {4, 4, 2, 2, 16, 0});
  run<Int<3>, __half, 16>({60, 2000, 16, 16, kZero, kFp16, 7, 90}, {2, 8, 1, 3, 16, 0});
}
