// Runs the kernels of csrc/templates/gemm_sm80.cuh on a CPU (on_host/) and holds y against a plain loop. Prints a line
// a case: "right" or "WRONG", and which. For tests/test_on_host.py.
#include "on_host/language.h"
//
#include "on_host/product.h"
#include "templates/gemm_sm80.cuh"
#include "templates/gemm_sm80/add_parts.cuh"

namespace lowbit::gemm_sm80 {
alignas(128) uint8_t memory[kSharedLarge];
}

using namespace on_host;

namespace {

// Form: which kernel; void: the one that serves the weight.
template <class Weight, class Act, int Tokens, class Form = void>
void run(const Case& c) {
  using Tile = gemm_sm80::Tile<Tokens>;
  constexpr Affine kAffine = Values<Weight>::kAffine;
  Product<Weight, Act> product(c);
  for (const bool late : {false, true}) {
    emulated::late = late;
    const MatmulArgs args = product.pose(late);
    int error = 0;
    if constexpr (std::is_void<Form>::value) {
      error = gemm_sm80::launch<Weight, Act, Tile>(args, product.launch(), kAffine);
    } else {
      Prepared prepared;
      error = gemm_sm80::launch_kernels(gemm_sm80::kernels<Weight, Act, gemm_sm80::TileFor<Tile, Form>, Form>(), args,
                                        product.launch(), kAffine, prepared);
    }
    product.report(error, "n" + std::to_string(Tokens), late);
  }
}

}  // namespace

int main() {
  emulated::memory = gemm_sm80::memory;
  constexpr ZeroKind kNone = ZeroKind::kNone, kZero = ZeroKind::kZero, kMin = ZeroKind::kMin;
  run<Int<4>, __half, 16>({300, 300, 13, 128, kNone, kFp16, 3, 90});      // more rows than a block, parts of two tasks
  run<Int<4>, __half, 32>({20, 512, 17, 128, kNone, kFp16, 1, 90});       // the last column has few tokens
  run<Int<2>, __half, 8>({300, 1300, 5, 256, kZero, kFp16, 3, 80});       // 8 tokens, two tasks, the ring turns
  run<Int<8>, __nv_bfloat16, 8>({20, 1400, 9, 32, kNone, kBf16, 1, 86});  // a ring of two stages
  run<Int<7>, __half, 16>({20, 3000, 16, 16, kMin, kFp16, 2, 90});  // the finest groups, one copier has two pieces
  run<Int<5>, __nv_bfloat16, 16>({40, 1300, 20, 64, kZero, kBf16, 5, 80});   // two tiles of tokens, the ring turns
  run<Int<1>, __half, 32>({270, 900, 33, 16, kNone, kFp16, 7, 86});          // the finest groups, a short ring
  run<Int<7>, __half, 64>({300, 390, 70, 32, kMin, kFp16, 4, 90});           // three planes
  run<Int<8>, __half, 64>({260, 515, 40, 256, kNone, kBf16, 3, 86});         // a step of a group, odd K
  run<Int<3>, __nv_bfloat16, 128>({30, 520, 140, -1, kZero, kBf16, 3, 90});  // whole rows
  run<Int<4>, __half, 48>({300, 390, 97, 128, kNone, kFp16, 4, 86});         // three tiles of tokens, of 40 each
  run<Int<3>, __nv_bfloat16, 96>({33, 300, 90, 32, kZero, kBf16, 2, 80});
  run<Int<6>, __half, 64>({17, 16, 65, 32, kZero, kFp16, 5, 90});  // less than a stage, blocks without work
  run<Int<2>, __half, 128>({33, 203, 130, 64, kMin, kBf16, 2, 90});
  run<Int<8>, __half, 32>({33, 1000, 32, -1, kMin, kBf16, 1, 86});  // whole rows
  // What floats with zeros take: kernels for fine groups with coarse ones.
  run<Int<6>, __half, 16, Form<true, ZeroForm::kAny>>({40, 1300, 13, 128, kZero, kFp16, 3, 80});
  run<Int<3>, __half, 64, Form<true, ZeroForm::kAny>>({40, 1300, 30, 256, kMin, kFp16, 2, 90});
  run<Int<4>, __nv_bfloat16, 32, Form<true, ZeroForm::kAny>>({20, 515, 20, -1, kZero, kBf16, 3, 80});
  // Floats, and codes of several planes.
  run<Float<2, 1>, __half, 8>({40, 1300, 8, 32, kNone, kBf16, 3, 80});
  run<Int<4>, __half, 8>({40, 1300, 8, 64, kZero, kFp16, 3, 80});  // a warp finds its groups, two pieces of each
  run<Int<3>, __nv_bfloat16, 8>({70, 900, 6, 16, kZero, kBf16, 3, 86});
  run<Float<3, 3>, __half, 16>({70, 600, 11, 128, kZero, kFp16, 2, 86});
  run<Float<2, 2>, __nv_bfloat16, 16>({40, 700, 16, 64, kNone, kBf16, 2, 90});
  run<Float<3, 2>, __nv_bfloat16, 64>({100, 300, 50, 128, kNone, kFp16, 3, 80});
  run<Float<1, 1>, __half, 128>({40, 260, 100, 16, kMin, kFp16, 1, 90});
  run<Int<3>, __half, 8>({300, 1000, 7, 128, kNone, kFp16, 3, 86});
  run<Int<3>, __half, 16>({40, 900, 16, 32, kZero, kFp16, 2, 120});
  run<Int<6>, __half, 8>({40, 700, 3, -1, kZero, kBf16, 2, 90});
  run<Int<7>, __half, 16>({270, 800, 16, 128, kNone, kFp16, 5, 80});
}
