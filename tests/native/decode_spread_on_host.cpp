// Which split family decode takes on a device of 132 blocks and 66 pairs: reads lines "bits rows N K" of integers
// without zeros, and prints "row_tiles parts blocks early warps next_after" for each. For tests/test_decode_spread.py.
#include "on_host/language.h"
//
#include <cmath>
#include <cstdio>

#include "templates/decode.cuh"

namespace lowbit::decode {
namespace {

template <int Bits, class Tile>
bool answer(Problem p) {
  Launch launch{};
  launch.clusters[0] = 132, launch.clusters[1] = 66, launch.overlap = true;
  const Traits& traits = kTraits<ByteWorker<Int<Bits>, __half, Tile, Groups<1, ZeroForm::kNone>>, Tile>;
  if (!spread(traits, p, launch)) return false;
  std::printf("%d %d %d %d %d %d\n", traits.warps >> p.warps_k_shift, 1 << p.warps_k_shift, 1 << p.cluster_shift,
              p.early, traits.warps, p.next_after);
  return true;
}

template <int Bits, int Tokens>
bool answer_either(const Problem& p) {
  using Half = Tile<Tokens>;
  using Whole = Tile<Tokens, Kind::kWhole>;
  return prefers_whole(p, Bits) ? answer<Bits, Whole>(p) || answer<Bits, Half>(p)
                                : answer<Bits, Half>(p) || answer<Bits, Whole>(p);
}

template <int Bits = 1>
bool answer_bits(int bits, const Problem& p) {
  if constexpr (Bits <= 8) {
    if (bits != Bits) return answer_bits<Bits + 1>(bits, p);
    return p.m == 1 ? answer_either<Bits, 1>(p) : p.m == 2 ? answer_either<Bits, 2>(p) : answer_either<Bits, 4>(p);
  }
  return false;
}

}  // namespace
}  // namespace lowbit::decode

int main() {
  int bits, rows, n, k;
  while (std::scanf("%d %d %d %d", &bits, &rows, &n, &k) == 4) {
    lowbit::decode::Problem p{};
    p.m = rows, p.n = n, p.k = k, p.tiles = (n + 15) / 16, p.steps = (k + 127) / 128;
    if (!lowbit::decode::answer_bits(bits, p)) std::printf("none\n");
  }
}
