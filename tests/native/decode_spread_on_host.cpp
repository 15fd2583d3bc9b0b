// Which split family decode takes on a device of 132 blocks, 66 pairs, 30 clusters of four and 15 of eight: reads lines
// "bits rows N K" of integers without zeros, and prints "row_tiles parts blocks early warps next_after" for each, then
// "lost" where a block that is launched beyond those that share the product repeats none of them, or one of another
// rank. For tests/test_decode_spread.py.
#include "on_host/language.h"
//
#include <cmath>
#include <cstdio>

#include "templates/decode.cuh"

namespace lowbit::decode {
namespace {

template <int Bits, class Tile>
constexpr const Traits& traits() {
  return kTraits<ByteWorker<Int<Bits>, __half, Tile, Groups<1, ZeroForm::kNone>>, Tile>;
}

template <int Bits, int Tokens>
bool answer_either(const Problem& asked) {
  Launch launch{};
  launch.clusters[0] = 132, launch.clusters[1] = 66, launch.clusters[2] = 30, launch.clusters[3] = 15;
  launch.overlap = true;
  const Traits &half = traits<Bits, Tile<Tokens>>(), &whole = traits<Bits, Tile<Tokens, Kind::kWhole>>();
  const Found found = spread_either(half, whole, asked, launch);
  if (!found.spread.bytes) return false;
  const Problem& p = found.spread.p;
  const int warps = found.whole ? whole.warps : half.warps;
  Problem launched = p;
  const int blocks = launched_blocks(found.whole ? whole : half, launched, launch);
  bool lost = blocks < p.grid;
  for (int block = p.grid; block < blocks; ++block) {
    const int repeated = block & launched.repeated;
    lost |= repeated >= p.grid || (block - repeated) % (1 << p.cluster_shift) != 0;
  }
  std::printf("%d %d %d %d %d %d%s\n", warps >> p.warps_k_shift, 1 << p.warps_k_shift, 1 << p.cluster_shift, p.early,
              warps, p.next_after, lost ? " lost" : "");
  return true;
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
