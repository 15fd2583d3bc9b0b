// Runs the kernels of csrc/templates/decode.cuh on a CPU (on_host/), decoders and all, and holds y against a plain
// loop. Prints a line a case: "right" or "WRONG", and which. For tests/test_on_host.py.
#include "on_host/language.h"
//
#include "on_host/product.h"
#include "templates/decode.cuh"

namespace lowbit::decode {
alignas(128) uint8_t memory[emulated::kMostBlocks * kSharedWhole];
}

using namespace on_host;

namespace {

int several = 0;  // kernels whose sums met in more than one pass

// Whole: blocks of a whole multiprocessor. split: as struct Split says of decode, or the one that the family takes.
template <class Weight, class Act, int Tokens, bool Whole>
void run_one(const Case& c, const Split& split) {
  using Tile = decode::Tile<Tokens, Whole ? decode::Kind::kWhole : decode::Kind::kHalf>;
  constexpr Affine kAffine = Values<Weight>::kAffine;
  Product<Weight, Act> product(c);
  Launch launch = product.launch();
  launch.forced = split, launch.overlap = split.parts > 0;
  const std::string shared = " " + std::to_string(split.row_tiles) + " x " + std::to_string(split.parts) + " x " +
                             std::to_string(split.blocks);
  for (const bool late : {false, true}) {
    emulated::late = late;
    const MatmulArgs args = product.pose(late);
    const decode::Problem p = decode::pose<Weight>(args, kAffine);
    const int error = decode::with_groups<Weight, Tile>(args, [&](auto groups) {
      using Groups = decltype(groups);
      const auto found = decode::spread(decode::kTraits<Weight, Tile, Groups>, p, decode::room_of(launch)).sharing;
      several += found.pass_tiles < found.most_tiles;
      return decode::launch_kernel<Weight, Act, Tile, Groups>(p, launch);
    });
    product.report(error, "n" + std::to_string(Tokens) + (Whole ? " whole" : " half") + shared, late);
  }
}

template <class Weight, class Act, int Tokens>
void run(const Case& c) {
  run_one<Weight, Act, Tokens, false>(c, {});
  run_one<Weight, Act, Tokens, true>(c, {});
}

}  // namespace

int main() {
  emulated::memory = decode::memory;
  constexpr ZeroKind kNone = ZeroKind::kNone, kZero = ZeroKind::kZero, kMin = ZeroKind::kMin;
  run<Int<3>, __half, 1>({40, 1300, 1, 128, kNone, kFp16, 2, 80});  // odd K, one warp with less than the others
  run<Int<3>, __half, 2>({300, 700, 2, 256, kZero, kFp16, 3, 80});
  run<Int<3>, __nv_bfloat16, 4>({33, 1000, 3, -1, kMin, kBf16, 1, 80});  // fewer rows of x than a tile
  run<Int<4>, __half, 1>({100, 520, 1, 128, kMin, kFp16, 1, 86});
  run<Int<1>, __half, 4>({50, 2000, 4, 128, kZero, kBf16, 2, 80});
  run<Int<2>, __half, 1>({20, 4000, 1, 256, kNone, kFp16, 1, 80});
  run<Int<2>, __nv_bfloat16, 4>({20, 4203, 4, 128, kNone, kFp16, 1, 80});  // x comes in three batches, K is odd
  run<Int<5>, __nv_bfloat16, 2>({70, 640, 2, 128, kZero, kFp16, 2, 80});
  // All of a warp brings a row of x, one or two; three rows of x, of which steps do not fill the warps.
  run<Int<2>, __half, 1>({40, 2048, 1, 128, kNone, kFp16, 1, 80});
  run<Int<4>, __nv_bfloat16, 4>({40, 512, 3, 128, kZero, kBf16, 1, 80});
  run<Int<2>, __half, 4>({20, 3003, 3, 128, kNone, kFp16, 1, 80});
  run<Int<6>, __half, 4>({17, 300, 4, -1, kNone, kFp16, 1, 80});
  run<Int<6>, __half, 1>({300, 2300, 1, 128, kMin, kBf16, 3, 80});
  run<Int<7>, __half, 1>({90, 1000, 1, 128, kZero, kFp16, 2, 80});
  run<Int<8>, __half, 2>({40, 1500, 2, 256, kMin, kFp16, 2, 80});
  run<Float<2, 1>, __half, 1>({60, 1300, 1, 128, kNone, kFp16, 2, 80});
  run<Float<1, 1>, __half, 1>({60, 1303, 1, 128, kNone, kFp16, 2, 80});
  run<Float<1, 1>, __nv_bfloat16, 2>({300, 700, 2, 256, kNone, kBf16, 3, 80});
  run<Float<1, 1>, __half, 4>({33, 2100, 4, -1, kNone, kFp16, 1, 80});
  run<Float<2, 1>, __nv_bfloat16, 4>({70, 2100, 3, 128, kNone, kFp16, 2, 80});
  run<Float<4, 3>, __half, 4>({40, 900, 3, -1, kNone, kBf16, 1, 80});
  // Fine groups: of 32 and 64, every width, groups that end with K and that do not, few rows of x.
  run_one<Int<1>, __half, 1, true>({40, 1300, 1, 32, kNone, kFp16, 2, 80}, {});
  run_one<Int<1>, __nv_bfloat16, 1, false>({300, 4100, 1, 64, kZero, kBf16, 1, 80}, {});
  run_one<Int<2>, __half, 1, true>({100, 520, 1, 64, kMin, kFp16, 1, 86}, {});
  run_one<Int<3>, __half, 1, false>({40, 1303, 1, 32, kZero, kFp16, 2, 80}, {});
  run_one<Int<3>, __nv_bfloat16, 1, true>({600, 700, 1, 64, kNone, kFp16, 3, 80}, {});
  run_one<Int<4>, __half, 1, false>({300, 2100, 1, 64, kZero, kFp16, 2, 80}, {});
  run_one<Int<4>, __half, 1, true>({600, 5000, 1, 32, kNone, kBf16, 1, 80}, {});
  run_one<Int<5>, __nv_bfloat16, 1, false>({70, 640, 1, 32, kZero, kFp16, 2, 80}, {});
  run_one<Int<6>, __half, 1, true>({33, 1000, 1, 64, kMin, kBf16, 1, 80}, {});
  run_one<Int<7>, __half, 1, false>({17, 300, 1, 32, kNone, kFp16, 1, 80}, {});
  run_one<Int<8>, __half, 1, true>({90, 1000, 1, 32, kZero, kFp16, 2, 80}, {});
  run_one<Int<2>, __half, 1, false>({520, 4100, 1, 32, kZero, kFp16, 4, 90}, {4, 2, 2, 3, 8, 4});
  run_one<Int<4>, __half, 1, true>({300, 1300, 1, 64, kNone, kFp16, 4, 90}, {1, 16, 2, 2, 16, 1});
  run_one<Float<2, 1>, __half, 1, true>({300, 1300, 1, 32, kNone, kBf16, 2, 90}, {});
  run_one<Float<2, 1>, __nv_bfloat16, 1, false>({40, 2100, 1, 64, kNone, kFp16, 1, 80}, {});
  run_one<Float<2, 1>, __half, 1, false>({300, 1303, 1, 16, kNone, kFp16, 2, 80}, {});
  run_one<Float<2, 1>, __nv_bfloat16, 1, true>({90, 5000, 1, 16, kNone, kBf16, 1, 80}, {});
  run_one<Float<2, 1>, __half, 1, false>({600, 2100, 1, 16, kNone, kFp16, 4, 90}, {4, 2, 2, 3, 8, 4});
  // Sums of many tiles meet in passes: of one block, of two and four that share K.
  run_one<Int<4>, __half, 1, true>({1500, 2100, 1, 128, kNone, kFp16, 1, 90}, {1, 16, 1, 1, 16, 0});
  run_one<Int<7>, __nv_bfloat16, 4, false>({900, 1000, 3, -1, kMin, kBf16, 2, 90}, {2, 4, 2, 8, 8, 8});
  run_one<Int<2>, __half, 4, false>({1000, 2100, 4, 128, kNone, kFp16, 4, 90}, {2, 4, 4, 8, 8, 6});
  // Two blocks share K: the ring turns, a slice without steps, several rows of x.
  run_one<Int<4>, __half, 1, false>({600, 2100, 1, 128, kNone, kFp16, 2, 90}, {4, 2, 2, 3, 8, 4});
  run_one<Int<3>, __half, 2, true>({300, 700, 2, 256, kZero, kFp16, 4, 90}, {1, 16, 2, 1, 16, 0});
  run_one<Int<7>, __nv_bfloat16, 4, false>({90, 1000, 3, -1, kMin, kBf16, 4, 90}, {2, 4, 2, 8, 8, 8});
  run_one<Float<2, 1>, __half, 2, true>({400, 1300, 2, 128, kNone, kFp16, 2, 90}, {8, 2, 2, 2, 16, 1});
  // Stages of two steps, the last one of a slice with one; as many stages as a ring has, all asked for before products,
  // and more than that.
  run_one<Int<3>, __half, 1, false>({300, 1600, 1, 128, kNone, kFp16, 2, 90}, {2, 4, 1, 1, 8, 0});
  run_one<Int<5>, __half, 1, false>({40, 2048, 1, 128, kNone, kFp16, 2, 90}, {2, 4, 1, 4, 8, 0});
  run_one<Int<5>, __half, 1, false>({300, 2040, 1, 128, kNone, kFp16, 2, 90}, {2, 4, 1, 4, 8, 6});
  run_one<Int<6>, __half, 1, false>({520, 640, 1, 128, kZero, kFp16, 3, 90}, {8, 1, 1, 1, 8, 6});
  // Fewer row groups than blocks run at once: those that are left repeat what others do.
  run_one<Int<4>, __half, 1, false>({90, 1300, 1, 128, kNone, kFp16, 7, 90}, {4, 2, 1, 4, 8, 4});
  run_one<Int<3>, __half, 2, false>({40, 1303, 2, 128, kZero, kFp16, 6, 90}, {1, 8, 2, 4, 8, 4});
  run_one<Float<2, 1>, __nv_bfloat16, 1, false>({16, 520, 1, 128, kNone, kFp16, 4, 90}, {2, 4, 1, 1, 8, 0});
  // Two blocks on each multiprocessor, those that begin first with a full ring early: alone, two that share K, fewer
  // than twice as many, so that some repeat what others do, floats of 8 bits.
  run_one<Int<4>, __half, 1, false>({600, 2100, 1, 128, kNone, kFp16, 4, 90}, {1, 8, 1, 8, 8, 0, 1});
  run_one<Int<7>, __nv_bfloat16, 2, false>({700, 2100, 2, 128, kZero, kBf16, 4, 90}, {2, 4, 2, 3, 8, 0, 1});
  run_one<Int<2>, __half, 4, false>({90, 1300, 3, 256, kMin, kFp16, 4, 90}, {1, 8, 1, 2, 8, 0, 1});
  run_one<Float<4, 3>, __half, 1, false>({400, 1300, 1, 128, kNone, kFp16, 3, 90}, {4, 2, 1, 8, 8, 0, 1});
  // Four and eight: blocks that own nothing, slices without steps.
  run_one<Int<2>, __half, 4, false>({600, 2100, 4, 128, kNone, kFp16, 8, 90}, {2, 4, 4, 8, 8, 6});
  run_one<Int<3>, __nv_bfloat16, 2, true>({700, 2100, 2, 256, kZero, kBf16, 4, 90}, {4, 4, 4, 1, 16, 0});
  run_one<Int<1>, __half, 1, false>({300, 1303, 1, 128, kNone, kFp16, 16, 90}, {4, 2, 8, 4, 8, 4});
  run_one<Int<8>, __half, 2, true>({40, 700, 2, -1, kMin, kFp16, 8, 90}, {1, 16, 8, 2, 16, 0});
  if (several != 6) std::printf("WRONG: %d kernels in passes, expected 6\n", several);
}
