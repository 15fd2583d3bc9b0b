// Runs the kernels of csrc/templates/gemm_sm90.cuh for 32 rows of x and more on a CPU (on_host/) and holds y against a
// plain loop. Prints a line a case: "right" or "WRONG", and which. For tests/test_on_host.py.
#include "on_host/language.h"
//
#include "on_host/gemm_sm90.h"

using namespace on_host;

namespace {

// meet: blocks of a cluster that share tasks left over; 1: parts are added up by a second kernel. warps: 8 for kernels
// of half of a multiprocessor. parts: 2 for those whose warpgroups share K of 64 rows.
template <class Weight, class Act, int Tokens>
void run(const Case& c, int meet = 1, int warps = 16, int parts = 1) {
  Product<Weight, Act> product(c);
  Launch launch = product.launch();
  launch.encode_tensor_map = reinterpret_cast<void*>(emulated::encode);
  launch.forced = {8 / parts, parts, meet, 2, warps, 4};
  const bool fine = c.group > 0 && c.group < 128, fuses = gemm_sm90::kEven<Weight, Act, gemm_sm90::Tile<Tokens>>;
  for (const bool late : {false, true})
    for (const bool even : {false, true}) {
      if (even && (!fuses || fine || c.kind != ZeroKind::kNone || c.scales != kFp16)) continue;
      emulated::late = late;
      const MatmulArgs args = product.pose(late, even);
      tell_kernels<Weight>(c.kind, fuses && !fine && !even);
      const int error = gemm_sm90::launch<Weight, Act, gemm_sm90::Tile<Tokens>>(args, launch, Values<Weight>::kAffine);
      const std::string kind = warps == 8 ? " halves by " : parts == 2 ? " of 64 rows by " : " by ";
      product.report(error, (even ? "even n" : "n") + std::to_string(Tokens) + kind + std::to_string(meet), late);
    }
}

}  // namespace

int main() {
  emulated::memory = gemm_sm90::memory;
  constexpr ZeroKind kNone = ZeroKind::kNone, kZero = ZeroKind::kZero, kMin = ZeroKind::kMin;
  // Open sums: parts of tasks, whole tasks, the ring turns, several tiles of tokens.
  run<Int<4>, __half, 32>({300, 1500, 33, 128, kNone, kFp16, 4, 90});
  run<Int<1>, __nv_bfloat16, 32>({520, 1100, 17, 256, kZero, kBf16, 3, 90});
  run<Int<7>, __half, 48>({270, 700, 90, -1, kNone, kFp16, 5, 90});
  run<Int<1>, __half, 48>({270, 700, 90, -1, kNone, kFp16, 5, 90});
  run<Int<4>, __half, 48>({392, 900, 130, 256, kNone, kFp16, 2, 90});
  run<Int<5>, __half, 32>({300, 1500, 33, 128, kNone, kFp16, 4, 90});
  // Sums in units of a scale, warpgroups in turns.
  run<Int<3>, __half, 64>({200, 1300, 60, 256, kNone, kFp16, 3, 90});
  run<Float<2, 1>, __nv_bfloat16, 64>({140, 1000, 64, 128, kNone, kBf16, 1, 90});
  run<Int<5>, __half, 96>({130, 1700, 90, 128, kNone, kFp16, 7, 90});
  run<Int<2>, __half, 128>({136, 600, 200, 128, kZero, kFp16, 2, 90});
  // Several whole tasks a block, whose y goes through a stage that the next task's weights come to.
  run<Int<4>, __half, 64>({392, 700, 130, 128, kNone, kFp16, 2, 90});
  run<Int<8>, __nv_bfloat16, 96>({260, 500, 180, 128, kNone, kBf16, 2, 90});
  // Scaled values: fine groups, zeros of any kind.
  run<Int<8>, __nv_bfloat16, 32>({130, 900, 20, 32, kMin, kBf16, 3, 90});
  run<Float<4, 3>, __half, 64>({136, 1000, 50, 16, kNone, kFp16, 4, 90});
  run<Int<6>, __half, 128>({260, 500, 100, 64, kZero, kFp16, 3, 90});
  // The same of long groups, for what the codes of 6 and 7 bits take.
  run<Int<6>, __half, 96>({130, 1700, 90, 256, kNone, kFp16, 7, 90});
  run<Int<7>, __half, 256>({264, 1300, 250, 128, kZero, kBf16, 6, 90});
  // Two rings; whole lines of y, and rows that are no such; pairs of blocks.
  run<Int<4>, __half, 144>({136, 900, 140, 128, kNone, kFp16, 3, 90});
  run<Int<8>, __nv_bfloat16, 160>({200, 500, 320, -1, kNone, kBf16, 2, 90});
  run<Float<3, 2>, __half, 192>({100, 700, 170, 128, kNone, kFp16, 1, 90});
  run<Int<3>, __half, 208>({264, 300, 209, 256, kNone, kFp16, 2, 90});
  run<Int<4>, __half, 256>({300, 1000, 300, 128, kNone, kFp16, 4, 90});
  run<Int<2>, __nv_bfloat16, 256>({520, 600, 190, 32, kMin, kBf16, 4, 90});
  run<Int<5>, __half, 256>({264, 2100, 17, 128, kZero, kBf16, 6, 90});
  run<Int<8>, __half, 256>({270, 1100, 300, 64, kZero, kFp16, 4, 90});  // two places of weights
  // Sums that meet: of two to four blocks, whole tasks before, clusters without a task, columns that are not shared
  // evenly, tokens that are not there.
  run<Int<4>, __half, 32>({300, 1500, 70, 128, kNone, kFp16, 8, 90}, 4);
  run<Int<1>, __nv_bfloat16, 32>({520, 1100, 17, 256, kZero, kBf16, 4, 90}, 2);
  run<Int<7>, __half, 48>({270, 700, 37, -1, kNone, kFp16, 9, 90}, 3);
  run<Int<4>, __half, 48>({270, 700, 37, 128, kNone, kFp16, 9, 90}, 3);
  run<Int<3>, __half, 48>({130, 1300, 41, 128, kNone, kFp16, 8, 90}, 4);
  run<Int<2>, __half, 64>({200, 1300, 60, 256, kNone, kFp16, 6, 90}, 3);
  run<Int<8>, __half, 64>({140, 900, 50, 128, kNone, kFp32, 6, 90}, 2);
  run<Int<5>, __half, 96>({130, 1700, 90, 128, kNone, kFp16, 6, 90}, 3);
  run<Int<2>, __half, 128>({136, 600, 200, 128, kZero, kFp16, 8, 90}, 2);
  run<Int<6>, __half, 128>({260, 500, 100, 64, kZero, kFp16, 12, 90}, 4);
  run<Int<7>, __half, 128>({120, 3400, 120, 128, kNone, kFp16, 2, 90}, 2);
  // Blocks of half of a multiprocessor: whole tasks, sums that meet, and blocks beyond those, which repeat what others
  // do.
  run<Int<4>, __half, 32>({300, 1500, 40, 128, kNone, kFp16, 8, 90}, 1, 8);
  run<Int<1>, __nv_bfloat16, 32>({520, 1100, 17, 256, kZero, kBf16, 14, 90}, 2, 8);
  run<Int<6>, __half, 32>({200, 2100, 30, 128, kNone, kFp16, 12, 90}, 4, 8);
  run<Int<3>, __half, 32>({200, 2100, 30, -1, kNone, kFp16, 12, 90}, 4, 8);
  run<Int<2>, __half, 32>({130, 900, 20, 32, kMin, kFp16, 6, 90}, 2, 8);
  run<Float<2, 1>, __nv_bfloat16, 64>({140, 1000, 64, 128, kNone, kBf16, 8, 90}, 4, 8);
  run<Int<3>, __half, 64>({130, 1300, 100, -1, kNone, kFp16, 4, 90}, 1, 8);
  run<Int<4>, __half, 64>({250, 1700, 60, 128, kNone, kFp16, 6, 90}, 2, 8);
  // Warpgroups that share K of 64 rows: stages that are odd and even in number, as many as warpgroups, sums that meet
  // between two blocks once more.
  run<Int<4>, __half, 32>({300, 1500, 40, 128, kNone, kFp16, 10, 90}, 1, 16, 2);
  run<Int<5>, __half, 32>({130, 1100, 20, 128, kNone, kFp16, 14, 90}, 2, 16, 2);
  run<Int<1>, __nv_bfloat16, 48>({130, 1100, 41, 256, kNone, kBf16, 14, 90}, 2, 16, 2);
  run<Int<5>, __half, 48>({130, 1100, 41, 256, kNone, kBf16, 14, 90}, 2, 16, 2);
  run<Int<3>, __half, 64>({130, 1300, 100, -1, kNone, kFp16, 6, 90}, 1, 16, 2);
  run<Int<8>, __half, 64>({190, 250, 60, 128, kNone, kFp16, 3, 90}, 1, 16, 2);
  run<Int<5>, __half, 96>({70, 1700, 90, 128, kNone, kFp16, 4, 90}, 2, 16, 2);
  run<Int<2>, __half, 96>({136, 600, 150, 128, kNone, kFp16, 12, 90}, 2, 16, 2);
  run<Int<7>, __half, 96>({120, 1500, 90, 128, kNone, kFp16, 2, 90}, 1, 16, 2);
  run<Int<8>, __nv_bfloat16, 64>({136, 900, 50, 32, kMin, kBf16, 3, 90}, 1, 16, 2);
  run<Int<8>, __half, 64>({140, 900, 50, 128, kNone, kFp32, 3, 90}, 1, 16, 2);
  run<Int<4>, __half, 32>({136, 1100, 30, 64, kZero, kFp16, 6, 90}, 2, 16, 2);
  run<Float<2, 1>, __nv_bfloat16, 32>({130, 900, 23, 32, kNone, kBf16, 3, 90}, 1, 16, 2);
  run<Codebook<4>, __half, 64>({70, 1300, 30, 64, kNone, kFp32, 4, 90}, 2, 16, 2);
  run<Codebook<4>, __nv_bfloat16, 64>({200, 900, 60, -1, kNone, kBf16, 4, 90}, 1, 16, 2);
  // Of 144 tokens and more, where x of the cluster was.
  run<Int<4>, __half, 144>({136, 900, 140, 128, kNone, kFp16, 8, 90}, 4);
  run<Int<8>, __nv_bfloat16, 160>({270, 2100, 150, 128, kNone, kBf16, 9, 90}, 3);
  run<Int<3>, __half, 208>({264, 300, 209, 256, kNone, kFp16, 4, 90}, 2);
  run<Float<3, 2>, __half, 192>({100, 700, 170, 128, kNone, kFp16, 2, 90}, 2);
  run<Int<8>, __half, 192>({100, 700, 170, 128, kNone, kFp16, 4, 90}, 4);
  run<Int<7>, __half, 208>({264, 1900, 190, 128, kNone, kFp16, 9, 90}, 3);
  run<Int<4>, __half, 208>({136, 900, 208, 128, kNone, kFp16, 8, 90}, 4);
  run<Int<4>, __half, 256>({300, 1000, 250, 128, kNone, kFp16, 6, 90}, 2);
  run<Int<7>, __nv_bfloat16, 256>({130, 1700, 200, 128, kZero, kBf16, 4, 90}, 2);
  run<Int<8>, __half, 256>({260, 2100, 256, -1, kNone, kFp16, 8, 90}, 2);
  run<Int<3>, __half, 256>({300, 600, 500, 128, kNone, kFp16, 4, 90}, 2);
  run<Int<2>, __half, 256>({136, 900, 211, 32, kMin, kFp16, 4, 90}, 2);
  run<Codebook<4>, __nv_bfloat16, 256>({120, 700, 230, 64, kNone, kBf16, 2, 90}, 2);
  run<Int<5>, __half, 256>({264, 1500, 230, 128, kNone, kFp16, 12, 90}, 3);
  run<Int<6>, __half, 256>({132, 1300, 250, 256, kZero, kFp16, 8, 90}, 4);
  // Scales of 32 bits, values of a codebook.
  run<Int<8>, __half, 64>({140, 900, 50, 128, kNone, kFp32, 3, 90});
  run<Float<3, 2>, __half, 256>({200, 500, 100, -1, kNone, kFp32, 2, 90});
  run<Codebook<4>, __half, 32>({140, 1000, 30, 64, kNone, kFp32, 3, 90});
  run<Codebook<4>, __nv_bfloat16, 128>({130, 600, 100, 128, kNone, kBf16, 2, 90});
  run<Codebook<4>, __half, 256>({264, 700, 200, 32, kNone, kFp16, 4, 90});
}
