// Runs the kernels of csrc/templates/decode.cuh on a CPU (on_host/), decoders and all, and holds y against a plain
// loop. Clusters are of one block. Prints a line a case: "right" or "WRONG", and which. For tests/test_on_host.py.
#include "on_host/language.h"
//
#include "on_host/product.h"
#include "templates/decode.cuh"

namespace lowbit::decode {
alignas(128) uint8_t memory[kSharedWhole];
}

using namespace on_host;

namespace {

// Whole: blocks of a whole multiprocessor.
template <class Weight, class Act, int Tokens, bool Whole>
void run_one(const Case& c) {
  using Tile = decode::Tile<Tokens, Whole ? decode::Kind::kWhole : decode::Kind::kHalf>;
  constexpr Affine kAffine = Values<Weight>::kAffine;
  Product<Weight, Act> product(c);
  for (const bool late : {false, true}) {
    emulated::late = late;
    const MatmulArgs args = product.pose(late);
    const decode::Problem p = decode::pose(args, kAffine, Weight::kBits, Weight::kFloat);
    int error = cudaErrorInvalidValue;
    if (c.kind == ZeroKind::kNone) {
      error = decode::launch_kernel<Weight, Act, Tile, false>(p, product.launch());
    } else if constexpr (!Weight::kFloat) {
      error = decode::launch_kernel<Weight, Act, Tile, true>(p, product.launch());
    }
    product.report(error, "n" + std::to_string(Tokens) + (Whole ? " whole" : " half"), late);
  }
}

template <class Weight, class Act, int Tokens>
void run(const Case& c) {
  run_one<Weight, Act, Tokens, false>(c);
  run_one<Weight, Act, Tokens, true>(c);
}

}  // namespace

int main() {
  emulated::memory = decode::memory;
  constexpr ZeroKind kNone = ZeroKind::kNone, kZero = ZeroKind::kZero, kMin = ZeroKind::kMin;
  run<Int<3>, __half, 1>({40, 1300, 1, 128, kNone, false, 2, 80});  // odd K, one warp with less than the others
  run<Int<3>, __half, 2>({300, 700, 2, 256, kZero, false, 3, 80});
  run<Int<3>, __nv_bfloat16, 4>({33, 1000, 3, -1, kMin, true, 1, 80});  // fewer rows of x than a tile
  run<Int<4>, __half, 1>({100, 520, 1, 128, kMin, false, 1, 86});
  run<Int<1>, __half, 4>({50, 2000, 4, 128, kZero, true, 2, 80});
  run<Int<2>, __half, 1>({20, 4000, 1, 256, kNone, false, 1, 80});
  run<Int<5>, __nv_bfloat16, 2>({70, 640, 2, 128, kZero, false, 2, 80});
  run<Int<6>, __half, 4>({17, 300, 4, -1, kNone, false, 1, 80});
  run<Int<7>, __half, 1>({90, 1000, 1, 128, kZero, false, 2, 80});
  run<Int<8>, __half, 2>({40, 1500, 2, 256, kMin, false, 2, 80});
  run<Float<2, 1>, __half, 1>({60, 1300, 1, 128, kNone, false, 2, 80});
  run<Float<4, 3>, __half, 4>({40, 900, 3, -1, kNone, true, 1, 80});
}
